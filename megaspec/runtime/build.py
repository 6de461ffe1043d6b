"""From a Spec to what trains. The order in which strategies are applied stands in `_split_model`, `_apply` and
`_wrap_optimizer`, one behind the other, a line and a reason each. megaspec/parallelism/README.md shows a strategy."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config

from megaspec.core.errors import Problem, RecipeError, UsageError
from megaspec.core.layout import Layout
from megaspec.core.problems import show
from megaspec.core.weight_facts import WeightFacts
from megaspec.nn.decoder import Decoder, fill_buffers
from megaspec.nn.fp4 import Fp4Form
from megaspec.nn.fp8 import Fp8Form
from megaspec.nn.fp8_layouts import FORMATS
from megaspec.nn.fp8_mx import MxFp8Form
from megaspec.nn.fp8_te import TeFp8Form
from megaspec.nn.init import initial_value, start_weights
from megaspec.nn.linear import COMPILED, COMPILED_FOR_LATER
from megaspec.nn.model_facts import InitialValues, Matrix, ModelFacts
from megaspec.optim.freeze import Freeze
from megaspec.optim.offload import OptimizerOffload
from megaspec.optim.optimizer import MasterOptimizer, build_optimizer
from megaspec.optim.spec import MuonSpec
from megaspec.parallelism.context import ContextParallel
from megaspec.parallelism.data_parallel import DataParallel, Sharing
from megaspec.parallelism.expert import ExpertParallel
from megaspec.parallelism.fp8 import AnyForm, Fp8
from megaspec.parallelism.heads import whole_sequence_heads
from megaspec.parallelism.mesh import Mesh
from megaspec.parallelism.offload import Offload
from megaspec.parallelism.pipeline import Pipeline
from megaspec.parallelism.recompute import Recompute
from megaspec.parallelism.saved import SavedTensors
from megaspec.parallelism.spec import ParallelismSpec
from megaspec.parallelism.stages import first_trained_stage, stages_of
from megaspec.parallelism.tensor import TensorParallel, use_products
from megaspec.parallelism.whole_matrices import MatrixUpdates
from megaspec.precision.spec import BLACKWELL_SM, Fp8Precision, fp8_recipe, model_format
from megaspec.recipe import ModelSpec
from megaspec.rules.unbuilt import unbuilt_problems
from megaspec.runtime.plugins import loaded_builders
from megaspec.runtime.position import Position
from megaspec.spec import Spec
from megaspec.train.trainable import trained_names
from megaspec_kernels import te_package
from megaspec_kernels.attention import sdpa, sdpa_block
from megaspec_kernels.attention import te as te_attention
from megaspec_kernels.attention.packages import MODULES as ATTENTION_MODULES
from megaspec_kernels.attention.packages import require
from megaspec_kernels.catalog import CATALOG
from megaspec_kernels.linear import mxfp8_check, nvfp4_check
from megaspec_kernels.registry import Kernels, LinearKernel, kernels_of
from megaspec_kernels.scaled_product import cublaslt

# What torch's kernels of attention are called, see sdpa.served_by.
KERNEL_NAMES = {"cudnn": "cuDNN", "flash": "FlashAttention-2", "efficient": "memory-efficient attention"}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def model_dtype(spec: Spec) -> torch.dtype:
    """Of weights and activations."""
    return DTYPES[model_format(spec.precision)]


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
    facts: dict[str, WeightFacts]
    """Of all parameters of the whole model."""
    starts: InitialValues
    tensor_parallel: TensorParallel
    context_parallel: ContextParallel
    expert_parallel: ExpertParallel
    pipeline: Pipeline
    data_parallel: DataParallel
    fp8: Fp8
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
        return torch.promote_types(model_dtype(self.spec), torch.float32)


def build_model(spec: ModelSpec, kernels: Kernels, *, dtype: torch.dtype) -> Decoder:
    """The one-device model on the meta device: shapes, no memory. See `materialise` and `plain_model`."""
    builders = loaded_builders()
    with torch.device("meta"):
        model = builders.models[type(spec)](spec, kernels, builders.parts)
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
            buffer_dtype = buffer.dtype
            if buffer.is_floating_point():
                # angles and biases of routers, whatever the model's format
                buffer_dtype = torch.promote_types(dtype, torch.float32)
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer_dtype, device=device))
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
    beside the model's. What train.trainable freezes asks for no gradient. `dtype`: of the weights; None: of the Spec's
    precision. Nothing is compiled or split.
    """
    if dtype is None:
        dtype = model_dtype(spec)
    model = build_model(spec.model, _kernels(spec), dtype=dtype)
    materialise(model, device=device, dtype=dtype)
    start_weights(model, std=spec.model.init_std, seed=spec.train.seed)
    trained = trained_names(model.facts, spec.train.trainable)
    for name, parameter in model.global_parameters().items():
        parameter.requires_grad_(name in trained)
    return model


