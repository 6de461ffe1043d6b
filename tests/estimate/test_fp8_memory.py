"""What the plan counts of fp8 against what a built model keeps and holds."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megaspec.data.batch import Batch
from megaspec.estimate.activations import kept_tensors, layer_bytes
from megaspec.estimate.communication import AGREED, collectives_of
from megaspec.estimate.layer_run import layer_run
from megaspec.estimate.memory import memory_of
from megaspec.estimate.trained import facts_of
from megaspec.estimate.work import fp8_bytes, layer_parts
from megaspec.nn.decoder import Decoder
from megaspec.nn.fp8 import Fp8Linear
from megaspec.parallelism import fp8 as strategy
from megaspec.precision.scaler import build_scaler
from megaspec.precision.spec import Fp8Precision
from megaspec.runtime.build import TrainState, build, initialise, mesh_of
from megaspec.runtime.step import train_step
from megaspec.spec import Spec
from megaspec.verify.trace import fake_world
from megaspec_kernels.linear.nvfp4 import HEAD
from tests.nn.plain_producers import plain_producers
from tests.parallelism.kept import kept_bytes
from tests.parity.cases import SEQUENCES, TOKENS, Case, spec_of


def with_middle_in_fp8(spec: Spec, recipe: str, *, gather_fp8: bool = False) -> Spec:
    """Of three layers, the first and the last of which stay in bf16."""
    precision = Fp8Precision(kind="fp8", recipe=recipe, format="e4m3", first_layers_bf16=1, gather_fp8=gather_fp8)
    return spec.model_copy(update={"precision": precision})


def spec_in(recipe: str, **case: str | bool) -> Spec:
    """Three layers in bf16, of which the one in the middle has products in fp8."""
    spec = spec_of(Case(precision="bf16", n_layers=3, accumulate=6, attention="sdpa", **case))
    return with_middle_in_fp8(spec, recipe)


def built_of(spec: Spec) -> TrainState:
    built = build(spec, mesh=mesh_of(spec, rank=0, device=torch.device("cpu")))
    initialise(built)
    return built


def remember(built: TrainState) -> None:
    """As in a step that comes after others."""
    for linear in built.fp8.linears.values():
        if linear.memory is not None:
            linear.memory.fresh = frozenset()


def kept_by(decoder: Decoder, number: int, x: Tensor) -> int:
    """Bytes of all that a layer's forward pass keeps, weights and tables of angles left out."""
    context = decoder.context(torch.arange(TOKENS), length=TOKENS)
    angles = [x for table in context.angles for x in table]
    apart = {x.untyped_storage().data_ptr() for x in [*decoder.parameters(), *angles, context.positions]}
    found = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in apart:
            # held, so that no other comes to lie there
            found[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    unit = next(unit for unit in decoder.units if unit.name == f"layers.{number}")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
        assert unit.run(x, context).requires_grad
    return sum(size for size, _ in found.values())


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4"])
def test_kept_bytes_of_layers(recipe: str) -> None:
    spec = spec_in(recipe, wide=recipe in ("mxfp8", "nvfp4"))
    built = built_of(spec)
    run = layer_run(spec)
    layers = facts_of(spec).layers
    assert [layer.in_fp8 for layer in layers] == [False, True, False]
    model = spec.model
    inputs = (model.d_model, model.n_heads * model.d_head, model.d_model, model.d_ffn)
    # scales in fp32, which the plan leaves out: of each input one, or one for each feature
    scales = 4 * (len(inputs) if recipe in ("tensorwise", "delayed") else sum(inputs))
    if recipe == "mxfp8":
        # a byte for 32 numbers, which it counts
        scales = 0
    if recipe == "nvfp4":
        # a byte for 16, which it counts, and what lies before them
        scales = HEAD * len(inputs)
    for number, layer in enumerate(layers):
        x = torch.randn(spec.train.micro_batch, TOKENS, model.d_model, dtype=torch.bfloat16).requires_grad_()
        counted = sum(tensor.size for tensor in kept_tensors(run, layer))
        assert kept_by(built.model, number, x) == counted + layer.in_fp8 * scales, number


def writing_spec(*, norm: str, sequence: bool, trainable: str = "") -> Spec:
    """Of two ranks that divide products and maybe tokens; a micro batch is one sequence. What makes inputs and
    gradients of the layer in the middle writes them in fp8. `trainable`: see Case."""
    kernels = {"kernels.norm": norm, "kernels.gated": "triton", "kernels.rope": "triton"}
    case = Case(
        tp=2,
        sequence=sequence,
        precision="bf16",
        n_layers=3,
        accumulate=SEQUENCES,
        attention="sdpa",
        trainable=trainable,
        also=tuple(kernels.items()),
    )
    return with_middle_in_fp8(spec_of(case), "delayed")


@pytest.mark.parametrize("sequence", [False, True])
def test_kept_bytes_of_layers_whose_inputs_are_written(sequence: bool) -> None:
    """Of a norm that writes what its ranks gather, this rank's rows."""
    spec = writing_spec(norm="triton", sequence=sequence)
    run = layer_run(spec)
    layers = facts_of(spec).layers
    tokens = TOKENS // 2 if sequence else TOKENS
    with fake_world(0, 2), plain_producers() as calls:
        built = built_of(spec)
        remember(built)
        x = torch.randn(1, tokens, spec.model.d_model, dtype=torch.bfloat16).requires_grad_()
        found = kept_by(built.model, 1, x)
    assert calls["norm"] == 2
    # a scale in fp32 of each input
    assert found == sum(tensor.size for tensor in kept_tensors(run, layers[1])) + 4 * 4


def as_on_a_gpu(spec: Spec) -> Spec:
    """What casts and multiplies there: of factors that are cast no more is moved."""
    kernels = spec.kernels.model_copy(update={"fp8_cast": "triton", "scaled_product": "cublaslt"})
    return spec.model_copy(update={"kernels": kernels})


class BytesOfOperations(TorchDispatchMode):
    """What operations read and write, by name; what is smaller than a matrix of tokens, and the weights, left out."""

    def __init__(self, least: int, apart: set[int]) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._least = least
        self._apart = apart

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for one in tree_leaves((args, made)):
            if isinstance(one, Tensor) and one.numel() >= self._least and one.data_ptr() not in self._apart:
                self.found[function._opname] += one.nbytes
        return made


@pytest.mark.parametrize("trainable", ["", "norms"], ids=["all", "norms"])
@pytest.mark.parametrize("sequence", [False, True])
def test_bytes_that_move_around_gathered_tokens(sequence: bool, trainable: str) -> None:
    """Of norms and the sums before them, of casts, and of what is turned round behind a gather. Nobody turns what
    frozen weights multiply."""
    spec = writing_spec(norm="triton", sequence=sequence, trainable=trainable)
    d_model = spec.model.d_model
    own = TOKENS // 2 if sequence else TOKENS
    with fake_world(0, 2), plain_producers():
        built = built_of(spec)
        remember(built)
        unit = next(unit for unit in built.model.units if unit.name == "layers.1")
        x = torch.randn(1, own, d_model, dtype=torch.bfloat16).requires_grad_()
        weights = {one.data_ptr() for one in built.model.parameters()}
        context = built.model.context(torch.arange(TOKENS), length=TOKENS)
        with BytesOfOperations(own * d_model, weights) as forward:
            y = unit.run(x, context)
        with BytesOfOperations(own * d_model, weights) as backward:
            y.backward(torch.ones_like(y))

    spec = as_on_a_gpu(spec)
    layer = facts_of(spec).layers[1]
    parts = layer_parts(spec, layer, in_fp8=True)
    (norms,) = [part for part in parts if part.name == "norm"]
    # the sum behind the last product
    last_sum = 3 * own * d_model * 2
    assert forward.found["norm_into_fp8"] + last_sum == norms.forward_bytes
    # both norms write a byte of each number, and another one for weight gradients where nobody gathers it
    layouts = 1 if sequence or trainable else 2
    assert forward.found["norm_into_fp8"] == own * d_model * (2 + 3 * 2 + 2 * layouts)

    products = [product for part in parts for product in part.products]
    planned = fp8_bytes(spec, products)
    moved = backward.found["fp8_columns"] + backward.found["fp8_tokens"]
    if sequence:
        assert moved == planned.backward
        assert not forward.found["fp8_tokens"]
    else:
        assert not moved
    # what a norm does not write its ranks cast: their own tokens in rows, or all in both layouts
    plain = as_on_a_gpu(writing_spec(norm="reference", sequence=sequence, trainable=trainable))
    of_plain = [product for part in layer_parts(plain, layer, in_fp8=True) for product in part.products]
    assert fp8_bytes(plain, of_plain).backward == planned.backward
    assert fp8_bytes(plain, of_plain).forward - planned.forward == 2 * own * d_model * (2 + layouts)


@pytest.mark.parametrize("experts", ["", "inputs"])
@pytest.mark.parametrize("shared", ["none", "gate"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
def test_kept_bytes_of_layers_with_experts(recipe: str, shared: str, experts: str) -> None:
    """A byte of each number that experts take, in whole; routers and experts of every token keep theirs in bf16."""
    case = {"router": "softmax", "shared": shared, "experts": experts}
    spec = spec_in(recipe, **case)
    plain = spec_of(Case(precision="bf16", n_layers=3, accumulate=6, attention="sdpa", **case))
    found = {}
    counted = {}
    for name, one in {"fp8": spec, "bf16": plain}.items():
        built = built_of(one)
        for moe in (layer.moe for layer in built.model.layers.values()):
            # so many rows as the plan takes
            moe.force_balance()
        run = layer_run(one)
        x = torch.randn(one.train.micro_batch, TOKENS, one.model.d_model, dtype=torch.bfloat16).requires_grad_()
        found[name] = kept_by(built.model, 1, x)
        counted[name] = sum(tensor.size for tensor in kept_tensors(run, facts_of(one).layers[1]))
    model = spec.model
    moe = model.moe
    # those of attention's two inputs, and of each expert's two; delayed ones begin as they are
    scales = 4 * (2 + 2 * moe.n_experts)
    if recipe == "rowwise":
        scales = 4 * (model.d_model + model.n_heads * model.d_head + moe.n_experts * (model.d_model + moe.d_expert))
    # where experts' rows end, int32, is no tensor that products in fp8 save: all casts of a layer hold the same
    ends = 4 * moe.n_experts
    assert found["fp8"] - found["bf16"] == counted["fp8"] - counted["bf16"] + scales - ends
    # what routing keeps besides is small, and the same in both
    assert abs(found["fp8"] - counted["fp8"]) < 0.1 * counted["fp8"]


@pytest.mark.parametrize(
    ("router", "part"),
    [("", "activation"), ("", "mlp"), ("", "core_attention"), ("softmax", "activation"), ("softmax", "core_attention")],
)
@pytest.mark.parametrize("recipe", ["bf16", "tensorwise", "rowwise"])
def test_what_is_recomputed_frees_what_is_planned(recipe: str, router: str, part: str) -> None:
    """What a product has quantised stays, whoever makes again what that was made from; what a part is computed again
    from stays as it was."""
    found = {}
    counted = {}
    for recompute in ({"kind": "none"}, {"kind": "selective", "parts": [part]}):
        case = Case(precision="bf16", n_layers=3, accumulate=6, attention="sdpa", router=router, shared="none")
        spec = spec_of(replace(case, also=(("parallelism.recompute", recompute),)))
        if recipe != "bf16":
            spec = with_middle_in_fp8(spec, recipe)
        built = built_of(spec)
        for layer in built.model.layers.values():
            if router:
                layer.moe.force_balance()
        x = torch.randn(spec.train.micro_batch, TOKENS, spec.model.d_model, dtype=torch.bfloat16).requires_grad_()
        context = built.model.context(torch.arange(TOKENS), length=TOKENS)
        unit = built.model.units[2]
        # weights are quantised in the first pass
        unit.run(x, context)
        angles = [one for table in context.angles for one in table]
        apart = [*built.model.parameters(), *angles, context.positions]
        found[recompute["kind"]] = kept_bytes(lambda: unit.run(x, context), without=apart)  # noqa: B023
        planned = layer_bytes(layer_run(spec), facts_of(spec).layers[1])
        counted[recompute["kind"]] = planned.kept + planned.routed
    # scales that are no longer kept, in fp32
    scales = 0
    if part == "mlp" and recipe != "bf16":
        scales = 4 * (2 if recipe == "tensorwise" else spec.model.d_model + spec.model.d_ffn)
    assert counted["none"] - counted["selective"] == found["none"] - found["selective"] - scales


@pytest.mark.parametrize("router", ["", "softmax"])
def test_weights_are_held_in_two_layouts(router: str) -> None:
    spec = spec_in("tensorwise", router=router, shared="plain" if router else "none")
    built = built_of(spec)
    x = torch.randn(spec.train.micro_batch, TOKENS, spec.model.d_model, dtype=torch.bfloat16)
    decoder = built.model
    context = decoder.context(torch.arange(TOKENS), length=TOKENS)
    decoder.units[2].run(x, context)
    held = 0
    for linear in built.fp8.linears.values():
        pair = linear._weight
        held += pair.rows.values.nbytes + pair.columns.values.nbytes
    plain = spec.model_copy(update={"precision": spec_of(Case(precision="bf16")).precision})
    assert memory_of(spec)[0].weights - memory_of(plain)[0].weights == held
    names = list(built.fp8.linears)
    part = "moe.experts" if router else "mlp"
    parts = ("attn.wqkv", "attn.wo", f"{part}.w_gate_up", f"{part}.w_down")
    assert names == [f"layers.1.{name}.weight" for name in parts]
    built.fp8.free(names)
    assert all(linear._weight is None for linear in built.fp8.linears.values())


def gathering_spec(gathers: bool) -> Spec:
    """Sharded over two ranks, with experts, one layer of three in fp8."""
    spec = spec_of(Case(dp=2, strategy="fsdp", precision="bf16", n_layers=3, accumulate=2, router="softmax"))
    return with_middle_in_fp8(spec, "tensorwise", gather_fp8=gathers)


def test_of_weights_in_fp8_half_of_the_bytes_are_gathered() -> None:
    sent = {}
    reduced = {}
    for gathers in (False, True):
        found = collectives_of(gathering_spec(gathers), None)
        sent[gathers] = sum(one.bytes * one.times for one in found if one.kind == "all_gather")
        reduced[gathers] = [one.bytes for one in found if one.what == "largest weights"]
    spec = gathering_spec(True)
    model = spec.model
    experts = 3 * model.moe.n_experts * model.moe.d_expert * model.d_model
    heads = (2 * model.n_heads + 2 * model.n_kv_heads) * model.d_head
    # a byte less of each, in two passes of two micro batches
    assert sent[False] - sent[True] == 2 * 2 * (experts + heads * model.d_model)
    # in fp32: those of two matrices, and of two of each expert
    assert reduced == {False: [], True: [4 * (2 + 2 * model.moe.n_experts)]}


@pytest.mark.parametrize(
    ("recipe", "tokens_in_fp8", "bytes_beside"),
    [
        ("tensorwise", 3, 0),
        ("delayed", 3, 0),
        ("rowwise", 2, 4),
        ("blockwise", 1, 0),
        ("mxfp8", 1, 0),
        ("nvfp4", 1.5, 0),
    ],
)
def test_of_tokens_in_fp8_half_of_the_bytes_are_gathered(recipe: str, tokens_in_fp8: float, bytes_beside: int) -> None:
    """Of an input forward and again backward, and of a gradient: those that are bytes. Rowwise with a scale a token."""
    case = Case(tp=2, sequence=True, precision="bf16", n_layers=3, accumulate=6, attention="sdpa")
    plain = spec_of(case)
    spec = with_middle_in_fp8(plain, recipe)
    sent = {}
    for name, one in (("plain", plain), ("fp8", spec)):
        found = [call for call in collectives_of(one, None) if call.kind == "all_gather" and call.group == "tp"]
        sent[name] = sum(call.bytes * call.times for call in found)
    tokens = spec.train.micro_batch * TOKENS * 6
    # two pairs of products in one layer of three
    width = spec.model.d_model
    assert sent["plain"] - sent["fp8"] == 2 * tokens * (tokens_in_fp8 * width - bytes_beside)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed", "blockwise"])
def test_what_ranks_agree_on_is_counted(recipe: str, sequence: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against what a rank asks the others in a step for inputs and gradients, once scales are remembered; what it hears
    is its own."""
    case = Case(tp=2, sequence=sequence, n_layers=3, accumulate=2, precision="bf16", wide=recipe == "blockwise")
    spec = spec_of(case)
    spec = with_middle_in_fp8(spec, recipe)
    planned = Counter()
    for one in collectives_of(spec, None):
        if one.what == AGREED:
            planned[one.bytes] += one.times
    heard = Counter()
    quantised = []
    scale = Fp8Linear._scale
    agreed_amax_of_lines = Fp8Linear._agreed_amax_of_lines

    def scale_of_role(self: Fp8Linear, x_MK: Tensor, role: str, block: object) -> Tensor:
        quantised.append(role)
        return scale(self, x_MK, role, block)

    def amax_of_role(self: Fp8Linear, x_MK: Tensor, role: str) -> tuple[Tensor, Tensor] | None:
        quantised.append(role)
        return agreed_amax_of_lines(self, x_MK, role)

    def hear(amax: Tensor, group: object) -> Tensor:
        if quantised[-1] != "weight":
            heard[amax.nbytes] += 1
        return amax

    monkeypatch.setattr(Fp8Linear, "_scale", scale_of_role)
    monkeypatch.setattr(Fp8Linear, "_agreed_amax_of_lines", amax_of_role)
    monkeypatch.setattr(strategy, "all_reduce_max", hear)
    size = (spec.train.micro_batch, spec.data.seq_len)
    ids = torch.zeros(size, dtype=torch.int64)
    micro_batch = Batch(ids, ids, torch.ones(size, dtype=torch.bool), torch.arange(size[0]), None)
    scaler = build_scaler(spec.precision, device=torch.device("cpu"))
    with fake_world(0, 2):
        built = built_of(spec)
        for _ in range(2):
            heard.clear()
            train_step(built, [micro_batch] * 2, lr=0.0, weight_decay=0.0, scaler=scaler)
            # gathers of a world that is not there bring nothing finite to remember
            remember(built)
    assert heard == planned
    assert bool(planned) == (recipe in ("tensorwise", "rowwise"))


def test_a_rank_holds_its_rows_as_bytes_besides_and_no_whole_weight() -> None:
    plain = memory_of(gathering_spec(False))[0]
    narrow = memory_of(gathering_spec(True))[0]
    layer = facts_of(gathering_spec(True)).layers[1]
    weights = layer.fp8_weights_on(layer_run(gathering_spec(True)).degrees)
    assert narrow.weights - plain.weights == weights.total // 2
    assert narrow.communication <= plain.communication
