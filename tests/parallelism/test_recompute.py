"""What is computed again is the same to the bit, and what the plan says is freed is freed."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megaspec.compose.compose import compose
from megaspec.data.batch import Batch
from megaspec.estimate.activations import layer_bytes
from megaspec.estimate.layer_run import layer_run
from megaspec.nn.decoder import Decoder
from megaspec.nn.linear import Linear
from megaspec.parallelism.recompute import Recompute
from megaspec.parallelism.saved import SavedTensors
from megaspec.parallelism.spec import RecomputePart, RecomputeSpec
from megaspec.resolve.resolver import resolve
from megaspec.rules.examples import CPU, FACTS
from megaspec.runtime.build import TrainState, build, build_model, initialise, materialise, mesh_of
from megaspec.runtime.step import count_tokens, forward_backward
from megaspec.spec import Spec
from megaspec.verify.parity import divide, gather_global
from megaspec_kernels.registry import kernels_of
from tests.parallelism.kept import kept_bytes
from tests.plan.plans import GPT, LLAMA, plan
from tests.ranks import RankPool

NONE = "{kind: none}"
KINDS = (
    "{kind: full}",
    "{kind: full, layers: 3}",
    "{kind: full, method: block, layers: 2}",
    "{kind: selective}",
    "{kind: selective, parts: [norm]}",
    "{kind: selective, parts: [activation]}",
    "{kind: selective, parts: [mlp]}",
    "{kind: selective, parts: [core_attention, norm, activation]}",
    "{kind: selective, parts: [core_attention, norm, mlp, activation]}",
)
EXPERT_KINDS = (
    "{kind: full, layers: 2}",
    "{kind: selective, parts: [norm, activation]}",
    "{kind: selective, parts: [moe, norm, core_attention]}",
    "{kind: selective, parts: [shared_experts, activation]}",
)
EXPERTS = (
    "model.moe={n_experts: 4, top_k: 2, d_expert: 16, d_shared: 24, first_dense: 1}",
    "model.moe.router={score: sigmoid, expert_bias: true, bias_rate: 1e-3, z_loss: 0.01}",
    "model.moe.router.losses=[{kind: aux, coefficient: 0.1}]",
)
SMALL = ("n_layers=4", "d_model=32", "n_heads=4", "d_head=8", "d_ffn=48", "vocab_size=67", "max_seq_len=16")


def spec_of(*words: str, family: str = "llama", dropout: bool = True, tp: int = 1, pp: int = 1) -> Spec:
    share, kernel = (0.1, "reference") if dropout else (0.0, "sdpa")
    model = ["model=hello", "model.n_kv_heads=2"] if family == "llama" else ["model=gpt2_124m"]
    data = ["data=random", "data.vocab_size=67", "~data.blend", "data.seq_len=16", "train.sample=null"]
    more = [
        *(f"model.{word}" for word in SMALL),
        f"model.attention.dropout={share}",
        f"+model.dropout={share}",
        f"launcher.ranks={tp * pp}",
        f"parallelism.tp={tp}",
        f"parallelism.pp={pp}",
        "precision=fp64",
        "train.global_batch=6",
        "train.micro_batch=3",
        f"kernels.attention={kernel}",
        "kernels.compile=none",
    ]
    recipe = compose("hello", [*model, *data, *more, *words]).recipe
    return resolve(recipe, CPU, replace(FACTS, vocab_size=67))


def batch_of() -> Batch:
    """6 sequences of 16 tokens, of which an uneven share counts."""
    draw = torch.Generator().manual_seed(7)
    stream = torch.randint(0, 67, (6, 17), generator=draw)
    mask = torch.rand(6, 16, generator=draw) < torch.linspace(0.2, 1.0, 6)[:, None]
    return Batch(stream[:, :-1].contiguous(), stream[:, 1:].contiguous(), mask, torch.arange(6), None)


def built_of(spec: Spec, rank: int = 0) -> TrainState:
    built = build(spec, mesh=mesh_of(spec, rank=rank, device=torch.device("cpu")))
    initialise(built)
    return built


def go(built: TrainState) -> None:
    """Sums up the gradients of a global batch."""
    mine = divide(batch_of(), mesh=built.mesh, micro_batch=built.spec.train.micro_batch)
    tokens, _ = count_tokens(built, mine, stop=False)
    forward_backward(built, mine, tokens=tokens, loss_scale=torch.tensor(1.0))


def gradients(rank: int, spec: Spec) -> dict[str, Any]:
    """Of a global batch, by name, as arrays on rank 0."""
    torch.set_num_threads(1)
    built = built_of(spec, rank)
    go(built)
    found = gather_global(built.data_parallel.gradients, built.shards, mesh=built.mesh).values
    return {name: value.numpy() for name, value in found.items()}


def differing(words: list[str], kind: str, **more: Any) -> list[str]:
    """Names of gradients of one rank that are not the same to the bit as without recomputation."""
    plain = gradients(0, spec_of(*words, **more))
    again = gradients(0, spec_of(*words, f"parallelism.recompute={kind}", **more))
    assert again.keys() == plain.keys()
    return [name for name, value in plain.items() if value.tobytes() != again[name].tobytes()]


@pytest.mark.parametrize("family", ["llama", "gpt"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_same_to_the_bit(kind: str, family: str) -> None:
    assert differing([], kind, family=family) == []


@pytest.mark.parametrize("kind", EXPERT_KINDS)
def test_with_experts_gradients_are_the_same_to_the_bit(kind: str) -> None:
    assert differing([*EXPERTS], kind, dropout=False) == []


@pytest.mark.parametrize("kind", ["{kind: full, layers: 2}", "{kind: selective, parts: [norm, activation, mlp]}"])
def test_on_two_tensor_parallel_ranks_sums_run_again_in_the_same_order(kind: str) -> None:
    def spec(kind: str) -> Spec:
        return spec_of(f"parallelism.recompute={kind}", "parallelism.sequence_parallel=true", tp=2)

    with RankPool() as pool:
        plain, again = (pool.run(gradients, spec(one), ranks=2)[0] for one in (NONE, kind))
    assert [name for name, value in plain.items() if value.tobytes() != again[name].tobytes()] == []


def traced(kind: RecomputeSpec) -> list[Tensor]:
    """Gradients of a layer and its input where it is traced as a compiler does it, and run as plain operations."""
    torch._dynamo.reset()
    spec = spec_of("model.n_layers=1", dropout=False)
    model = build_model(spec.model, kernels_of(spec.kernels), dtype=torch.float64)
    materialise(model, device=torch.device("cpu"), dtype=torch.float64)
    draw = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data.normal_(generator=draw)
    model.layers["0"].compile(backend="aot_eager")
    Recompute(kind, SavedTensors(), compiled=True).apply(model)
    x_BTD = torch.randn(2, 16, 32, dtype=torch.float64, generator=draw).requires_grad_()
    model.units[1].run(x_BTD, model.context(torch.arange(16), length=16)).square().sum().backward()
    return [x_BTD.grad, *(p.grad for p in model.layers.parameters())]


@pytest.mark.parametrize(
    "parts",
    [("core_attention", "norm"), *(pytest.param((one,), marks=pytest.mark.slow) for one in ("activation", "mlp"))],
)
def test_traced_layers_compute_the_same_again(parts: tuple[RecomputePart, ...]) -> None:
    plain = traced(RecomputeSpec())
    again = traced(RecomputeSpec(kind="selective", parts=parts))
    for expected, found in zip(plain, again, strict=True):
        assert (expected - found).abs().max() <= 1e-14 * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [KINDS[1], KINDS[3], KINDS[8]])
def test_compiled_layers_compute_the_same_again(kind: str) -> None:
    """Fused operations may round in another way where they are split otherwise; in fp64 that is far below 1e-15."""
    plain, again = (
        gradients(0, spec_of(f"parallelism.recompute={one}", "kernels.compile=block", dropout=False))
        for one in (NONE, kind)
    )
    assert max(abs(value - again[name]).max() for name, value in plain.items()) < 1e-15


def test_groups_are_units_and_blocks_come_first() -> None:
    def units(kind: str) -> list[tuple[str, int]]:
        chunk = built_of(spec_of(f"parallelism.recompute={kind}")).chunks[0]
        return [(unit.name, len(unit.modules)) for unit in chunk.units if unit.name not in ("embed", "head")]

    each = [(f"layers.{i}", 1) for i in range(4)]
    assert units("{kind: full, layers: 3}") == [("layers.0-2", 3), ("layers.3", 1)]
    assert units("{kind: full}") == each
    assert units("{kind: full, method: block, layers: 2}") == each
    assert units("{kind: selective}") == each


@pytest.mark.parametrize(
    ("kind", "products"),
    # of 4 layers with 4 products each and the head: forward, again, both gradients
    [
        (NONE, 16),
        ("{kind: full}", 32),
        ("{kind: full, layers: 2}", 32),
        ("{kind: full, method: block, layers: 1}", 20),
        ("{kind: selective, parts: [norm, activation, core_attention]}", 16),
        ("{kind: selective, parts: [mlp]}", 24),
    ],
)
def test_products_are_computed_again_once_and_their_gradients_never(
    kind: str, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, weight = [], []
    plain = Linear.forward
    monkeypatch.setattr(Linear, "forward", lambda self, x: forward.append(1) or plain(self, x))
    add = torch.ops.megaspec.add_weight_gradient
    monkeypatch.setattr("megaspec.nn.linear.add_weight_gradient", lambda *a: weight.append(1) or add(*a))
    built = built_of(spec_of(f"parallelism.recompute={kind}", "train.micro_batch=6"))
    go(built)
    assert len(forward) == products
    assert len(weight) == 16


@pytest.mark.parametrize("parts", [("norm",), ("activation",), ("core_attention",), ("mlp",), ("mlp", "norm")])
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (LLAMA | {"n_kv_heads": 4}, {"precision.kind": "fp32"}),
        (LLAMA, {"precision.kind": "fp32", "kernels.attention": "reference"}),
        (GPT, {"precision.kind": "fp32"}),
    ],
    ids=["llama", "written out", "gpt"],
)
def test_a_plain_layer_keeps_what_the_plan_says(
    model: dict[str, Any], changes: dict[str, Any], parts: tuple[RecomputePart, ...]
) -> None:
    size = {"d_model": 64, "d_ffn": 96, "n_layers": 1, "max_seq_len": 128}
    own = {"parallelism.recompute": {"kind": "selective", "parts": list(parts)}, "kernels.compile": "none"}
    recipe = plan(model | size, {"data.seq_len": 128, "train.micro_batch": 2} | changes | own)
    decoder = build_model(recipe.model, kernels_of(recipe.kernels), dtype=torch.float32)
    materialise(decoder, device=torch.device("cpu"), dtype=torch.float32)
    for parameter in decoder.parameters():
        parameter.data.normal_()
    Recompute(recipe.parallelism.recompute, SavedTensors(), compiled=False).apply(decoder)
    context = decoder.context(torch.arange(128), length=128)
    x_BTD = torch.randn(2, 128, 64, requires_grad=True)
    here = (x_BTD, *decoder.parameters(), *(x for table in context.angles for x in table))
    kept = kept_bytes(lambda: decoder.units[1].run(x_BTD, context), without=here)
    assert kept + x_BTD.nbytes == layer_bytes(layer_run(recipe), recipe.model.facts.layers[0]).kept


class Doubled(torch.nn.Module):
    """A mixer that is none of the known ones."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, x: Tensor, noise: object) -> Tensor:
        self.runs += 1
        return (2 * x).sigmoid()


