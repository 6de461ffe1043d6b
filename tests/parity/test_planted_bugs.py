"""The parity harness is only as good as the bugs that it catches: each of these is one line of shipped source."""

from dataclasses import dataclass

import pytest

from megaspec.runtime.parity import TOLERANCES, compare
from tests.parity.cases import Case
from tests.parity.tasks import run_case, truth_of
from tests.ranks import RankPool
from tests.source_patch import Patch, check

STEPS = 3
MARGIN = 100.0

TENSOR = "megaspec.parallelism.tensor"
SUMS = "megaspec.parallelism.reductions"


@dataclass(frozen=True)
class Bug:
    """A planted bug, a case that it touches, and whether the loss of the first step shows nothing of it."""

    name: str
    patch: Patch
    case: Case
    invisible: bool = False

    def __str__(self) -> str:
        return self.name


BUGS = [
    Bug(
        "norm gradients not summed under sequence parallel",
        Patch(
            TENSOR,
            'self.sums.append(GradientSum(name, None, self.mesh.group("tp")))',
            "pass",
        ),
        Case(tp=2, sequence=True),
        invisible=True,
    ),
    Bug(
        "gradients doubled",
        Patch(SUMS, "self.totals[name].copy_(parameter.grad)", "self.totals[name].copy_(parameter.grad * 2)"),
        Case(dp=2),
        invisible=True,
    ),
    Bug(
        "last bucket not reduced",
        Patch(
            "megaspec.parallelism.bucket",
            "if self.sharers.sum is None:",
            'if self.sharers.sum is None or "embed.weight" in self.names:',
        ),
        Case(dp=2, mask="uneven"),
        invisible=True,
    ),
    Bug(
        "bucket not overwritten by the first micro batch",
        Patch(SUMS, "if name in bucket.fresh:", "if False:"),
        Case(dp=2, accumulate=3, mask="uneven"),
        invisible=True,
    ),
    Bug(
        "only the last micro batch of a matrix counts",
        Patch("megaspec.nn.linear", "sum_._fresh = False", "pass"),
        Case(dp=2, accumulate=3, mask="uneven"),
        invisible=True,
    ),
    Bug(
        "bucket reduced before the last micro batch",
        Patch(SUMS, "if last:", "if True:"),
        Case(dp=2, accumulate=3, mask="uneven"),
        invisible=True,
    ),
    Bug(
        "gradient of a shared key and value head not summed",
        Patch(TENSOR, 'self.sums += [GradientSum(f"{name}.{p}", held, group) for p in ("weight", "bias")]', "pass"),
        Case(tp=4, kv_heads=2),
        invisible=True,
    ),
    Bug(
        "input gradient of a column-split layer not summed",
        Patch(TENSOR, "wait_sequence(reducing) if ctx.sequence else wait(reducing)", "wait(grad_x)"),
        Case(tp=2),
        invisible=True,
    ),
    Bug(
        "bias of a row-split layer added on every rank",
        Patch(
            TENSOR,
            "LinearOp.apply(x, self.weight, None, self.total, self.queue)",
            "LinearOp.apply(x, self.weight, self.bias, self.total, self.queue)",
        ),
        Case(tp=2, family="gpt", optimizer="sgd"),
        invisible=True,
    ),
    Bug(
        "norm counts copies twice",
        Patch("megaspec.optim.norm", "if piece.replica == 0]", "if piece.replica >= 0]"),
        Case(tp=2),
        invisible=True,
    ),
    Bug(
        "vectors decay too",
        Patch("megaspec.optim.master", "return parameter.dim() >= 2", "return parameter.dim() >= 1"),
        Case(tp=2),
        invisible=True,
    ),
    Bug(
        "same sequences on both data ranks",
        Patch("megaspec.runtime.parity", "first = (j * dp + rank) * micro_batch", "first = (j * dp) * micro_batch"),
        Case(dp=2, accumulate=3),
    ),
    Bug(
        "loss divided by this rank's tokens",
        Patch("megaspec.runtime.step", "if built.mesh.world_size > 1:", "if built.mesh.world_size > 99:"),
        Case(dp=2, mask="uneven"),
    ),
    Bug(
        "mask shifted by one token",
        Patch(
            "megaspec.runtime.step", "_mine(batch.mask, index) * weight", "_mine(batch.mask.roll(1, 1), index) * weight"
        ),
        Case(dp=2, mask="uneven"),
    ),
    Bug(
        "positions run on across documents",
        Patch(
            "megaspec.nn.decoder",
            "positions = index_T if documents is None else document_positions(documents)[:, index_T]",
            "positions = index_T",
        ),
        Case(tp=2, documents=True, family="gpt"),
    ),
    Bug(
        "same dropout mask on every part of the sequence",
        Patch(
            "megaspec.nn.dropout",
            "position = noise.index[self.part[0] * T : (self.part[0] + 1) * T]",
            "position = noise.index[:T]",
        ),
        Case(tp=2, sequence=True, dropout=True, attention="reference"),
    ),
    Bug(
        "same attention dropout on every rank's heads",
        Patch(TENSOR, 'module.core.first_head = self.mesh.index("tp")', "module.core.first_head = 0"),
        Case(tp=2, dropout=True, attention="reference"),
    ),
    Bug(
        "vocabulary offset off by one",
        Patch(TENSOR, "module.first = first", "module.first = first - (rank > 0)"),
        Case(tp=2, pad=1),
    ),
    Bug(
        "a padding column counted as a token",
        Patch(
            TENSOR,
            "valid = min(max(self.vocab_size - self.first, 0), self.weight.shape[0])",
            "valid = min(max(self.vocab_size + 1 - self.first, 0), self.weight.shape[0])",
        ),
        Case(tp=2, pad=8, tied=True),
    ),
    Bug(
        "positions of the first part on every part of the sequence",
        Patch(
            "megaspec.nn.embedding", "positions[..., self.part[0] * T : (self.part[0] + 1) * T]", "positions[..., :T]"
        ),
        Case(tp=2, sequence=True, family="gpt"),
    ),
]


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_caught(bug: Bug, capsys: pytest.CaptureFixture[str]) -> None:
    check(bug.patch)
    truth = truth_of(bug.case, steps=STEPS)
    with RankPool(patches=(bug.patch,)) as ranks:
        findings = compare(run_case(ranks, bug.case, steps=STEPS), truth, TOLERANCES["fp64"])
    fired = [f for f in findings if not f.passed and f.tolerance]
    assert fired, f"not caught: {findings[0]}"
    with capsys.disabled():
        print(f"\n{bug}: {fired[0]}, margin {fired[0].margin:.0e}", end="")
    assert fired[0].margin >= MARGIN
    first_loss = next(f for f in findings if f.what == "loss at step 1")
    assert first_loss.passed == bug.invisible, f"{first_loss}"


@pytest.mark.parametrize("case", sorted({b.case for b in BUGS}, key=str), ids=str)
def test_the_same_cases_pass_without_the_bug(pool: RankPool, case: Case) -> None:
    findings = compare(run_case(pool, case, steps=STEPS), truth_of(case, steps=STEPS), TOLERANCES["fp64"])
    assert all(f.passed for f in findings), findings[0]


def test_at_least_two_are_invisible_to_the_first_loss() -> None:
    assert sum(b.invisible for b in BUGS) >= 2
