"""Products in fp8 on many ranks are those of one rank: the same scales, the same numbers on the grid.

Everything but the grid is fp64, so what differs in the last bits rounds to the same numbers. One rank takes the micro
batches of all ranks one after the other, since each has scales of its own.
"""

from dataclasses import replace
from itertools import cycle

import pytest
import torch
from _pytest.mark.structures import ParameterSet

from megaspec.core.part_facts import Linear
from megaspec.verify.parity import TOLERANCES, Trajectory, compare
from tests.conftest import Tell
from tests.halved import halved
from tests.nn.plain_producers import OPERATIONS
from tests.nn.plain_producers import train as train_with_producers
from tests.parity.bugs import FP8, Bug
from tests.parity.cases import Case, alone, empty_of
from tests.parity.checks import check, check_fp8
from tests.parity.tasks import run_case, train, trajectory_of, truth_of
from tests.ranks import RankPool
from tests.source_patch import Patch
from tests.source_patch import check as check_patch

RECIPES = ("tensorwise", "delayed", "rowwise")
LAYOUTS = [
    Case(tp=2, mask="uneven", accumulate=2),
    Case(tp=2, sequence=True, mask="uneven", kv_heads=2, accumulate=2),
    Case(dp=2, accumulate=2, mask="uneven"),
    Case(dp=2, strategy="fsdp", accumulate=2, mask="uneven"),
    Case(pp=2, schedule="zb_h1", accumulate=3, mask="uneven"),
]


def slow(case: Case) -> ParameterSet:
    """One whose parts others hold, two at a time."""
    return pytest.param(case, marks=pytest.mark.slow)


