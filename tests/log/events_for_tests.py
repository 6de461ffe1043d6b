"""Events with numbers that are easy to check."""

from megaspec.log.events import StepDone


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