def _check_takes(kernel: Callable[..., Tensor], name: str, is_asked: bool, loss: str, setting: str) -> None:
    """UsageError: a loss of a plug-in does not take what the model's head asks of it."""
    if is_asked and name not in signature(kernel).parameters:
        text = f"{loss} takes no {name}, which {setting} asks of a loss"
        raise UsageError(f"{text}; set train.loss=null, or add {name} to it as megaspec/README.md says")


def _kernels(spec: Spec) -> Kernels:
    """The functions that a Spec names, with the loss of a plug-in in place of the cross-entropy's."""
    kernels = kernels_of(spec.kernels)
    loss = spec.train.loss
    if loss is None:
        return kernels
    kernel = loaded_builders().losses[type(loss)](loss)
    _check_takes(kernel, "bias_V", spec.model.head_bias, f"train.loss.kind={loss.kind}", "model.head_bias=true")
    is_shaped = spec.model.logit_scale != 1.0 or spec.model.logit_cap is not None
    shape = f"model.logit_scale={spec.model.logit_scale} with model.logit_cap={show(spec.model.logit_cap)}"
    _check_takes(kernel, "form", is_shaped, f"train.loss.kind={loss.kind}", shape)
    return replace(kernels, cross_entropy=kernel)


@dataclass(frozen=True, kw_only=True)
class Strategies:
    """How a model is spread over ranks and computed. Each has those of the hooks `split_model`, `split_batch`, `apply`,
    `finish_grads` and `wrap_optimizer` that it needs. Their order stands below, with the reasons; that of the two which
    a step calls, `split_batch` and `finish_grads`, in step.py."""

    context: ContextParallel
    tensor: TensorParallel
    expert: ExpertParallel
    pipeline: Pipeline
    freeze: Freeze
    recompute: Recompute
    offload: Offload
    fp8: Fp8
    data: DataParallel
    matrices: MatrixUpdates
    optimizer_offload: OptimizerOffload


@dataclass(frozen=True, kw_only=True)
class SplitModel:
    """This rank's part of a model, in memory, and how it was split."""

    chunks: list[Decoder]
    facts: dict[str, WeightFacts]
    starts: InitialValues
    strategies: Strategies


def build_split_model(spec: Spec, *, mesh: Mesh) -> SplitModel:
    """The chunks with this rank's shapes; weights are NaN until they are filled."""
    kernels = _kernels(spec)
    model = build_model(spec.model, kernels, dtype=model_dtype(spec))
    trained = trained_names(model.facts, spec.train.trainable)
    facts = {}
    for name, one in model.facts.weights().items():
        facts[name] = replace(one, is_trained=name in trained)
    starts = model.facts.initial_values(std=spec.model.init_std)
    strategies = _strategies(spec, model.facts, facts, trained=trained, kernels=kernels, mesh=mesh)
    chunks = _split_model(model, strategies, spec, products=kernels.linear, device=mesh.device)
    return SplitModel(chunks=chunks, facts=facts, starts=starts, strategies=strategies)


def _strategies(
    spec: Spec,
    model: ModelFacts,
    facts: dict[str, WeightFacts],
    *,
    trained: frozenset[str],
    kernels: Kernels,
    mesh: Mesh,
) -> Strategies:
    """What a Spec asks for. Nothing is done to the model here. `facts`: of its parameters. `trained`: names of those
    that are trained, and of routers' biases that move."""
    parallelism = spec.parallelism
    overlap = parallelism.overlap
    is_compiled = spec.kernels.compile == "block"
    context = ContextParallel(mesh, parallelism.context, kernels.attention_merge)
    # one stack of hooks: what recomputation makes again is nothing to offload
    saved = SavedTensors()
    return Strategies(
        context=context,
        tensor=TensorParallel(mesh, parallelism.sequence_parallel, overlap.tp),
        expert=ExpertParallel(mesh, parallelism, index=context.index, overlap_shared=overlap.shared_experts),
        pipeline=Pipeline(
            mesh,
            parallelism.pipeline,
            model_dtype(spec),
            stages=stages_of(spec.model.n_layers, parallelism)[mesh.index("pp")],
            facts=facts,
            first_trained=first_trained_stage(facts.values(), spec.model.n_layers, parallelism),
            overlap=overlap.p2p,
        ),
        freeze=Freeze(trained, facts),
        recompute=Recompute(parallelism.recompute, saved, compiled=is_compiled),
        offload=Offload(parallelism.offload.layers, saved, device=mesh.device),
        fp8=_fp8(spec, model, kernels=kernels, mesh=mesh),
        data=DataParallel(mesh, _sharing(parallelism), facts=facts),
        matrices=MatrixUpdates(mesh, _matrices(spec, model, trained)),
        optimizer_offload=OptimizerOffload(spec.optim, parallelism.offload.optimizer),
    )