OTHERS = [
    slow(Case(tp=4, sequence=True, precision="fp8 tensorwise", family="gpt", tied=True, accumulate=2)),
    slow(Case(tp=2, dp=2, sequence=True, strategy="fsdp", precision="fp8 rowwise", accumulate=3, documents=True)),
    Case(dp=2, strategy="zero1", precision="fp8 delayed", accumulate=2),
    Case(dp=2, strategy="zero2", precision="fp8 tensorwise", accumulate=3, optimizer="sgd"),
    # WRITTEN has it, too
    slow(Case(tp=2, pp=2, schedule="zb_v", virtual=2, n_layers=4, precision="fp8 delayed", accumulate=4)),
    Case(pp=2, schedule="interleaved", virtual=2, n_layers=4, precision="fp8 rowwise", accumulate=2),
    Case(dp=2, precision="fp8 delayed", n_layers=4, trainable="upper"),
    Case(tp=2, precision="fp8 blockwise", wide=True, accumulate=2),
    Case(tp=2, sequence=True, precision="fp8 blockwise", wide=True, accumulate=2),
    Case(dp=2, strategy="fsdp", precision="fp8 blockwise", wide=True, accumulate=2),
    # blocks of 32 tokens, where ranks have 8 of each sequence
    Case(tp=2, sequence=True, precision="fp8 mxfp8", wide=True, accumulate=2, mask="uneven"),
    Case(tp=2, pp=2, sequence=True, schedule="zb_h1", precision="fp8 mxfp8", wide=True, accumulate=4),
    Case(
        dp=2, strategy="fsdp", precision="fp8 mxfp8", wide=True, accumulate=2,
        also=(("parallelism.recompute.kind", "full"),),
    ),
    Case(dp=2, strategy="fsdp", precision="fp8 delayed", also=(("parallelism.recompute", {"kind": "full"}),)),
    Case(tp=2, sequence=True, precision="fp8 tensorwise", also=(("parallelism.recompute.kind", "selective"),)),
    # what is gathered as bytes: compiled (WRITTEN has it, too), deferred, beside what is frozen
    slow(Case(tp=2, sequence=True, precision="fp8 delayed", compile="block", accumulate=2)),
    # layers of that recipe are compiled in tests/nn, what they gather is looked at in tests/parallelism
    slow(Case(tp=2, sequence=True, precision="fp8 rowwise", compile="block", family="gpt")),
    Case(tp=2, pp=2, sequence=True, schedule="zb_h1", precision="fp8 tensorwise", accumulate=4),
    Case(tp=2, sequence=True, precision="fp8 tensorwise", n_layers=4, trainable="upper", mask="uneven"),
    Case(tp=2, sequence=True, precision="fp8 rowwise", trainable="norms"),
]  # fmt: skip
# Experts, where every rank of an ep group has tokens of the same micro batch: what an expert takes at once is the same
# on one rank.
EXPERTS = [
    Case(tp=2, sequence=True, kv_heads=2, router="softmax", ep=2, accumulate=2),
    Case(tp=2, sequence=True, kv_heads=2, router="softmax", etp=2, accumulate=2, experts="clamped"),
    Case(tp=2, sequence=True, router="sigmoid", ep=2, dispatch="all_gather", mask="uneven", shared="gate"),
    Case(tp=2, sequence=True, router="first", etp=2, dispatch="all_gather", accumulate=2, drop="position"),
    Case(dp=2, strategy="fsdp", router="softmax", accumulate=2, mask="uneven", n_layers=4, every=2),
]
GATHERED = (("precision.gather_fp8", True),)
OTHER_EXPERTS = [
    # compiled blocks never touch a weight that has no memory
    Case(dp=2, strategy="fsdp", router="softmax", precision="fp8 tensorwise", compile="block", also=GATHERED),
    slow(Case(tp=4, sequence=True, router="softmax", ep=2, etp=2, precision="fp8 delayed", accumulate=2)),
    slow(
        Case(tp=2, dp=2, sequence=True, strategy="fsdp", router="softmax", ep=2, precision="fp8 rowwise", drop="padded")
    ),
    Case(tp=2, pp=2, sequence=True, schedule="zb_h1", router="root", ep=2, precision="fp8 delayed", accumulate=4),
    Case(tp=2, sequence=True, router="softmax", ep=2, precision="fp8 tensorwise", experts="inputs, bias"),
    Case(dp=2, router="first", precision="fp8 tensorwise", drop="probs", accumulate=2, trainable="router"),
    Case(
        tp=2, sequence=True, router="softmax", etp=2, precision="fp8 tensorwise",
        also=(("parallelism.recompute", {"kind": "selective", "parts": ["activation"]}),),
    ),
    Case(
        tp=2, sequence=True, router="softmax", ep=2, precision="fp8 rowwise",
        also=(("parallelism.recompute", {"kind": "selective", "parts": ["moe"]}),),
    ),
]  # fmt: skip
# Weights that are gathered as bytes: to the bit what comes of gathering them first.
GATHERS = [
    Case(dp=2, strategy="fsdp", accumulate=2, mask="uneven"),
    Case(dp=4, strategy="hsdp", replicas=2, accumulate=1, optimizer="sgd"),
    Case(tp=2, dp=2, strategy="fsdp", sequence=True, accumulate=2, documents=True),
    Case(dp=2, strategy="fsdp", pp=2, schedule="zb_h1", n_layers=4, accumulate=2),
    Case(dp=2, strategy="fsdp", router="softmax", accumulate=2, also=(("parallelism.recompute", {"kind": "full"}),)),
    Case(tp=2, dp=2, strategy="fsdp", sequence=True, router="softmax", ep=2, accumulate=2),
    Case(tp=2, dp=2, strategy="fsdp", sequence=True, router="softmax", etp=2, experts="clamped", accumulate=2),
]
FP8_FACTS = "megaspec.nn.fp8_facts"
# Norms, gates and rotations that write fp8 themselves.
WRITTEN = [
    Case(tp=2, precision="fp8 delayed", mask="uneven", accumulate=2),
    Case(tp=2, sequence=True, precision="fp8 delayed", mask="uneven", kv_heads=2, accumulate=2),
    Case(
        tp=2, dp=2, sequence=True, strategy="fsdp", precision="fp8 delayed", accumulate=2,
        also=(("parallelism.recompute", {"kind": "full"}),),
    ),
    Case(tp=2, pp=2, schedule="zb_v", virtual=2, n_layers=4, precision="fp8 delayed", accumulate=4),
    Case(tp=2, sequence=True, precision="fp8 delayed", router="softmax", ep=2, accumulate=2, every=2, n_layers=4),
    Case(tp=2, sequence=True, precision="fp8 delayed", compile="block", accumulate=2),
    # norms write rows alone
    Case(tp=2, precision="fp8 delayed", n_layers=4, trainable="upper", accumulate=2),
]  # fmt: skip
# Of these the first divides products alone, the second tokens, too.
WRITING_BUGS = {
    "largest elements of a rank's own part": (
        WRITTEN[0],
        Patch("megaspec.parallelism.fp8", "counted.all_reduce(self._seen, dist.ReduceOp.MAX, group=group)", "pass"),
    ),
    "turned the other way": (
        WRITTEN[0],
        Patch(
            "megaspec.nn.fp8_producers",
            "producer.backward_in_fp8(grad_q, grad_k, grad_v, cos, sin, known=known)",
            "producer.backward_in_fp8(grad_q, grad_k, grad_v, cos, -sin, known=known)",
        ),
    ),
    "a scale twice as large": (
        WRITTEN[0],
        Patch(
            "megaspec.parallelism.fp8_linear",
            "Fp8Slots(grad_MO, grad_OM, grad_scale)",
            "Fp8Slots(grad_MO, grad_OM, 2 * grad_scale)",
        ),
    ),
    "a rank's tokens in the place of their neighbours": (
        WRITTEN[1],
        Patch(
            "megaspec.parallelism.fp8_linear",
            "values = given.rows.view(x.shape)",
            "values = given.rows.view(torch.uint8).view(x.shape).roll(1, 1).view(given.rows.dtype)",
        ),
    ),
    "a scale of tokens twice as large": (
        WRITTEN[1],
        Patch("megaspec.parallelism.fp8_linear", "scale = given.scale", "scale = 2 * given.scale"),
    ),
}
# What one rank quantises otherwise: in parts of sequences, and gradients of keys that two ranks have a part of each.
WRITTEN_IN_PARTS = [
    Case(cp=2, precision="fp8 delayed", mask="uneven", accumulate=2),
    Case(tp=2, sequence=True, precision="fp8 delayed", kv_heads=1, accumulate=2, documents=True),
]


