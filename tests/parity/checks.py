"""What a run of a case is held to."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from megaspec.runtime.build import plain_model
from megaspec.train.trainable import trained_names
from megaspec.verify.parity import TOLERANCES, Finding, Tolerances, Trajectory, compare, gradient_errors
from tests.conftest import Tell
from tests.parity.cases import Case, Settings, alone, spec_of
from tests.parity.tasks import run_case, truth_of
from tests.ranks import RankPool

LOW_STEPS = 24
TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16"}


def failures(findings: list[Finding]) -> str:
    return "\n".join(f"{f}, margin {f.margin:.1e}" for f in findings if not f.passed)


def tolerances_of(case: Case) -> Tolerances:
    """Those of the format outside of fp8 products, which is fp64 here."""
    return TOLERANCES[case.precision.partition(" ")[0].replace("fp8", "fp64")]


def check(pool: RankPool, case: Case, tell: Tell, *, steps: int, device: str = "cpu") -> None:
    """Holds a run to the one-rank run, by the tolerances of its precision; prints what came closest to failing."""
    run = run_case(pool, case, steps=steps, device=device)
    findings = compare(run, truth_of(case, steps=steps, device=device), tolerances_of(case))
    closest = next(f for f in findings if f.tolerance)
    tell(f"{case}: {closest}")
    assert all(f.passed for f in findings), f"{case}\n{failures(findings)}"
    if case.trainable:
        check_frozen(case, run)


def check_frozen(case: Case, run: Trajectory) -> None:
    """What is not trained is what it began as, to the bit, and has no gradient."""
    spec = spec_of(alone(case))
    model = plain_model(spec, device=torch.device("cpu"))
    trained = trained_names(model.facts, spec.train.trainable)
    for name, start in model.global_parameters().items():
        has_gradient = name in run.gradients.values
        assert has_gradient == (name in trained), f"{case}: {name}"
        is_same = torch.equal(run.weights.values[name], start.detach().to(torch.float64))
        assert is_same == (name not in trained), f"{case}: {name}"


def check_low(
    pool: RankPool,
    case: Case,
    tell: Tell,
    *,
    plain: Case | None = None,
    precision: str = "bf16",
    device: str = "cpu",
) -> None:
    """In bf16 or fp16 a run is at most twice as far from the truth as one rank is; prints both.

    The truth is fp64 from the same rounded weights. One rank runs `plain`: the case itself without its layout when
    None. Over 24 batches at the initial weights (a learning rate that moves nothing), since one error's sign is chance.
    """
    case = replace(case, lr=1e-30, precision=precision)
    given = plain or case
    kernels = {k: getattr(given, k) for k in ("attention", "cross_entropy", "compile")}
    plain = replace(alone(given), lr=1e-30, precision=precision, pad=given.pad, scale=given.scale, **kernels)
    more = {"steps": LOW_STEPS, "device": device, "round_to": TORCH_NAMES[precision]}
    # flex has no fp64
    truth = truth_of(replace(case, precision="fp64", attention="reference"), **more)
    floor = low_floor(run_case(pool, plain, **more), truth)
    found = low_errors(run_case(pool, case, **more), truth)
    said = ", ".join(f"{k} {found[k]:.1e} (floor {floor[k]:.1e}, tolerance 2x)" for k in found)
    tell(f"{case}: {said}")
    for what, error in found.items():
        assert error <= 2 * floor[what], f"{case}: {what} is {error:.2e} off, one rank {floor[what]:.2e}"


def check_fp8(pool: RankPool, case: Case, tell: Tell, *, kernels: Settings = (), device: str = "cpu") -> None:
    """In fp8 as it is trained, bf16 outside of products, a run is what one rank computes in fp8; prints how far apart.

    Where every product has the same numbers on one rank, they are at most three times as far apart as bf16 on one rank
    is from fp64. Where ranks share a sum of the forward pass (tp, cp), bf16 rounds it otherwise, and a number on the
    middle of two of fp8's grid goes to the other one, 32 times as far away as bf16's next: there a run is at most twice
    as far from fp64 as one rank in fp8 is. (That nothing else differs there is held in fp64, by `check`.)

    One rank takes the micro batches of all ranks one after the other, by the same `kernels`. The truth begins with the
    same rounded weights. Over 24 batches at the initial weights, since one error's sign is chance.
    """
    case = replace(case, lr=1e-30, also=(*case.also, *kernels))
    computed_by = {k: getattr(case, k) for k in ("attention", "cross_entropy", "compile", "pad")}
    one = replace(alone(case), lr=1e-30, also=kernels, **computed_by)
    # a kernel for fp8 is not said where nothing is in fp8
    plain = replace(one, precision="bf16", also=())
    more = {"steps": LOW_STEPS, "device": device, "round_to": "bfloat16"}
    truth = truth_of(replace(plain, precision="fp64", attention="reference"), **more)
    bf16 = low_floor(run_case(pool, plain, **more), truth)
    one_in_fp8 = run_case(pool, one, **more)
    fp8 = low_floor(one_in_fp8, truth)
    many_in_fp8 = run_case(pool, case, **more)
    apart = low_errors(many_in_fp8, one_in_fp8)
    said = ", ".join(f"{k} {apart[k]:.1e} apart (bf16 {bf16[k]:.1e}, fp8 {fp8[k]:.1e} off)" for k in apart)
    tell(f"{case}: {said}")
    assert fp8["loss"] > 2 * bf16["loss"], f"{case}: nothing was computed in fp8: {fp8}, in bf16 {bf16}"
    found = apart
    limits = {what: 3 * error for what, error in bf16.items()}
    if case.tp * case.cp > 1:
        found = low_errors(many_in_fp8, truth)
        limits = {what: 2 * error for what, error in fp8.items()}
    for what, error in found.items():
        assert error <= limits[what], f"{case}: {what} is {error:.2e} off, at most {limits[what]:.2e}"


def low_errors(run: Trajectory, truth: Trajectory) -> dict[str, float]:
    """Root mean squares: of relative errors over the batches, of the first batch's gradients over the parameters. And
    the relative error of the evaluation."""
    errors = gradient_errors(run.gradients.values, truth.gradients.values)
    return {
        "loss": rms(loss_errors(run, truth)),
        "norm": rms((a - b) / b for a, b in zip(run.norms, truth.norms, strict=True)),
        "gradients": rms(errors.values()),
        "evaluation": abs(run.evaluation - truth.evaluation) / truth.evaluation,
    }


def low_floor(run: Trajectory, truth: Trajectory) -> dict[str, float]:
    """What others are held to. An evaluation is of the last batch alone, and its error may be small by chance: the
    largest error of all batches' losses stands for it."""
    largest = max(abs(error) for error in loss_errors(run, truth))
    return low_errors(run, truth) | {"evaluation": largest}


def loss_errors(run: Trajectory, truth: Trajectory) -> list[float]:
    """Relative, of each batch."""
    return [(a - b) / b for a, b in zip(run.losses, truth.losses, strict=True)]


def rms(values: Iterable[float]) -> float:
    return torch.tensor(list(values), dtype=torch.float64).square().mean().sqrt().item()