def _fp8(spec: Spec, model: ModelFacts, *, kernels: Kernels, mesh: Mesh) -> Fp8:
    """The linears that compute in fp8 are those that their facts let, in the layers that the precision names."""
    precision = spec.precision
    if not isinstance(precision, Fp8Precision):
        return Fp8(mesh, None, names={}, history=1, grouped=kernels.scaled_grouped)
    names = {}
    for number in precision.layers(spec.model.n_layers):
        names[number] = [linear.name for linear in model.layers[number].linears if linear.takes_fp8]
    form: AnyForm
    gradient_format = "e5m2" if precision.format == "hybrid" else "e4m3"
    if precision.recipe == "mxfp8":
        form = MxFp8Form(gradient_format, kernels.linear.mxfp8)
        return Fp8(mesh, form, names=names, history=precision.amax_history, grouped=kernels.scaled_grouped)
    if precision.recipe == "nvfp4":
        form = Fp4Form(precision.gradient_rounding, kernels.linear.nvfp4)
        history = precision.amax_history
        return Fp8(mesh, form, names=names, history=history, grouped=kernels.scaled_grouped, seed=spec.train.seed)
    if spec.kernels.linear == "te":
        form = TeFp8Form(precision.recipe, gradient_format, precision.margin)
        return Fp8(mesh, form, names=names, history=precision.amax_history, grouped=kernels.scaled_grouped)
    if spec.kernels.scaled_product == "cublaslt" and mesh.device.type == "cuda":
        # what is missing is told before anything is built
        cublaslt.must_have(precision.recipe)
    form = Fp8Form(
        recipe=precision.recipe,
        gradient_format=gradient_format,
        margin=precision.margin,
        cast=kernels.fp8_cast,
        product=kernels.scaled_product,
    )
    return Fp8(
        mesh,
        form,
        names=names,
        history=precision.amax_history,
        grouped=kernels.scaled_grouped,
        recomputed=spec.parallelism.recompute.alone,
        gathers=precision.gather_fp8,
    )


def _matrices(spec: Spec, model: ModelFacts, trained: frozenset[str]) -> dict[str, tuple[Matrix, ...]] | None:
    """What Muon orthogonalises; None: another optimizer trains."""
    if not isinstance(spec.optim, MuonSpec):
        return None
    return {name: matrices for name, matrices in model.matrices().items() if name in trained}


def _split_model(
    model: Decoder, strategies: Strategies, spec: Spec, *, products: LinearKernel, device: torch.device
) -> list[Decoder]:
    """The order, first part: from the whole model to this rank's chunks in memory. It begins on the meta device, so
    that no rank ever holds the whole model."""
    # first, so that tensor parallel tells the attention that stays which heads are here
    strategies.context.split_model(model)
    # modules become their parallel twins with this rank's shapes
    strategies.tensor.split_model(model, model.placement)
    # behind tensor parallel, since routers ask which tokens their rank of it has
    strategies.expert.split_model(model)
    # behind all that splits single modules: the layers of other ranks are left out from here on
    chunks = strategies.pipeline.split_model(model)
    # layers are what they stay: what computes their products
    for chunk in chunks:
        use_products(chunk, products)
    # memory, for what is left; in one module, so that what chunks share stays shared. Where weights are shared out, no
    # rank ever holds all of its chunks': their memory comes with the buckets
    keeps_weights = spec.parallelism.dp_strategy == "replicate"
    dtype = model_dtype(spec)
    materialise(nn.ModuleList(chunks), device=device, dtype=dtype, weights=keeps_weights)
    # blocks are equal, so one compiled block serves all; behind the split, so that collectives are traced
    if spec.kernels.compile == "block":
        _compile_blocks(chunks, for_later=strategies.pipeline.splits_backward)
    return chunks