# With bf16 outside of products, as it is trained.
TRAINED = [
    Case(dp=2, strategy="fsdp", precision="fp8 tensorwise in bf16", d_model=64, mask="uneven"),
    slow(Case(dp=2, ep=2, router="softmax", precision="fp8 rowwise in bf16", d_model=64, mask="uneven")),
    Case(tp=2, sequence=True, precision="fp8 delayed in bf16", d_model=64, mask="uneven"),
]


def steps_of(case: Case) -> int:
    """Two; three where scales are made from the steps before, since the second step knows a single one."""
    return 3 if case.precision == "fp8 delayed" else 2


# Of two neighbours one has a recipe, the other the next.
ALONE = [replace(layout, precision=f"fp8 {recipe}") for layout in (*LAYOUTS, *EXPERTS) for recipe in RECIPES]


@pytest.mark.parametrize("case", halved(ALONE), ids=str)
def test_layouts_equal_one_rank(pool: RankPool, case: Case, tell: Tell) -> None:
    check(pool, case, tell, steps=steps_of(case))


@pytest.mark.parametrize("case", [*OTHERS, *OTHER_EXPERTS], ids=str)
def test_layouts_together_equal_one_rank(pool: RankPool, case: Case, tell: Tell) -> None:
    check(pool, case, tell, steps=steps_of(case))


# A layout with one recipe and the next with the other, then those that are left.
TURNS = [("tensorwise", "delayed"), ("delayed", "tensorwise")]
GATHERED_CASES = [
    # without clipping, since the norm of all gradients is summed up bucket by bucket
    replace(layout, precision=f"fp8 {recipe}", optimizer="sgd")
    for layout, recipes in zip(GATHERS, cycle(TURNS), strict=False)
    for recipe in recipes
]


