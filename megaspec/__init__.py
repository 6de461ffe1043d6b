"""Declarative training of large transformers. The pieces of a run, loaded when they are first used."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_WHERE = {
    "compose_recipe": "megaspec.compose.compose:compose",
    "Recipe": "megaspec.recipe:Recipe",
    "Spec": "megaspec.spec:Spec",
    "Target": "megaspec.estimate.target:Target",
    "Facts": "megaspec.rules.run_facts:Facts",
    "detect_target": "megaspec.estimate.target:detect_target",
    "gather_facts": "megaspec.resolve.gather:gather_facts",
    "resolve_recipe": "megaspec.resolve.resolver:resolve",
    "MegaspecError": "megaspec.core.errors:MegaspecError",
    "RecipeError": "megaspec.core.errors:RecipeError",
    "Mesh": "megaspec.parallelism.mesh:Mesh",
    "build": "megaspec.runtime.build:build",
    "initialise": "megaspec.runtime.build:initialise",
    "train_step": "megaspec.runtime.step:train_step",
    "BatchSchedule": "megaspec.train.batch_schedule:BatchSchedule",
    "Loader": "megaspec.data.loader:Loader",
    "open_source": "megaspec.data.loader:open_source",
    "learning_rate": "megaspec.optim.schedule:learning_rate",
    "weight_decay": "megaspec.optim.schedule:weight_decay",
    "build_scaler": "megaspec.precision.scaler:build_scaler",
    "Store": "megaspec.checkpoint.store:Store",
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