def _apply(strategies: Strategies, chunks: Sequence[Decoder], position: Position, *, wide: torch.dtype) -> None:
    """The order, second part: what wraps the units that the chunks run by, the innermost first."""
    for chunk in chunks:
        # first: what is hung on a parameter or a unit from here on depends on what is trained
        strategies.freeze.apply(chunk)
        # before units are sharded: what is computed again together is gathered once
        strategies.recompute.apply(chunk)
        # behind recompute, which joins units: it wraps each as a whole
        strategies.offload.apply(chunk)
    # modules are what they stay; it hangs on them, not on their weights
    strategies.fp8.apply(chunks, wide=wide)
    # behind both: its hooks and buffers hang on the final parameters and units
    strategies.data.apply(
        chunks,
        on_update=strategies.fp8.renew,
        on_free=strategies.fp8.free,
        in_fp8=strategies.fp8.gather,
        layouts=strategies.pipeline.share(strategies.tensor.layouts),
        sums=strategies.pipeline.sums,
        shared=strategies.pipeline.shared,
        # what the two add to in their finish_grads
        changed_later=strategies.tensor.summed_later | strategies.pipeline.shared,
    )
    for chunk in chunks:
        # outermost, so that what other strategies do in a unit is told as part of it
        position.watch(chunk)


def _wrap_optimizer(strategies: Strategies, spec: Spec) -> MasterOptimizer:
    """The order, third part: what makes the optimizer of this rank's shards, the innermost first."""
    make = partial(build_optimizer, spec=spec.optim, optimizers=loaded_builders().optimizers)
    # behind data parallel: matrices are put together from the shards that it has left to the ranks
    make = strategies.matrices.wrap_optimizer(make, shards=strategies.data.shards)
    # it divides the weights, and makes an optimizer for each part of them
    make = strategies.optimizer_offload.wrap_optimizer(make)
    # outermost: no other sees the frozen weights, of which nothing lies anywhere but in the model
    make = strategies.freeze.wrap_optimizer(make)
    return make(strategies.data.weights, adamw=spec.kernels.adamw)


def _sharing(parallelism: ParallelismSpec) -> Sharing:
    return Sharing(
        strategy=parallelism.dp_strategy,
        bucket_bytes=parallelism.bucket_mb * 1e6,
        grad_reduce=parallelism.grad_reduce,
        overlap_grad_reduce=parallelism.overlap.grad_reduce,
        overlap_param_gather=parallelism.overlap.param_gather,
    )


# Graphs that torch makes of a block at most. Each kind of layer has its own (its window, its positions, fp8 or bf16),
# with gradients and without, and another one once a size varies: up to three with packed documents. So two kinds of
# layers make 12, and 126 that all differ 756. torch's own limit is 8, behind which it runs what is new without
# compiling, and tells it in a warning alone.
GRAPHS_OF_BLOCK = 1024


def _compile_blocks(chunks: Sequence[Decoder], *, for_later: bool) -> None:
    """`for_later`: weight gradients may be deferred, with what they multiply."""
    # here: it loads the compiler, which takes a second
    from torch._dynamo import config as dynamo_config

    dynamo_config.recompile_limit = GRAPHS_OF_BLOCK
    dynamo_config.accumulated_recompile_limit = GRAPHS_OF_BLOCK
    # an error in place of blocks that run uncompiled, slowly and in more memory
    dynamo_config.fail_on_recompile_limit_hit = True
    if for_later:
        functorch_config.donated_buffer = False
    options = COMPILED_FOR_LATER if for_later else COMPILED
    for chunk in chunks:
        for layer in chunk.layers.values():
            layer.compile_parts(options=options)