@pytest.mark.parametrize("case", halved(GATHERED_CASES), ids=str)
def test_weights_gathered_in_fp8_are_those_of_one_rank(pool: RankPool, case: Case, tell: Tell) -> None:
    bytewise = replace(case, also=(*case.also, *GATHERED))
    steps = steps_of(case)
    first = run_case(pool, case, steps=steps)
    second = run_case(pool, bytewise, steps=steps)
    findings = compare(second, truth_of(case, steps=steps), TOLERANCES["fp64"])
    tell(f"{bytewise}: {findings[0]}")
    assert all(one.passed for one in findings), findings[0]
    # to the bit
    assert first.losses == second.losses
    for name, weight in first.weights.values.items():
        assert torch.equal(weight, second.weights.values[name]), name


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_weights_gathered_in_fp8_are_clipped_and_decayed_as_on_one_rank(
    pool: RankPool, recipe: str, tell: Tell
) -> None:
    case = replace(GATHERS[0], precision=f"fp8 {recipe}", also=GATHERED)
    check(pool, case, tell, steps=steps_of(case))


GATHERED_WHOLE = (
    Patch(FP8_FACTS, 'INPUTS_IN_FP8 = ("tensorwise", "delayed", "rowwise")', "INPUTS_IN_FP8 = ()"),
    Patch(FP8_FACTS, 'GRADIENTS_IN_FP8 = ("tensorwise", "delayed")', "GRADIENTS_IN_FP8 = ()"),
)


def test_tokens_quantised_before_they_are_gathered_are_those_of_the_whole() -> None:
    """To the bit what comes of gathering first and quantising the whole on every rank."""
    with RankPool() as bytewise, RankPool(patches=GATHERED_WHOLE) as whole:
        for recipe in RECIPES:
            case = Case(tp=2, sequence=True, precision=f"fp8 {recipe}", accumulate=2, mask="uneven", optimizer="sgd")
            first = run_case(whole, case, steps=steps_of(case))
            second = run_case(bytewise, case, steps=steps_of(case))
            assert first.losses == second.losses, recipe
            assert first.norms == second.norms, recipe
            for name, weight in first.weights.values.items():
                assert torch.equal(weight, second.weights.values[name]), (recipe, name)


def writing(pool: RankPool, case: Case, *, device: str = "cpu") -> Trajectory:
    """With plain operations in the place of kernels that write fp8 themselves."""
    named = replace(case, also=(*case.also, *((f"kernels.{name}", "triton") for name in OPERATIONS)))
    steps = steps_of(case)
    (first, *_) = pool.run(train_with_producers, named, empty_of(case), steps, ranks=case.ranks, device=device)
    calls = first["calls"]
    assert all(calls.values()), calls
    return trajectory_of(first["trajectory"])


@pytest.mark.parametrize("case", WRITTEN, ids=str)
def test_what_kernels_write_is_what_one_rank_quantises(pool: RankPool, case: Case, tell: Tell) -> None:
    findings = compare(writing(pool, case), truth_of(case, steps=steps_of(case)), TOLERANCES["fp64"])
    tell(f"{case}: {findings[0]}")
    assert all(one.passed for one in findings), findings[0]


@pytest.mark.parametrize("bug", WRITING_BUGS)
def test_bugs_of_kernels_that_write_are_caught(bug: str, tell: Tell) -> None:
    case, patch = WRITING_BUGS[bug]
    check_patch(patch)
    with RankPool(patches=(patch,)) as ranks:
        findings = compare(writing(ranks, case), truth_of(case, steps=steps_of(case)), TOLERANCES["fp64"])
    fired = [f for f in findings if not f.passed and f.tolerance]
    assert fired, f"not caught: {findings[0]}"
    tell(f"{bug}: {fired[0]}, margin {fired[0].margin:.0e}")
    assert fired[0].margin >= 100


_TOKENS = Case(tp=2, sequence=True, precision="fp8 delayed", accumulate=2, mask="uneven", optimizer="sgd")
# What ranks gather behind a norm.
GATHERED_BEHIND_NORMS = [
    replace(_TOKENS, also=(("parallelism.recompute", {"kind": "full"}),)),
    # its ends are in another precision
    replace(
        _TOKENS, pp=2, schedule="zb_h1", n_layers=4, accumulate=4, kv_heads=2,
        also=(("precision.first_layers_bf16", 1), ("precision.last_layers_bf16", 1)),
    ),
    replace(_TOKENS, sequence=False),
]  # fmt: skip
CAST_BEHIND_NORMS = Patch(
    "megaspec.parallelism.fp8", "if _takes_written(entry, Linear, ColumnParallelLinear):", "if False:"
)