class SaysMlp(Doubled):
    recompute_parts = frozenset({"mlp"})


class SaysUnknown(Doubled):
    recompute_parts = frozenset({"state"})


class SaysUnhandled(Doubled):
    recompute_parts = frozenset({"mla_up"})


def with_mixer(mixer: Doubled, *parts: RecomputePart) -> Decoder:
    """A decoder whose second layer has `mixer` as its feed-forward layer, with these parts recomputed."""
    spec = spec_of("model.n_layers=2", dropout=False)
    model = build_model(spec.model, kernels_of(spec.kernels), dtype=torch.float64)
    materialise(model, device=torch.device("cpu"), dtype=torch.float64)
    model.layers["1"].mlp = mixer
    Recompute(RecomputeSpec(kind="selective", parts=parts), SavedTensors(), compiled=False).apply(model)
    return model


@pytest.mark.parametrize("parts", [("mlp",), ("norm",)])
def test_a_mixer_that_forgets_to_say_its_parts_is_refused(parts: tuple[RecomputePart, ...]) -> None:
    with pytest.raises(AssertionError, match=r"mlp \(Doubled\) doesn't say what of parallelism\.recompute\.parts"):
        with_mixer(Doubled(), *parts)


def test_a_mixer_that_says_a_part_that_nobody_knows_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"mlp \(SaysUnknown\)\.recompute_parts=\['state'\], known are"):
        with_mixer(SaysUnknown(), "mlp")
    with pytest.raises(AssertionError, match=r"mlp \(SaysUnhandled\): nothing recomputes the part mla_up"):
        with_mixer(SaysUnhandled(), "mla_up")


@pytest.mark.parametrize(("parts", "runs"), [(("norm",), 1), (("mlp",), 2)])
def test_a_mixer_is_recomputed_as_the_part_that_it_says(parts: tuple[RecomputePart, ...], runs: int) -> None:
    mixer = SaysMlp()
    model = with_mixer(mixer, *parts)
    for parameter in model.parameters():
        parameter.data.normal_()
    x_BTD = torch.randn(2, 16, 32, dtype=torch.float64).requires_grad_()
    model.units[2].run(x_BTD, model.context(torch.arange(16), length=16)).square().sum().backward()
    assert mixer.runs == runs
