"""A part's facts against the part: whatever decoder is drawn, the built module is what was counted.

Parameters against the module on the meta device, FLOPs against torch's counter, kept bytes against what a layer's
forward pass leaves behind, placement against the names, and two tensor-parallel ranks against one in fp64. A fact that
is missing or wrong fails here: see test_a_deleted_fact_is_found.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megaspec.core.part_facts import Execution, Kept, PartFacts
from megaspec.data.batch import Batch
from megaspec.estimate.activations import kept_tensors
from megaspec.estimate.flops import flops_per_sequence
from megaspec.estimate.layer_run import layer_run
from megaspec.estimate.parameters import count_parameters, rank_parameters
from megaspec.nn.decoder import Decoder
from megaspec.nn.model_facts import ModelFacts
from megaspec.nn.moe.router import Router
from megaspec.nn.norm.spec import LayerNormSpec, NormSpec
from megaspec.rules.initial_weights import weight_shapes
from megaspec.runtime.build import build_model, materialise, mesh_of
from megaspec.spec import Spec
from megaspec.verify.parity import TOLERANCES, compare, run_steps
from megaspec_kernels.registry import kernels_of
from tests.nn.random_specs import TOKENS, VOCABULARY, decoders
from tests.parity.tasks import plain, trajectory_of
from tests.plan.plans import plan
from tests.ranks import RankPool

SEQUENCES = 2
PLAIN: Mapping[str, Any] = {}
OPTIONS: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


def matched(name: str, pattern: str) -> bool:
    """Whether a module's name is one of a placement row's."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(w in ("*", p) for p, w in zip(parts, wanted, strict=True))


def recipe_of(model: dict[str, Any], **changes: Any) -> Any:
    """A filled recipe that runs as plain operations on a CPU."""
    size = {"data.seq_len": TOKENS, "train.micro_batch": SEQUENCES, "train.global_batch": SEQUENCES}
    kernels = {
        f"kernels.{name}": "reference" for name in ("attention", "cross_entropy", "grouped", "unpermute", "gated")
    }
    plainly = {"kernels.compile": "none", "parallelism.dp_replicate": 1}
    return plan(model, size | kernels | plainly | changes)


def model_of(
    model: dict[str, Any], dtype: torch.dtype, *, device: str = "cpu", changes: Mapping[str, Any] = PLAIN
) -> tuple[Decoder, Any]:
    """The module, its weights drawn at random."""
    recipe = recipe_of(model, **changes)
    decoder = build_model(recipe.model, kernels_of(recipe.kernels), dtype=dtype)
    if device != "meta":
        materialise(decoder, device=torch.device(device), dtype=dtype)
        torch.manual_seed(1)
        for parameter in decoder.parameters():
            parameter.data.normal_(std=0.3)
    return decoder, recipe


def check_parameters(model: dict[str, Any]) -> None:
    """Every parameter is counted, has an initial value, and has one row of placement; nothing else is counted."""
    decoder, recipe = model_of(model, torch.bfloat16, device="meta")
    spec, facts = recipe.model, recipe.model.facts
    held = decoder.global_parameters()
    biases = sum(b.numel() for n, b in decoder.named_buffers() if n.endswith("moe.router.expert_bias"))
    assert count_parameters(spec).total == sum(p.numel() for p in held.values()) + biases
    assert rank_parameters(recipe, 0).total == count_parameters(spec).total
    initial = facts.initial_values(std=spec.init_std)
    assert not initial.stds.keys() & initial.constants.keys()
    said = initial.stds.keys() | {n for n in initial.constants if not n.endswith("moe.router.expert_bias")}
    assert said - {"head.weight"} == held.keys() - {"head.weight"}
    shapes = weight_shapes(facts)
    routers = {f"router/{n}" for n, _ in decoder.named_buffers() if n.endswith("moe.router.expert_bias")}
    assert shapes.keys() == {f"model/{name}" for name in held} | routers
    for name, parameter in held.items():
        # tables may have rows behind the vocabulary
        shape = tuple(parameter.shape)
        assert shapes[f"model/{name}"][1:] == shape[1:], name
        assert shapes[f"model/{name}"][0] == shape[0] or name.startswith(("embed.", "head.")), name
    for name in held:
        module = name.rpartition(".")[0]
        rows = [row for row in decoder.placement if matched(module, row.pattern)]
        assert len(rows) == 1, f"{name}: {rows}"
    modules = [name for name, _ in decoder.named_modules()]
    for row in decoder.placement:
        assert any(matched(name, row.pattern) for name in modules), f"{row} matches nothing"
    for name, matrices in facts.matrices().items():
        assert matrices[-1].last == held[name].shape[0], name