def test_tokens_that_norms_write_are_those_that_ranks_cast(pool: RankPool, tell: Tell) -> None:
    """To the bit what comes of ranks that cast what a norm has made: losses, weights, what is remembered and how many
    elements saturate, which many do."""
    check_patch(CAST_BEHIND_NORMS)
    with RankPool(patches=(CAST_BEHIND_NORMS,)) as casting:
        for case in GATHERED_BEHIND_NORMS:
            named = replace(case, also=(*case.also, ("kernels.norm", "triton")))
            inputs = (named, empty_of(case), steps_of(case))
            cast = casting.run(train_with_producers, *inputs, ranks=case.ranks, shrinks=16.0)
            written = pool.run(train_with_producers, *inputs, ranks=case.ranks, shrinks=16.0)
            assert not any(rank["calls"]["norm"] for rank in cast)
            assert all(rank["calls"]["norm"] for rank in written)
            assert [rank["remembered"] for rank in written] == [rank["remembered"] for rank in cast]
            saturated = [step.saturated for step in written[0]["remembered"]]
            tell(f"{case}: {saturated} elements saturate")
            assert saturated[0] == 0, "a first step has scales of its own"
            assert min(saturated[1:]) > 100
            first = trajectory_of(cast[0]["trajectory"])
            second = trajectory_of(written[0]["trajectory"])
            assert first.losses == second.losses, case
            assert first.norms == second.norms, case
            for name, weight in first.weights.values.items():
                assert torch.equal(weight, second.weights.values[name]), (case, name)


# Inputs of columns and gradients of rows are alike on ranks that share a layer, unless these quantise their own tokens.
COUNTED = [
    Case(tp=2, accumulate=2, mask="uneven"),
    Case(tp=2, sequence=True, kv_heads=2, accumulate=2),
    Case(tp=2, accumulate=2, also=(("parallelism.recompute", {"kind": "full"}),)),
    Case(dp=2, strategy="fsdp", accumulate=2),
    Case(tp=2, pp=2, schedule="zb_h1", accumulate=4),
    Case(tp=2, sequence=True, kv_heads=2, router="softmax", ep=2, accumulate=2),
    Case(tp=2, sequence=True, kv_heads=2, router="softmax", etp=2, accumulate=2, experts="clamped"),
]
EACH_COUNTS = Patch(
    "megaspec.parallelism.fp8", '"counts_alike": group is None or dist.get_rank(group) == 0', '"counts_alike": True'
)


def saturated_of(pool: RankPool, case: Case, *, ranks: int) -> list[int]:
    """Elements of each step, most of whose scales are too small."""
    inputs = (case, empty_of(case), steps_of(case))
    (first, *_) = pool.run(train_with_producers, *inputs, ranks=ranks, shrinks=16.0)
    return [step.saturated for step in first["remembered"]]


@pytest.mark.parametrize("case", COUNTED, ids=str)
def test_an_element_that_saturates_is_counted_once(pool: RankPool, case: Case, tell: Tell) -> None:
    case = replace(case, precision="fp8 delayed")
    truth = saturated_of(pool, alone(case), ranks=1)
    tell(f"{case}: {truth} elements saturate")
    assert min(truth[1:]) > 100
    assert saturated_of(pool, case, ranks=case.ranks) == truth


@pytest.mark.parametrize("case", [COUNTED[0], COUNTED[-1]], ids=str)
def test_ranks_that_all_count_the_same_are_caught(pool: RankPool, case: Case) -> None:
    check_patch(EACH_COUNTS)
    case = replace(case, precision="fp8 delayed")
    with RankPool(patches=(EACH_COUNTS,)) as ranks:
        assert saturated_of(ranks, case, ranks=case.ranks)[1] > saturated_of(pool, alone(case), ranks=1)[1]