def build(spec: Spec, *, mesh: Mesh, position: Position | None = None) -> TrainState:
    """Everything but the weights' values: call `initialise`, or load a checkpoint. `position`: where a watchdog looks.
    The process's random generators stay as they are. RecipeError: the Spec asks for what can be planned only."""
    problems = unbuilt_problems(spec)
    if problems:
        raise RecipeError(problems)
    _set_determinism(spec)
    _refuse_missing(spec, device=mesh.device)
    _refuse_attention(spec, device=mesh.device)
    _refuse_other_blocks(spec, device=mesh.device)
    position = position or Position(mesh.device)
    split = build_split_model(spec, mesh=mesh)
    strategies = split.strategies
    _apply(strategies, split.chunks, position, wide=torch.promote_types(model_dtype(spec), torch.float32))
    optimizer = _wrap_optimizer(strategies, spec)
    for chunk in split.chunks:
        # of each, since a part of the model can be asked as well
        for module in chunk.modules():
            module.register_load_state_dict_pre_hook(_refuse_state_dict)
    return TrainState(
        spec=spec,
        mesh=mesh,
        device=mesh.device,
        chunks=split.chunks,
        facts=split.facts,
        starts=split.starts,
        tensor_parallel=strategies.tensor,
        context_parallel=strategies.context,
        expert_parallel=strategies.expert,
        pipeline=strategies.pipeline,
        data_parallel=strategies.data,
        fp8=strategies.fp8,
        optimizer=optimizer,
        position=position,
    )


def _refuse_state_dict(*_: object) -> None:
    """UsageError, in place of values that the next step would write the master weights over."""
    text = "load_state_dict knows nothing of the master weights and the layout that a built model's weights go with"
    raise UsageError(f"{text}; megaspec.set_weights(built, values) sets them all, from whole tensors by global name")


def _refuse_attention(spec: Spec, *, device: torch.device) -> None:
    """RecipeError where the attention that the Spec names can't run on this machine: its package does not load, no
    fused kernel of this torch and GPU takes it (it would keep the scores unasked), or another one than the plan's times
    are of. After determinism is set, which decides what may be taken."""
    name = spec.kernels.attention
    if device.type != "cuda" or name == "reference":
        return
    if name == "te":
        _refuse_te_attention(spec, device=device)
        return
    if name in ATTENTION_MODULES:
        try:
            require(ATTENTION_MODULES[name])
        except ImportError as error:
            text = f"kernels.attention={name}: {error}; or set kernels.attention=sdpa"
            raise _refused_attention(text) from error
    model = spec.model
    dtype = model_dtype(spec)
    seq_len = spec.data.seq_len
    attentions = [kind.attention for kind in model.facts.kinds if kind.attention is not None]
    heads = whole_sequence_heads(model.n_heads, model.n_kv_heads, parallelism=spec.parallelism)
    takes_all = CATALOG["attention"].implementations[name].takes_all_layers(deterministic=spec.train.deterministic)
    in_blocks = []
    whole = []
    for one in attentions:
        is_hidden = spec.data.document_mask or one.sight.hides_keys(seq_len)
        if name.startswith("flash_attn") or takes_all or (name == "cudnn" and is_hidden and heads is not None):
            # its own kernels take it, the catalog says which heads
            continue
        # sinks go around blocks, of whole sequences too; what hides nothing goes through sdpa from the others, too
        goes_in_blocks = heads is None or one.has_sinks or (name == "sdpa" and is_hidden)
        in_blocks.append(goes_in_blocks)
        whole.append(not goes_in_blocks and not is_hidden)
    asked = f"heads of {model.d_head} in {model_format(spec.precision)}"
    if any(in_blocks) and sdpa_block.is_refused(d_head=model.d_head, dtype=dtype):
        raise _no_fused_attention(name, asked)
    if all(in_blocks):
        return
    sizes = {
        "n_heads": heads[0],
        "n_kv_heads": heads[1],
        "d_head": model.d_head,
        "tokens": seq_len,
        "dtype": dtype,
        "device": device,
    }
    asked = f"{heads[0]} query heads of {model.d_head} on {heads[1]} of keys and values"
    asked += f" in {model_format(spec.precision)} with train.deterministic={show(spec.train.deterministic)}"
    if sdpa.is_refused(**sizes):
        raise _no_fused_attention(name, asked)
    if any(whole):
        _refuse_other_attention(spec, asked, sizes)


def _refuse_other_attention(spec: Spec, asked: str, sizes: dict[str, Any]) -> None:
    """RecipeError where torch takes another kernel for whole sequences than the plan's times are of."""
    major, minor = torch.cuda.get_device_capability(sizes["device"])
    wanted = sdpa.expected(
        d_head=sizes["d_head"],
        tokens=sizes["tokens"],
        dtype=sizes["dtype"],
        sm=10 * major + minor,
        deterministic=spec.train.deterministic,
    )
    taken = sdpa.served_by(**sizes)
    if wanted is None or taken == wanted:
        return
    name = spec.kernels.attention
    text = f"kernels.attention={name}: torch {torch.__version__} takes {KERNEL_NAMES[taken]} for {asked} on this GPU,"
    text += f" the plan's times are of {KERNEL_NAMES[wanted]}"
    other = "flash_attn, or install a torch with cuDNN 9"
    if spec.train.deterministic:
        other = "reference, or train.deterministic=false"
    raise _refused_attention(f"{text}; set kernels.attention={other}")