def check_flops(model: dict[str, Any]) -> None:
    """Forward and backward of one micro batch, matrix products that Megatron leaves out put back."""
    decoder, recipe = model_of(model, torch.float32)
    facts = recipe.model.facts
    left_out = 0
    for layer in facts.layers:
        for linear in layer.linears:
            if not linear.in_flops:
                left_out += 6 * TOKENS * linear.inputs.whole * linear.columns
        if layer.attention is not None:
            # plain operations compute what a mask hides, too
            width = layer.attention.n_heads * (layer.attention.d_key + layer.attention.d_value)
            left_out += 6 * width * (TOKENS**2 - layer.attention.sight.twice_the_pairs(TOKENS))
    tokens = torch.arange(SEQUENCES * TOKENS).view(SEQUENCES, TOKENS) % VOCABULARY
    with FlopCounterMode(display=False) as counter:
        decoder.loss(tokens, tokens.roll(1, 1), torch.ones(SEQUENCES, TOKENS)).backward()
    counted = flops_per_sequence(recipe.model, seq_len=TOKENS, convention="full") + left_out
    assert counter.get_total_flops() == SEQUENCES * counted


class Saved:
    """Bytes that autograd keeps, each storage once; what was there before is left out, the router's are apart."""

    def __init__(self, before: list[Tensor]):
        self.before = {tensor.untyped_storage().data_ptr() for tensor in before}
        self.storages: dict[int, Any] = {}
        self.of_routers: set[int] = set()
        self.in_router = False

    def pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        place = storage.data_ptr()
        if place not in self.before and place not in self.storages and storage.nbytes():
            self.storages[place] = storage
            # what a matrix product of the model keeps is no score
            if self.in_router and x.dtype != torch.bfloat16:
                self.of_routers.add(place)
        return x

    def watch(self, router: Router) -> None:
        """What is kept inside of it is the router's."""
        forward = router.forward

        def watched(*inputs: Any) -> Any:
            self.in_router = True
            try:
                return forward(*inputs)
            finally:
                self.in_router = False

        router.forward = watched

    @property
    def router(self) -> int:
        return sum(self.storages[place].nbytes() for place in self.of_routers)

    @property
    def rest(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values()) - self.router


def saved_by(decoder: Decoder, number: int, x: Tensor) -> Saved:
    """What one layer's forward pass keeps, its input included."""
    context = decoder.context(torch.arange(TOKENS), length=TOKENS)
    angles = [x for table in context.angles for x in table]
    saved = Saved([*decoder.parameters(), *decoder.buffers(), *angles, context.positions])
    unit = next(unit for unit in decoder.units if unit.name == f"layers.{number}")
    for module in unit.modules[0].modules():
        if isinstance(module, Router):
            saved.watch(module)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda kept: kept):
        y = unit.run(x, context)
    assert y.requires_grad
    return saved


def check_kept(model: dict[str, Any], changes: Mapping[str, Any] = PLAIN) -> None:
    """Kept bytes of every layer, to the byte but for what belongs to the rows of experts: a weight and their ends."""
    decoder, recipe = model_of(model, torch.bfloat16, changes=changes)
    run, facts = layer_run(recipe), recipe.model.facts
    for number, layer in enumerate(facts.layers):
        x = torch.randn(SEQUENCES, TOKENS, recipe.model.d_model, dtype=torch.bfloat16).requires_grad_()
        saved = saved_by(decoder, number, x)
        tensors = kept_tensors(run, layer)
        router = sum(tensor.size for tensor in tensors if tensor.what.startswith("router."))
        rest = sum(tensor.size for tensor in tensors) - router
        if halves_statistics(recipe.model.norm):
            halved = [tensor for tensor in tensors if tensor.what.endswith("statistics")]
            if recipe.model.attention.qk_norm == "l2":
                # always a root mean square
                halved = [tensor for tensor in halved if tensor.what != "qk_norm.statistics"]
            if recipe.kernels.norm != "reference":
                # norms of heads alone are torch's
                halved = [tensor for tensor in halved if tensor.what == "qk_norm.statistics"]
            rest -= sum(tensor.size for tensor in halved) // 2
        small = 0
        if layer.routing is not None:
            small = 4 * run.expert_rows(layer.routing) + 4 * layer.routing.n_experts
            if recipe.model.moe.weights_on == "inputs":
                # the weight of all rows behind the first product
                small += 4
            # which of its tensors a router keeps depends on how it scores
            assert router / 2 <= saved.router <= 2 * router, (number, router)
        assert saved.rest == rest + small, (number, tensors)
    check_last_norm(decoder, recipe)


