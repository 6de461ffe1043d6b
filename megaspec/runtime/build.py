"""From a Spec to what trains: one list of steps, each with its reason."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config

from megaspec.core.errors import Problem, RecipeError, UsageError
from megaspec.core.frozen import Frozen
from megaspec.core.layout import Layout
from megaspec.core.problems import show
from megaspec.model.gpt.model import Gpt
from megaspec.model.gpt.spec import GptSpec
from megaspec.model.llama.model import Llama
from megaspec.model.llama.spec import LlamaSpec
from megaspec.nn.decoder import Decoder, fill_buffers
from megaspec.nn.init import constants, initial_value, standard_deviations, start_weights
from megaspec.nn.linear import COMPILED_FOR_LATER
from megaspec.nn.matrices import Matrix, matrices_of
from megaspec.optim.offload import OffloadedOptimizer
from megaspec.optim.optimizer import MasterOptimizer, build_optimizer
from megaspec.optim.spec import MuonSpec
from megaspec.parallelism.context import ContextParallel
from megaspec.parallelism.data_parallel import DataParallel, Sharing
from megaspec.parallelism.expert import ExpertParallel
from megaspec.parallelism.heads import whole_sequence_heads
from megaspec.parallelism.mesh import Mesh
from megaspec.parallelism.offload import Offload
from megaspec.parallelism.pipeline import Pipeline
from megaspec.parallelism.recompute import Recompute
from megaspec.parallelism.saved import SavedTensors
from megaspec.parallelism.stages import stages_of
from megaspec.parallelism.tensor import TensorParallel
from megaspec.parallelism.whole_matrices import WholeMatrices
from megaspec.recipe import ModelSpec
from megaspec.rules.unbuilt import unbuilt_problems
from megaspec.runtime.position import Position
from megaspec.spec import Spec
from megaspec_kernels.attention import sdpa, sdpa_block
from megaspec_kernels.registry import CrossEntropyKernel, Kernels, kernels_of

MODELS = {LlamaSpec: Llama, GptSpec: Gpt}
# Type of train.loss -> maker of a kernel in place of kernels.cross_entropy; plugins fill it.
LOSSES: dict[type[Frozen], Callable[[Frozen], CrossEntropyKernel]] = {}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Summed:
    """What the buckets' gradients are, once backward passes were summed over all ranks."""

    loss_scale: Tensor
    """The factor in them."""
    is_spent: bool = False
    """An update was made with them, which may have overwritten them."""


@dataclass(kw_only=True)
class TrainState:
    """One rank's share of a run."""

    spec: Spec
    mesh: Mesh
    device: torch.device
    chunks: list[Decoder]
    """The parts of the model that lie here, in the order of virtual stages; the whole model without a pipeline."""
    starts: "InitSpec"
    tensor_parallel: TensorParallel
    context_parallel: ContextParallel
    expert_parallel: ExpertParallel
    pipeline: Pipeline
    data_parallel: DataParallel
    optimizer: MasterOptimizer
    position: Position
    summed: Summed | None = None
    """None: no backward pass has been summed, or a new one is under way."""

    @property
    def model(self) -> Decoder:
        """The only chunk of a run without a pipeline."""
        assert len(self.chunks) == 1, f"{len(self.chunks)} chunks"
        return self.chunks[0]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Those of all chunks, by global name."""
        return self.data_parallel.parameters

    @property
    def shards(self) -> dict[str, Layout]:
        """Where the gradients, master weights and optimizer states of this rank lie."""
        return self.data_parallel.shards

    @property
    def wide(self) -> torch.dtype:
        """What sums are taken in: at least fp32."""
        return torch.promote_types(DTYPES[self.spec.precision.kind], torch.float32)


@dataclass(frozen=True)
class InitSpec:
    """How parameters are initialised, by global name."""

    stds: dict[str, float]
    constants: dict[str, float]


def build_model(spec: ModelSpec, kernels: Kernels, *, dtype: torch.dtype) -> Decoder:
    """The one-device model on the meta device: shapes, no memory. See `materialise` and `plain_model`."""
    with torch.device("meta"):
        model = MODELS[type(spec)](spec, kernels)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def materialise(model: nn.Module, *, device: torch.device, dtype: torch.dtype, weights: bool = True) -> None:
    """Gives every parameter and buffer memory on `device`; parameters that are shared stay shared.

    Parameters hold NaN until they are initialised or loaded, so that a forgotten one shows. Without `weights` they are
    on the device, too, but their memory is still to come, with the buffers that ranks share out.
    """
    real: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in real:
                full = torch.full(parameter.shape, float("nan"), dtype=parameter.dtype, device=device)
                if not weights:
                    full.untyped_storage().resize_(0)
                real[id(parameter)] = nn.Parameter(full)
            setattr(module, name, real[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            wide = torch.promote_types(dtype, torch.float32) if buffer.is_floating_point() else buffer.dtype
            setattr(module, name, torch.empty(buffer.shape, dtype=wide, device=device))
    fill_buffers(model)


@torch.no_grad()
def initialise(built: TrainState) -> None:
    """Starts the master weights from the seed, the same in every layout, and copies them into the model."""
    for name, weight in built.data_parallel.weights.items():
        value = initial_value(
            built.shards[name],
            seed=built.spec.train.seed,
            std=built.starts.stds.get(name),
            constant=built.starts.constants.get(name),
            like=weight,
        )
        built.optimizer.put("master", name, value)
    built.optimizer.write_back()
    built.data_parallel.gather_weights()


def plain_model(spec: Spec, *, device: torch.device, dtype: torch.dtype | None = None) -> Decoder:
    """The whole model of a Spec on one device and nothing around it: a module of torch's, for optimizers of torch's.

    Weights start as those of every layout do, `backward` leaves gradients in `.grad`, and there are no master weights
    beside the model's. `dtype`: of the weights; None: of the Spec's precision. Nothing is compiled or split.
    """
    dtype = DTYPES[spec.precision.kind] if dtype is None else dtype
    model = build_model(spec.model, _kernels(spec), dtype=dtype)
    materialise(model, device=device, dtype=dtype)
    start_weights(model, std=spec.model.init_std, n_layers=spec.model.n_layers, seed=spec.train.seed)
    return model


def _kernels(spec: Spec) -> Kernels:
    kernels, loss = kernels_of(spec.kernels), getattr(spec.train, "loss", None)
    return kernels if loss is None else replace(kernels, cross_entropy=LOSSES[type(loss)](loss))


@dataclass(frozen=True)
class SplitModel:
    """This rank's part of a model, in memory, and how it was split."""

    chunks: list[Decoder]
    starts: InitSpec
    tensor_parallel: TensorParallel
    context_parallel: ContextParallel
    expert_parallel: ExpertParallel
    pipeline: Pipeline
    matrices: dict[str, tuple[Matrix, ...]]
    """What Muon makes orthogonal, by parameter of the whole model."""