def _no_fused_attention(name: str, asked: str) -> RecipeError:
    text = f"kernels.attention={name}: no fused kernel of torch {torch.__version__} takes {asked} on this GPU"
    return _refused_attention(f"{text}; set kernels.attention=reference, which keeps all scores")


def _refused_attention(text: str) -> RecipeError:
    return RecipeError([Problem("kernels.attention", text, code="kernel-attention")])


def _refuse_te_attention(spec: Spec, *, device: torch.device) -> None:
    """RecipeError where Transformer Engine's cuDNN does not take the attention, whole sequences on this rank."""
    model = spec.model
    heads = whole_sequence_heads(model.n_heads, model.n_kv_heads, parallelism=spec.parallelism)
    if heads is None:
        # blocks, which sdpa has: `_refuse_attention` asks for its heads
        if not sdpa_block.is_refused(d_head=model.d_head, dtype=model_dtype(spec)):
            return
        why = f"blocks of heads of {model.d_head} in {model_format(spec.precision)} have no fused kernel"
    else:
        why = te_attention.is_refused(
            n_heads=heads[0],
            n_kv_heads=heads[1],
            d_head=model.d_head,
            # what cuDNN takes does not depend on how long sequences are, but for single tokens
            tokens=min(spec.data.seq_len, 256),
            documents=spec.data.document_mask,
            dtype=model_dtype(spec),
            device=device,
        )
    if why is not None:
        text = f"kernels.attention=te: Transformer Engine takes no such attention here: {why}"
        raise _refused_attention(f"{text}; set kernels.attention=sdpa")


def _refuse_missing(spec: Spec, *, device: torch.device) -> None:
    """RecipeError where an implementation is named whose package is not here."""
    asked = [name for name in CATALOG if getattr(spec.kernels, name) == "te"]
    if device.type != "cuda" or not asked:
        return
    why = te_package.missing()
    if why is None:
        return
    problems = []
    for name in asked:
        key = f"kernels.{name}"
        other = "torch" if name == "linear" else "auto"
        problems.append(Problem(key, f"{key}=te {why}, or set {key}={other}", code=f"kernel-{name}"))
    raise RecipeError(problems)


def _refuse_other_blocks(spec: Spec, *, device: torch.device) -> None:
    """RecipeError where Transformer Engine's casts and products in MXFP8 and NVFP4 are others than mxfp8.py and
    nvfp4.py say. No test has seen them run: what would train wrongly is told before it trains."""
    recipe = fp8_recipe(spec.precision)
    if recipe not in BLACKWELL_SM or spec.kernels.linear != "te" or device.type == "meta":
        return
    if recipe == "mxfp8":
        gradient_format = "e5m2" if spec.precision.format == "hybrid" else "e4m3"
        differs = mxfp8_check.difference(device, FORMATS[gradient_format])
    else:
        differs = nvfp4_check.difference(device, spec.precision.gradient_rounding)
    if differs is None:
        return
    where = device.type
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    text = f"precision.recipe={recipe}: Transformer Engine on {where} does not compute what"
    text += f" kernels/megaspec_kernels/linear/{recipe}.py says: {differs}"
    way = "set precision.recipe=tensorwise with kernels.linear=torch, or precision=bf16"
    raise RecipeError([Problem("precision.recipe", f"{text}; {way}", code=f"{recipe}-check")])


def mesh_of(spec: Spec, *, rank: int, device: torch.device, timeout: timedelta | None = None) -> Mesh:
    """The mesh that a Spec describes."""
    parallelism = spec.parallelism
    return Mesh(parallelism.degrees, rank=rank, device=device, timeout=timeout, ep=parallelism.ep, etp=parallelism.etp)


def _set_determinism(spec: Spec) -> None:
    torch.use_deterministic_algorithms(spec.train.deterministic)
    if spec.train.deterministic:
        # Memory that a kernel read before anyone wrote it would change a result from run to run, so torch fills all new
        # memory then, 1 % of a step. Ours is written before it is read: tests/parity/test_filled.py trains with NaN
        # in it.
        torch.utils.deterministic.fill_uninitialized_memory = False
        # read when the first matrix product opens cuBLAS; without it torch refuses to call itself deterministic
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