def check_last_norm(decoder: Decoder, recipe: Any) -> None:
    """Kept bytes of the norm before the head, which is never compiled."""
    run, layer = layer_run(recipe), recipe.model.facts.layers[0]
    x = torch.randn(SEQUENCES, TOKENS, recipe.model.d_model, dtype=torch.bfloat16).requires_grad_()
    saved = Saved([*decoder.parameters()])
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda kept: kept):
        decoder.norm(x)
    counted = 0
    for kept in recipe.model.facts.norm.kept(Execution(fused=run.execution.fused)):
        size = run.kept_bytes(kept, layer)
        is_halved = halves_statistics(recipe.model.norm) and recipe.kernels.norm == "reference"
        counted += size // 2 if kept.element == "statistic" and is_halved else size
    assert saved.rest == counted


def halves_statistics(norm: NormSpec) -> bool:
    """torch's layer_norm keeps its statistics in bf16 on a CPU, in fp32 on a GPU."""
    return isinstance(norm, LayerNormSpec) and norm.weight != "one_plus"


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool() as ranks:
        yield ranks


def spec_of(model: dict[str, Any], *, tp: int) -> Spec:
    """What `tp` ranks train."""
    content = recipe_of(
        model,
        **{
            "parallelism.tp": tp,
            "parallelism.sequence_parallel": tp > 1,
            "precision": {"kind": "fp64"},
            "optim": {"kind": "sgd", "lr": 1e-2, "clip": None},
            "launcher.ranks": tp,
        },
    ).model_dump(mode="json")
    more = {"world_size": tp, "device": "cpu", "segments": [8], "forked_from": None}
    return Spec.model_validate_json(json.dumps(content | more))


def train(rank: int, text: str) -> dict[str, Any] | None:
    """Runs on each rank: two steps. -> the trajectory, from rank 0"""
    spec = Spec.model_validate_json(text)
    generator = torch.Generator().manual_seed(3)
    batches = []
    for step in range(2):
        tokens = torch.randint(VOCABULARY, (SEQUENCES, TOKENS + 1), generator=generator)
        ids = torch.arange(SEQUENCES) + step * SEQUENCES
        weights = torch.ones(SEQUENCES, TOKENS, dtype=torch.bool)
        batches.append(Batch(tokens=tokens[:, :-1], labels=tokens[:, 1:], mask=weights, ids=ids, documents=None))
    trajectory = run_steps(spec, mesh=mesh_of(spec, rank=rank, device=torch.device("cpu")), batches=batches)
    return plain(trajectory) if rank == 0 else None


def check_split(model: dict[str, Any], pool: RankPool) -> None:
    """Two tensor-parallel ranks compute what one does."""
    alone, split = (
        trajectory_of(pool.run(train, spec_of(model, tp=tp).model_dump_json(), ranks=tp)[0]) for tp in (1, 2)
    )
    findings = compare(split, alone, tolerances=TOLERANCES["fp64"])
    assert all(finding.passed for finding in findings), [str(f) for f in findings if not f.passed]


@settings(max_examples=50, **OPTIONS)
@given(model=decoders())
def test_facts_are_what_the_module_is(model: dict[str, Any]) -> None:
    check_parameters(model)
    check_flops(model)
    check_kept(model)


@settings(max_examples=12, **OPTIONS)
@given(model=decoders())
def test_two_ranks_compute_what_one_does(pool: RankPool, model: dict[str, Any]) -> None:
    check_split(model, pool)