def build_split_model(spec: Spec, *, mesh: Mesh) -> SplitModel:
    """The chunks with this rank's shapes; weights are NaN until they are filled."""
    dtype = DTYPES[spec.precision.kind]
    # on the meta device, so that no rank ever holds the whole model
    kernels = _kernels(spec)
    model = build_model(spec.model, kernels, dtype=dtype)
    # while they are whole
    matrices = matrices_of(model)
    stds = standard_deviations(model, std=spec.model.init_std, n_layers=spec.model.n_layers)
    starts = InitSpec(stds, constants(model))
    # first, so that tensor parallel tells the attention that stays which heads are here
    context = ContextParallel(mesh, spec.parallelism.context, kernels.attention_merge)
    context.split_model(model)
    # before memory is taken: modules become their parallel twins with this rank's shapes
    own, overlap = spec.parallelism, spec.parallelism.overlap
    tensor = TensorParallel(mesh, own.sequence_parallel, overlap.tp)
    tensor.split_model(model, model.placement)
    # behind it, since routers ask which tokens their tensor-parallel rank has
    experts = ExpertParallel(mesh, own, index=context.index, overlap_shared=overlap.shared_experts)
    experts.split_model(model)
    pipeline = Pipeline(mesh, own.pipeline, dtype, tied=model.tied, overlap=overlap.p2p)
    chunks = [model] if mesh.size("pp") == 1 else _parts(model, spec, mesh)
    # where weights are shared out, no rank ever holds all of its chunks': their memory comes with the buckets
    kept = own.dp_strategy == "replicate"
    # in one module, so that what chunks share stays shared
    materialise(nn.ModuleList(chunks), device=mesh.device, dtype=dtype, weights=kept)
    # blocks are equal, so one compiled block serves all; after the split, so that collectives are traced
    if spec.kernels.compile == "block":
        _compile_blocks(chunks, for_later=pipeline.splits_backward)
    return SplitModel(chunks, starts, tensor, context, experts, pipeline, matrices)


def _parts(model: Decoder, spec: Spec, mesh: Mesh) -> list[Decoder]:
    """The chunks of this pipeline rank."""
    stages = stages_of(spec.model.n_layers, spec.parallelism)[mesh.index("pp")]
    return [model.part(stage.layers, embedding=stage.embedding, head=stage.head) for stage in stages]


def _compile_blocks(chunks: Sequence[Decoder], *, for_later: bool) -> None:
    """`for_later`: weight gradients may be deferred, with what they multiply."""
    if for_later:
        functorch_config.donated_buffer = False
    for layer in (layer for chunk in chunks for layer in chunk.layers.values()):
        layer.compile_parts(options=COMPILED_FOR_LATER if for_later else None)


