"""Events with numbers that are easy to check."""

from megaspec.log.events import RolledBack, StepDone, UpdateSkipped


def step_done(step, **numbers):
    usual = {
        "steps": 100,
        "loss": 4.0 - step / 100,
        "lr": 1e-3,
        "grad_norm": 0.5,
        "tokens": 900,
        "samples": 8 * step,
        "first_sample": 8 * (step - 1),
        "skipped": False,
        "loss_scale": None,
        "seconds": 0.5,
        "sequence_tokens": 1000,
        "memory_bytes": None,
    }
    return StepDone(step=step, **(usual | numbers))


BAD = {"kind": "nonfinite", "loss": float("nan"), "grad_norm": 1.5, "where": "loss of rank 1 of 2", "first_sample": 24}


def skipped(step):
    limits = {"loss_limit": float("inf"), "grad_norm_limit": float("inf")}
    return UpdateSkipped(step=step, **BAD, **limits, samples=4, recent=1, allowed=3, within=100)


def rolled_back(step, from_step):
    left_out = {"first_left_out": step + 2, "last_left_out": from_step, "samples": 12}
    return RolledBack(step=step, from_step=from_step, **BAD, **left_out, rollbacks=1, allowed=2)