@pytest.mark.parametrize("case", WRITTEN_IN_PARTS, ids=str)
def test_what_kernels_write_is_what_layers_quantise(pool: RankPool, case: Case, tell: Tell) -> None:
    findings = compare(writing(pool, case), run_case(pool, case, steps=steps_of(case)), TOLERANCES["fp64"])
    tell(f"{case}: {findings[0]}")
    assert all(one.passed for one in findings), findings[0]


def test_the_grid_is_felt() -> None:
    """What is compared here would not be the same without fp8."""
    wide = truth_of(Case(accumulate=2), steps=1)
    for recipe in (*RECIPES, "blockwise"):
        found = truth_of(Case(precision=f"fp8 {recipe}", accumulate=2), steps=1)
        error = abs(found.norms[0] - wide.norms[0]) / wide.norms[0]
        assert 1e-4 < error < 0.2, (recipe, error)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_grid_is_felt_by_experts(recipe: str) -> None:
    case = Case(router="softmax", accumulate=2)
    wide = truth_of(case, steps=1)
    found = truth_of(replace(case, precision=f"fp8 {recipe}"), steps=1)
    for name in ("layers.0.moe.experts.w_gate_up.weight", "layers.0.moe.experts.w_down.weight"):
        exact = wide.gradients.values[name]
        error = (found.gradients.values[name] - exact).norm() / exact.norm()
        # some tokens choose another expert for it
        assert 1e-3 < error < 0.6, (name, error)


def test_micro_batches_have_scales_of_their_own() -> None:
    one = truth_of(Case(precision="fp8 tensorwise"), steps=1)
    four = truth_of(Case(precision="fp8 tensorwise", accumulate=4), steps=1)
    assert alone(Case(dp=4, precision="fp8 tensorwise")).accumulate == 4
    assert one.norms[0] != four.norms[0]
    assert abs(one.norms[0] - four.norms[0]) < 0.1 * one.norms[0]


EXPERTS_ALONE = Patch(
    "megaspec.core.part_facts", 'self.purpose in ("attention", "mlp", "experts")', 'self.purpose == "experts"'
)


@pytest.mark.parametrize("dispatch", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_of_an_ep_group_take_its_micro_batches_as_one(
    recipe: str, dispatch: str, tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over data-parallel ranks an expert sees the tokens of all of them at once, as in one micro batch. What is around
    experts is in fp64 here, or it would have scales of other micro batches."""
    check_patch(EXPERTS_ALONE)
    whole = Case(precision=f"fp8 {recipe}", router="logit bias", mask="uneven")
    monkeypatch.setattr(Linear, "takes_fp8", property(lambda self: self.purpose == "experts"))
    # not truth_of, which remembers what it computed without the patch
    truth = trajectory_of(train(0, alone(whole), empty_of(whole), steps_of(whole)))
    case = replace(whole, dp=2, ep=2, dispatch=dispatch)
    with RankPool(patches=(EXPERTS_ALONE,)) as ranks:
        findings = compare(run_case(ranks, case, steps=steps_of(case)), truth, TOLERANCES["fp64"])
    tell(f"{case}: {findings[0]}")
    assert all(one.passed for one in findings), findings[0]


@pytest.mark.parametrize("bug", halved(FP8), ids=str)
def test_planted_bugs_are_caught(bug: Bug, tell: Tell) -> None:
    check_patch(bug.patch)
    truth = truth_of(bug.case, steps=steps_of(bug.case))
    with RankPool(patches=(bug.patch,)) as ranks:
        findings = compare(run_case(ranks, bug.case, steps=steps_of(bug.case)), truth, TOLERANCES["fp64"])
    fired = [f for f in findings if not f.passed and f.tolerance]
    assert fired, f"not caught: {findings[0]}"
    tell(f"{bug}: {fired[0]}, margin {fired[0].margin:.0e}")
    assert fired[0].margin >= 100


@pytest.mark.parametrize("case", TRAINED, ids=str)
def test_as_it_is_trained(pool: RankPool, case: Case, tell: Tell) -> None:
    check_fp8(pool, case, tell)
