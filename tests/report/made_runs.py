"""Run folders that no training has written: what a page shows of them is known beforehand."""

import json
import math
from pathlib import Path
from typing import Any

TEXT = "plain"
STEPS = 300
PREDICTION = {
    "flops_per_token_causal": 6e9,
    "flops_per_token_full": 7e9,
    "peak_flops": 1e15,
    "memory": [
        {"weights": 6 << 30, "gradients": 2 << 30, "optimizer": 12 << 30, "activations": 20 << 30, "reserve": 1 << 30},
        {"weights": 5 << 30, "gradients": 2 << 30, "optimizer": 10 << 30, "activations": 14 << 30, "reserve": 1 << 30},
    ],
    "step_seconds": {"matrix products": 0.3, "attention": 0.06, "exposed communication": 0.04},
}


def spec_of(name: str, text: str, **changed: Any) -> dict[str, Any]:
    """What a page reads of a Spec, in which `text` stands wherever a user's word may."""
    return {
        "name": name,
        "device": "cuda",
        "world_size": 8,
        "model": {"kind": "decoder", "n_layers": 16, "d_model": 2048, "label": text},
        "data": {"seq_len": 4096, "blend": [{"prefix": text, "weight": 1.0}]},
        "train": {"steps": STEPS, "global_batch": 32, "micro_batch": 2, "seed": 1},
        "parallelism": {"tp": 2, "pp": 2, "note": text},
        "precision": {"kind": "bf16"},
        "optim": {"kind": "adamw", "lr": 3e-4},
        "decisions": [{"key": "kernels.norm", "value": text, "reason": text}],
        **changed,
    }


def step_of(step: int, **changed: Any) -> dict[str, Any]:
    """A step event."""
    return {
        "event": "step",
        "time": 1764079200.0 + 0.4 * step,
        "step": step,
        "steps": STEPS,
        "loss": 8 / (1 + step / 40) ** 0.5 + 0.1 * math.sin(step),
        "lr": 3e-4 * min(1.0, step / 50),
        "grad_norm": 1 + 0.5 * math.sin(step / 3),
        "tokens_per_second": 310_000 + 9_000 * math.sin(step / 5),
        "mfu_causal": 0.232 + 0.007 * math.sin(step / 5),
        "memory_bytes": 38 << 30,
        "seconds": 0.42,
        "data_seconds": 0.001,
        "forward_backward_seconds": 0.36,
        "reduce_gradients_seconds": 0.02,
        "optimizer_seconds": 0.03,
        **changed,
    }


def events_of(text: str) -> list[dict[str, Any]]:
    """A run with everything that may happen in one, in which `text` stands wherever words of others may."""
    found: list[dict[str, Any]] = []
    timed = {"time": 1764079200.0}
    found.append({"event": "start", "step": 0, "steps": STEPS, "attempt": 0, "world_size": 8, "why": "", **timed})
    for step in range(1, STEPS + 1):
        if step == 121:
            found.append(
                {"event": "start", "step": 120, "steps": STEPS, "attempt": 1, "world_size": 8, "why": text, **timed}
            )
        if step == 200:
            skipped = {"kind": "nonfinite", "loss": "nan", "grad_norm": "inf", "where": text, "recent": 1, "allowed": 3}
            found.append({"event": "skip", "step": 200, "within": 100, **skipped, **timed})
            found.append(step_of(step, loss="nan", grad_norm="inf", skipped=True))
        else:
            found.append(step_of(step))
        if step % 50 == 0:
            losses = {"valid": 8 / (1 + step / 40) ** 0.5 + 0.2, text: 8 / (1 + step / 40) ** 0.5 + 0.6}
            mean = sum(losses.values()) / 2
            tokens = dict.fromkeys(losses, 4096)
            found.append(
                {"event": "eval", "step": step, "loss": mean, "sets": losses, "tokens": tokens, "seconds": 1.5, **timed}
            )
            saved = {"path": f"runs/{text}/checkpoints/step-{step:08d}", "seconds": 4.2, "stall_seconds": 0.3}
            found.append({"event": "checkpoint", "step": step, **saved, **timed})
    slow = {"rank": 5, "host": text, "device": text, "phase": text, "seconds": 0.09, "usual_seconds": 0.2, "share": 0.2}
    found.append({"event": "slow", "step": STEPS, **slow, **timed})
    alert = {"alert": 0, "metric": text, "comparison": "above", "limit": 8.0, "value": 9.5, "for_steps": 3}
    found.append({"event": "alert", "step": STEPS, **alert, "severity": text, "action": text, **timed})
    back = {"from_step": 210, "first_left_out": 205, "last_left_out": 210, "kind": "spike", "where": text}
    found.append({"event": "rollback", "step": 200, **back, "rollbacks": 1, "allowed": 2, **timed})
    left = {"first_sample": 100, "samples": 32}
    found.append({"event": "left_out", "step": 205, "steps": STEPS, **left, **timed})
    broken = {"what": "memory", "ranks": [3], "hosts": [text], "devices": [text], "tensors": [text]}
    found.append({"event": "hardware", "step": STEPS, **broken, "is_certain": True, "agreed_step": 250, **timed})
    pace = {text: {"median": 0.2, "slowest": 0.29, "rank": 5}}
    found.append({"event": "pace", "step": STEPS, "phases": pace, **timed})
    held = {"weights": 7 << 30, "gradients": 3 << 30, "optimizer": 11 << 30}
    found.append({"event": "memory", "step": 1, **held, **timed})
    kinds = {text: {"seconds": 3.2, "planned_seconds": 0.3}, "attention": {"seconds": 0.7, "planned_seconds": None}}
    found.append(
        {"event": "profile", "step": 110, "first_step": 101, "rank": 0, "kinds": kinds, "no_plan": text, **timed}
    )
    found.append({"event": "sample", "step": STEPS, "prompt": text, "text": text, **timed})
    found.append({"event": "end", "step": STEPS, "how": text, **timed})
    return found


def make_run(
    folder: Path,
    *,
    text: str = TEXT,
    name: str = "made",
    events: list[dict[str, Any]] | None = None,
    **changed: Any,
) -> Path:
    """A folder as a supervised run leaves it."""
    folder.mkdir(parents=True)
    if events is None:
        events = events_of(text)
    lines = [json.dumps(event) for event in events]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "spec.json").write_text(json.dumps(spec_of(name, text, **changed)))
    (folder / "prediction.json").write_text(json.dumps({**PREDICTION, "no_peak": None}))
    environment = {"platform": text, "python": "3.12", "cores": 8, "gpus": [{"name": text}], "command": [text]}
    (folder / "environment.json").write_text(json.dumps({**environment, "versions": {"torch": text}}))
    start = {"attempt": 0, "host": text, "pid": 1, "devices": [text], "why": text}
    end = {"attempt": 0, "code": 74, "reason": text, "layout": text, "world_size": 8, "from_step": 0, "step": 130}
    attempts = [{"event": "start", **start}, {"event": "end", **end, "saved": 120, "next": text}]
    attempts.append({"event": "start", **start, "attempt": 1})
    (folder / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in attempts))
    (folder / "checkpoints" / "step-00000300").mkdir(parents=True)
    return folder
