"""kernels.linear=te on many ranks is what it is on one: the same scales, the same numbers on the grid.

One that computes in fp64 on a CPU stands in the package's place (tests/kernels/te.py), so that what is compared is who
gathers, casts, multiplies, adds and asks whom. The package's own numbers are the GPU's: tests/gpu/test_te.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path

import pytest

from megaspec.verify.parity import TOLERANCES, Trajectory, compare
from tests.conftest import Tell
from tests.parity.bugs import LOADED, Bug
from tests.parity.cases import Case, alone
from tests.parity.tasks import run_case
from tests.parity.test_checkpoints import FP8, check_caught, check_remembered, each_into_others
from tests.parity.test_fp8 import slow, steps_of
from tests.ranks import RankPool
from tests.source_patch import Patch, check

# within a function, so that ranks need not import the project anew
IN_ITS_PLACE = Patch(
    "megaspec_kernels.te_package",
    'pytorch = importlib.import_module(f"{PACKAGE}.pytorch")',
    'return importlib.import_module("tests.kernels.te").in_its_place()',
)
LAYER = "megaspec.nn.fp8_te"
MX_LAYER = "megaspec.nn.fp8_mx"
FP4_LAYER = "megaspec.nn.fp4"
TE = (("kernels.linear", "te"),)
HYBRID = ("precision.format", "hybrid")
NEAREST = ("precision.gradient_rounding", "nearest")
RECOMPUTED = ("parallelism.recompute.kind", "full")
CASES = [
    Case(tp=2, accumulate=2, mask="uneven", also=TE),
    Case(tp=2, sequence=True, accumulate=2, mask="uneven", also=TE),
    Case(dp=2, strategy="fsdp", accumulate=2, also=TE),
    Case(pp=2, schedule="zb_h1", accumulate=3, also=TE),
    Case(tp=2, sequence=True, precision="fp8 tensorwise", accumulate=2, mask="uneven", also=TE),
    Case(tp=2, precision="fp8 delayed", accumulate=2, also=TE),
    Case(dp=2, precision="fp8 delayed", accumulate=2, mask="uneven", also=TE),
    Case(dp=2, strategy="fsdp", precision="fp8 tensorwise", accumulate=2, also=TE),
    Case(pp=2, schedule="zb_h1", precision="fp8 delayed", accumulate=3, also=TE),
    Case(tp=2, sequence=True, precision="fp8 blockwise", wide=True, accumulate=2, also=TE),
    Case(tp=2, sequence=True, precision="fp8 delayed", accumulate=2, also=TE),
    Case(tp=2, precision="fp8 mxfp8", wide=True, accumulate=2, also=TE),
    # blocks of 32 tokens, where ranks have 8 of each sequence
    Case(tp=2, sequence=True, precision="fp8 mxfp8", wide=True, accumulate=2, mask="uneven", also=(*TE, HYBRID)),
    Case(dp=2, strategy="fsdp", precision="fp8 mxfp8", wide=True, accumulate=2, also=(*TE, RECOMPUTED)),
    Case(pp=2, schedule="1f1b", precision="fp8 mxfp8", wide=True, accumulate=3, also=TE),
    Case(tp=2, pp=2, sequence=True, schedule="zb_h1", precision="fp8 mxfp8", wide=True, accumulate=4, also=TE),
    Case(tp=2, sequence=True, precision="fp8 mxfp8", wide=True, compile="block", accumulate=2, also=TE),
    # what is rounded at random is another draw on each rank
    Case(tp=2, precision="fp8 nvfp4", wide=True, accumulate=2, also=(*TE, NEAREST)),
    Case(tp=2, sequence=True, precision="fp8 nvfp4", wide=True, accumulate=2, mask="uneven", also=(*TE, NEAREST)),
    Case(dp=2, strategy="fsdp", precision="fp8 nvfp4", wide=True, accumulate=2, also=(*TE, NEAREST, RECOMPUTED)),
    Case(
        tp=2, pp=2, sequence=True, schedule="zb_h1", precision="fp8 nvfp4", wide=True, accumulate=2,
        also=(*TE, NEAREST),
    ),
    Case(tp=2, sequence=True, precision="fp8 nvfp4", wide=True, compile="block", accumulate=2, also=(*TE, NEAREST)),
    # by the definition
    Case(tp=2, sequence=True, precision="fp8 nvfp4", wide=True, accumulate=2, mask="uneven", also=(NEAREST,)),
    Case(pp=2, schedule="1f1b", precision="fp8 nvfp4", wide=True, accumulate=3, also=(NEAREST,)),
]  # fmt: skip
# Those beside which another one holds the same: with sequence parallelism, another schedule, the other format, in
# mxfp8, or by layers that are compiled, in tests/nn.
HELD_BY_OTHERS = (CASES[11], CASES[14], CASES[16], CASES[17], *CASES[19:22], CASES[23])
# Planted: what the cases above have to feel.
BUGS = {
    "amax of a rank's own part": (
        Patch(
            "megaspec.nn.fp8_te",
            "factor = te_fp8.factor_of(self.largest(te_fp8.amax(x_MK)), dtype)",
            "factor = te_fp8.factor_of(te_fp8.amax(x_MK), dtype)",
        ),
        CASES[4],
    ),
    "a sum that is overwritten": (
        Patch("megaspec_kernels.linear.te_fp8", "accumulate=not overwrite", "accumulate=False"),
        CASES[5],
    ),
    "a sum of wide gradients that is overwritten": (
        Patch("megaspec_kernels.linear.te", "accumulate=not overwrite", "accumulate=False"),
        CASES[0],
    ),
    "steps remembered by each rank for itself": (
        Patch("megaspec.parallelism.fp8", "counted.all_reduce(self._seen, dist.ReduceOp.MAX, group=group)", "pass"),
        CASES[6],
    ),
    "weights of the step before": (
        Patch("megaspec.parallelism.fp8", "self._shared.version += 1", "self._shared.version = 1"),
        CASES[4],
    ),
    "a scale twice as large": (
        Patch(LAYER, "scale = scale.view(1).to(torch.float32)", "scale = 2 * scale.view(1).to(torch.float32)"),
        CASES[4],
    ),
    "scale of another role": (Patch(LAYER, "place = REMEMBERED.index(role)", "place = 0"), CASES[6]),
    "only the last cast of a step remembered": (
        Patch(LAYER, "seen = self.memory.seen[place].view(1)", "seen = self.memory.seen[place].view(1).zero_()"),
        CASES[6],
    ),
    "columns as they lie in rows": (
        Patch(
            LAYER,
            "in_columns = Fp8Tensor(cast.columns.values, cast.columns.scale.view(1, 1))",
            "in_columns = Fp8Tensor(\n"
            "                cast.rows.values.reshape(cast.columns.values.shape), cast.columns.scale.view(1, 1)\n"
            "            )",
        ),
        CASES[5],
    ),
    "gathered tokens turned as they lie": (
        Patch(
            LAYER, "values.view(torch.uint8).t().contiguous()", "values.view(torch.uint8).reshape(values.shape[::-1])"
        ),
        CASES[10],
    ),
    "columns of blocks of rows": (
        Patch(
            MX_LAYER,
            "in_columns = Fp8Tensor(*cast.columns)",
            "in_columns = Fp8Tensor(cast.rows.values if rows else cast.columns.values, cast.columns.scale)",
        ),
        CASES[11],
    ),
    "gradients in the format of inputs": (
        Patch(MX_LAYER, 'self.gradient_format if role == "gradient" else "e4m3"', '"e4m3"'),
        CASES[12],
    ),
    "a sum of blocks that is overwritten": (
        Patch(MX_LAYER, "overwrite=into is None or overwrite", "overwrite=True"),
        CASES[11],
    ),
    "blocks of the weights of the step before": (
        Patch("megaspec.parallelism.fp8", "self._shared.version += 1", "self._shared.version = 1"),
        CASES[11],
    ),
    "amax of a rank's own part of a matrix in fp4": (
        Patch(FP4_LAYER, "if self.is_divided(role):", "if False:"),
        CASES[17],
    ),
    "amax of a rank's own part by the definition": (
        Patch(FP4_LAYER, "Agreement(self.largest, self.group)", "Agreement(lambda amax: amax, None)"),
        CASES[22],
    ),
    "a sum of fp4 that is overwritten": (
        Patch(FP4_LAYER, "overwrite=into is None or overwrite", "overwrite=True"),
        CASES[17],
    ),
    "fp4 of the weights of the step before": (
        Patch("megaspec.parallelism.fp8", "self._shared.version += 1", "self._shared.version = 1"),
        CASES[17],
    ),
    "gathered tokens in fp4 in the order of ranks": (
        Patch("megaspec.nn.fp8_layouts", "return kept.reshape(n_in, -1)", "return kept.roll(1, 1).reshape(n_in, -1)"),
        CASES[18],
    ),
    "gathered tokens by the scales of their neighbours": (
        Patch(
            "megaspec.nn.fp8_layouts", "return kept.view(torch.uint8).flatten(0, -2)",
            "return kept.view(torch.uint8).roll(1, 1).flatten(0, -2)",
        ),
        CASES[12],
    ),
    "a rank's own part of the tokens kept, by the scales of another": (
        Patch(
            "megaspec.nn.fp8", "kept_scale = whole.scale\n", "kept_scale = whole.scale.roll(1, 0)\n",
        ),
        CASES[12],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    check(IN_ITS_PLACE)
    with RankPool(patches=(IN_ITS_PLACE,)) as pool:
        yield pool


@pytest.fixture(scope="module")
def truth_of(ranks: RankPool) -> Callable[[Case], Trajectory]:
    """What one rank computes, once for all bugs of a case."""

    @cache
    def compute(case: Case) -> Trajectory:
        return run_case(ranks, replace(alone(case), also=case.also), steps=steps_of(case))

    return compute


@pytest.mark.parametrize("case", [slow(case) if case in HELD_BY_OTHERS else case for case in CASES], ids=str)
def test_layouts_equal_one_rank(
    ranks: RankPool, truth_of: Callable[[Case], Trajectory], case: Case, tell: Tell
) -> None:
    findings = compare(run_case(ranks, case, steps=steps_of(case)), truth_of(case), TOLERANCES["fp64"])
    tell(f"{case}: {findings[0]}")
    assert all(finding.passed for finding in findings), findings


@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_caught(truth_of: Callable[[Case], Trajectory], name: str, tell: Tell) -> None:
    patch, case = BUGS[name]
    check(patch)
    with RankPool(patches=(IN_ITS_PLACE, patch)) as wrong:
        findings = compare(run_case(wrong, case, steps=steps_of(case)), truth_of(case), TOLERANCES["fp64"])
    fired = [finding for finding in findings if not finding.passed and finding.tolerance]
    assert fired, f"not caught: {findings[0]}"
    tell(f"{name}: {fired[0]}, margin {fired[0].margin:.0e}")
    assert fired[0].margin >= 100


DELAYED = Case(precision="fp8 delayed", mask="uneven", kv_heads=2, also=TE)


def test_what_is_remembered_goes_on_in_other_layouts(ranks: RankPool, tmp_path: Path, tell: Tell) -> None:
    each_into_others(ranks, DELAYED, dict(islice(FP8.items(), 2)), tmp_path, tell)
    check_remembered(tmp_path)


@pytest.mark.slow
def test_what_is_remembered_goes_on_in_every_other_layout(ranks: RankPool, tmp_path: Path, tell: Tell) -> None:
    # a layer for each of two chunks of two stages
    each_into_others(ranks, replace(DELAYED, n_layers=4), FP8, tmp_path, tell, each_trains=True)
    check_remembered(tmp_path)


# test_checkpoints.py has some of them by default, of layers without the package
@pytest.mark.slow
@pytest.mark.parametrize("bug", LOADED, ids=str)
def test_bugs_of_what_is_remembered_are_caught(bug: Bug, tmp_path: Path, tell: Tell) -> None:
    check(bug.patch)
    with RankPool(patches=(IN_ITS_PLACE, bug.patch)) as wrong:
        check_caught(replace(bug, case=replace(bug.case, also=TE)), wrong, tmp_path, tell)
