"""Declarative training of large transformers. The pieces of a run, loaded when they are first used."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_WHERE = {
    # settings
    "compose_recipe": "megaspec.compose.compose:compose",
    "compose_dicts": "megaspec.compose.compose:compose_dicts",
    "Composed": "megaspec.compose.compose:Composed",
    "Recipe": "megaspec.recipe:Recipe",
    "Spec": "megaspec.spec:Spec",
    "Target": "megaspec.estimate.target:Target",
    "Facts": "megaspec.rules.run_facts:Facts",
    "detect_target": "megaspec.estimate.target:detect_target",
    "gather_facts": "megaspec.resolve.gather:gather_facts",
    "resolve_recipe": "megaspec.resolve.resolver:resolve",
    "spec_from": "megaspec.spec_from:spec_from",
    # errors
    "Problem": "megaspec.core.errors:Problem",
    "MegaspecError": "megaspec.core.errors:MegaspecError",
    "RecipeError": "megaspec.core.errors:RecipeError",
    "DataError": "megaspec.core.errors:DataError",
    "CheckpointError": "megaspec.core.errors:CheckpointError",
    "UsageError": "megaspec.core.errors:UsageError",
    # models
    "Mesh": "megaspec.parallelism.mesh:Mesh",
    "mesh_of": "megaspec.runtime.build:mesh_of",
    "Position": "megaspec.runtime.position:Position",
    "TrainState": "megaspec.runtime.build:TrainState",
    "build": "megaspec.runtime.build:build",
    "initialise": "megaspec.runtime.build:initialise",
    "Decoder": "megaspec.nn.decoder:Decoder",
    "plain_model": "megaspec.runtime.build:plain_model",
    "build_model": "megaspec.runtime.build:build_model",
    "materialise": "megaspec.runtime.build:materialise",
    "Kernels": "megaspec_kernels.registry:Kernels",
    "kernels_of": "megaspec_kernels.registry:kernels_of",
    # data
    "Batch": "megaspec.data.batch:Batch",
    "Documents": "megaspec_kernels.attention.documents:Documents",
    "documents_of": "megaspec_kernels.attention.documents:documents_of",
    "StepBatch": "megaspec.data.loader:StepBatch",
    "Source": "megaspec.data.source:Source",
    "BatchSchedule": "megaspec.train.batch_schedule:BatchSchedule",
    "Loader": "megaspec.data.loader:Loader",
    "open_source": "megaspec.data.loader:open_source",
    "eval_batches": "megaspec.data.loader:eval_batches",
    # steps
    "train_step": "megaspec.runtime.step:train_step",
    "StepResult": "megaspec.runtime.step:StepResult",
    "Limits": "megaspec.train.guard:Limits",
    "StepChecks": "megaspec.runtime.step:StepChecks",
    "forward_backward": "megaspec.runtime.step:forward_backward",
    "count_tokens": "megaspec.runtime.step:count_tokens",
    "evaluate": "megaspec.runtime.step:evaluate",
    "learning_rate": "megaspec.optim.schedule:learning_rate",
    "weight_decay": "megaspec.optim.schedule:weight_decay",
    "LossScaler": "megaspec.precision.scaler:LossScaler",
    "build_scaler": "megaspec.precision.scaler:build_scaler",
    # weights and gradients by global name
    "weights": "megaspec.runtime.weights:weights",
    "set_weights": "megaspec.runtime.weights:set_weights",
    "gradients": "megaspec.runtime.weights:gradients",
    "weight_shards": "megaspec.runtime.weights:weight_shards",
    "gradient_shards": "megaspec.runtime.weights:gradient_shards",
    "WeightShard": "megaspec.runtime.weights:WeightShard",
    "Layout": "megaspec.core.layout:Layout",
    "Piece": "megaspec.core.layout:Piece",
    # checkpoints
    "Store": "megaspec.checkpoint.store:Store",
    "Reader": "megaspec.checkpoint.reader:Reader",
    "RunLock": "megaspec.checkpoint.lock:RunLock",
    "SoloComm": "megaspec.checkpoint.comm:SoloComm",
    "DistComm": "megaspec.checkpoint.comm:DistComm",
    "load_checkpoint": "megaspec.runtime.state:load",
    "checkpoint_pieces": "megaspec.runtime.state:pieces_of",
    "checkpoint_progress": "megaspec.runtime.state:progress",
}
__all__ = ["__version__", *_WHERE]


def __getattr__(name: str) -> Any:
    """A public name. Modules that need torch load it only when one of their names is used."""
    if name not in _WHERE:
        raise AttributeError(f"module megaspec has no attribute {name!r}")
    module, _, attribute = _WHERE[name].partition(":")
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