@pytest.mark.slow
@settings(max_examples=500, **OPTIONS)
@given(model=decoders())
def test_facts_of_many_decoders(model: dict[str, Any]) -> None:
    check_parameters(model)
    check_flops(model)
    check_kept(model)


@pytest.mark.slow
@settings(max_examples=500, **OPTIONS)
@given(model=decoders())
def test_two_ranks_of_many_decoders(pool: RankPool, model: dict[str, Any]) -> None:
    check_split(model, pool)


# Every part, with everything that it can have.
_SIZES = {"kind": "decoder", "n_layers": 1, "d_model": 8, "n_heads": 4, "n_kv_heads": 2, "d_head": 4, "d_ffn": 12}
_DENSE = {
    **_SIZES,
    "vocab_size": VOCABULARY,
    "vocab_pad_to": 1,
    "max_seq_len": TOKENS,
    "norm": {"kind": "layer"},
    "positions": {"kind": "learned"},
    "layer": {"kind": "sequential", "norms": "sandwich"},
    "attention": {
        "kind": "gqa",
        "qkv_bias": True,
        "out_bias": True,
        "qk_norm": "per_head",
        "mask": {"kind": "window", "size": 3},
        "sinks": True,
        "clip_qkv": 0.5,
        "output_gate": True,
        "temperature": {"kind": "log", "floor_scale": 2.0},
    },
    "mlp": {"kind": "gated", "activation": "relu_squared", "bias": True},
}
_EXPERTS = _DENSE | {
    "norm": {"kind": "rms"},
    "positions": {"kind": "rotary"},
    "attention": {"kind": "gqa", "qk_norm": "whole", "score_cap": 2.0, "mask": {"kind": "chunk", "size": 3}},
    "moe": {"n_experts": 4, "d_expert": 4, "d_shared": 8, "shared_gate": True},
}


def without_each_line(facts: ModelFacts) -> Iterator[tuple[str, ModelFacts]]:
    """The facts of a model of one layer with one record left out, and its name."""
    for field in ("embedding", "norm"):
        for name, part in part_without_each_line(getattr(facts, field)):
            yield name, replace(facts, **{field: part})
    (layer,) = facts.layers
    for number, sublayer in enumerate(layer.sublayers):
        for field in ("pre", "mix", "shared", "post"):
            whole = getattr(sublayer, field)
            for name, part in () if whole is None else part_without_each_line(whole):
                sublayers = list(layer.sublayers)
                sublayers[number] = replace(sublayer, **{field: part})
                yield name, replace(facts, layers=(replace(layer, sublayers=tuple(sublayers)),))


def part_without_each_line(part: PartFacts) -> Iterator[tuple[str, PartFacts]]:
    """A part with one record left out, and the record's name."""
    for field in ("tables", "linears", "vectors"):
        records = getattr(part, field)
        for gone in records:
            yield gone.name, replace(part, **{field: tuple(one for one in records if one is not gone)})
    for gone in part.kept(Execution(keeps_scores=True)):
        if gone.what.startswith("router."):
            # a router's are counted as one
            continue

        def kept(execution: Execution, what: str = gone.what) -> list[Kept]:
            return [one for one in part.kept(execution) if one.what != what]

        yield f"kept {gone.what}", replace(part, kept=kept)


@pytest.mark.parametrize("model", [_DENSE, _EXPERTS], ids=["dense", "experts"])
def test_a_deleted_fact_is_found(model: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = recipe_of(model).model.facts
    assert passes_all_checks(model)
    names, missed = [], []
    for name, facts in without_each_line(whole):
        with monkeypatch.context() as patch:
            patch.setattr("megaspec.model.decoder.spec._facts_of", lambda _, facts=facts: facts)
            count_parameters.cache_clear()
            if passes_all_checks(model):
                missed.append(name)
        names.append(name)
    count_parameters.cache_clear()
    assert not missed
    assert len(names) == len(set(names)) > 20, names


def passes_all_checks(model: dict[str, Any]) -> bool:
    try:
        check_parameters(model)
        check_flops(model)
        check_kept(model)
    except AssertionError:
        return False
    return True