def build(spec: Spec, *, mesh: Mesh, position: Position | None = None) -> TrainState:
    """Everything but the weights' values: call `initialise`, or load a checkpoint. `position`: where a watchdog looks.
    The process's random generators stay as they are. RecipeError: the Spec asks for what can be planned only."""
    problems = unbuilt_problems(spec)
    if problems:
        raise RecipeError(problems)
    _set_determinism(spec)
    _refuse_attention(spec, device=mesh.device)
    split = build_split_model(spec, mesh=mesh)
    tensor = split.tensor_parallel
    own = spec.parallelism
    # before units are sharded: what is computed again together is gathered once
    saved = SavedTensors()
    recompute = Recompute(own.recompute, saved, compiled=spec.kernels.compile == "block")
    offload = Offload(own.offload.layers, saved, device=mesh.device)
    for chunk in split.chunks:
        recompute.apply(chunk)
        offload.apply(chunk)
    # last: its hooks and buffers hang on the final parameters
    sharing = Sharing(
        own.dp_strategy, own.bucket_mb * 1e6, own.grad_reduce, own.overlap.grad_reduce, own.overlap.param_gather
    )
    layouts = split.pipeline.share(tensor.layouts)
    data = DataParallel(
        split.chunks,
        layouts=layouts,
        mesh=mesh,
        sharing=sharing,
        experts=frozenset(tensor.experts),
        shared=split.pipeline.shared,
    )
    optimizer = _optimizer(spec, data, split.matrices, mesh=mesh)
    for chunk in split.chunks:
        # of each, since a part of the model can be asked as well
        for module in chunk.modules():
            module.register_load_state_dict_pre_hook(_refuse_state_dict)
    # outermost, so that what other strategies do in a unit is told as part of it
    position = position or Position(mesh.device)
    for chunk in split.chunks:
        position.watch(chunk)
    return TrainState(
        spec=spec,
        mesh=mesh,
        device=mesh.device,
        chunks=split.chunks,
        starts=split.starts,
        tensor_parallel=tensor,
        context_parallel=split.context_parallel,
        expert_parallel=split.expert_parallel,
        pipeline=split.pipeline,
        data_parallel=data,
        optimizer=optimizer,
        position=position,
    )


def _refuse_state_dict(*_: object) -> None:
    """UsageError, in place of values that the next step would write the master weights over."""
    text = "load_state_dict knows nothing of the master weights and the layout that a built model's weights go with"
    raise UsageError(f"{text}; megaspec.set_weights(built, values) sets them all, from whole tensors by global name")


def _refuse_attention(spec: Spec, *, device: torch.device) -> None:
    """RecipeError where no fused kernel of this torch and GPU takes the attention: it would keep the scores unasked.
    After determinism is set, which decides what may be taken."""
    if device.type != "cuda" or spec.kernels.attention != "sdpa":
        return
    model, dtype, masked = spec.model, DTYPES[spec.precision.kind], spec.data.document_mask
    heads = whole_sequence_heads(model.n_heads, model.n_kv_heads, parallelism=spec.parallelism)
    if heads is None:
        refused = sdpa_block.is_refused(d_head=model.d_head, dtype=dtype)
        asked = f"heads of {model.d_head} in {spec.precision.kind}"
    else:
        refused = sdpa.is_refused(
            n_heads=heads[0],
            n_kv_heads=heads[1],
            d_head=model.d_head,
            tokens=spec.data.seq_len,
            masked=masked,
            dtype=dtype,
            device=device,
        )
        asked = f"{heads[0]} query heads of {model.d_head} on {heads[1]} of keys and values in {spec.precision.kind}"
        asked += f" with data.document_mask={show(masked)} and train.deterministic={show(spec.train.deterministic)}"
    if refused:
        text = f"kernels.attention=sdpa: no fused kernel of torch {torch.__version__} takes {asked} on this GPU"
        way_out = "set kernels.attention=reference, which keeps all scores"
        raise RecipeError([Problem("kernels.attention", f"{text}; {way_out}", code="kernel-attention")])


def _optimizer(
    spec: Spec, data: DataParallel, matrices: Mapping[str, tuple[Matrix, ...]], *, mesh: Mesh
) -> MasterOptimizer:
    share, adamw = spec.parallelism.offload.optimizer, spec.kernels.adamw
    if share > 0:
        return OffloadedOptimizer(data.weights, spec.optim, share=share, adamw=adamw)
    if isinstance(spec.optim, MuonSpec):
        group = mesh.group("tp-dp-cp")
        whole = WholeMatrices(data.shards, matrices, group=group, device=mesh.device)
        return build_optimizer(data.weights, spec.optim, adamw=adamw, matrices=whole)
    return build_optimizer(data.weights, spec.optim, adamw=adamw)


def mesh_of(spec: Spec, *, rank: int, device: torch.device, timeout: timedelta | None = None) -> Mesh:
    """The mesh that a Spec describes."""
    own = spec.parallelism
    return Mesh(own.degrees, rank=rank, device=device, timeout=timeout, ep=own.ep, etp=own.etp)


def _set_determinism(spec: Spec) -> None:
    torch.use_deterministic_algorithms(spec.train.deterministic)
    if spec.train.deterministic:
        # read when the first matrix product opens cuBLAS; without it torch refuses to call itself deterministic
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
