"""A rank's entry that fails as plan.json beside the run says for its attempt."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from megaspec.core import faults
from megaspec.core.errors import HardwareError
from megaspec.launcher.devices import DEVICES
from megaspec.runtime import rank as runtime


def main(run_dir: str, *, rank: int, attempt: int, **keywords: Any) -> int:
    """{"rank", "kind", "count"}: at the `count`-th step of that rank in this attempt

    kill      it kills itself (-9)
    launcher  it kills the launcher (-9)
    suspect   it says that the hardware of the ranks `suspects` is suspected
    devices   it writes `devices` to the file that names those that may be used
    raise     an error that nobody expects

    `every` of the plan is of all attempts: {"pause": seconds before each step, "flips": a folder}. A rank that finds a
    file of its number in that folder takes it away and flips a bit of one of its weights, without a word.
    """
    plan = json.loads((Path(run_dir).parent / "plan.json").read_text())
    every = plan.get("every")
    if every is not None:
        faults.arm("step", lambda: before_each_step(every, rank))
    fault = plan.get(str(attempt))
    if fault is not None and fault["rank"] == rank:
        faults.arm("step", lambda: act(run_dir, fault), count=fault["count"])
    return runtime.main(run_dir, rank=rank, attempt=attempt, **keywords)


def before_each_step(every: dict[str, Any], rank: int) -> None:
    time.sleep(every["pause"])
    asked = Path(every["flips"], str(rank))
    if not asked.exists():
        return
    asked.unlink()
    # the caller's caller: Run._one_step
    run = sys._getframe(3).f_locals["self"]
    weight = next(run.built.chunks[0].parameters())
    with torch.no_grad():
        bits = weight.view(-1)[:1].view(torch.int32)
        bits ^= 1 << 20


def act(run_dir: str, fault: dict[str, Any]) -> None:
    match fault["kind"]:
        case "kill":
            faults.kill_self()
        case "launcher":
            # its parent is the process that forks ranks
            launcher = psutil.Process().parent().parent()
            launcher.kill()
            time.sleep(10)
        case "suspect":
            raise HardwareError("planted: computes wrongly", ranks=fault["suspects"])
        case "raise":
            raise ZeroDivisionError("planted")
        case "devices":
            path = Path(run_dir, DEVICES)
            path.with_name(f"{DEVICES}.tmp").write_text(fault["devices"])
            os.replace(path.with_name(f"{DEVICES}.tmp"), path)
            faults.disarm()
            if fault.get("dies"):
                os.kill(os.getpid(), signal.SIGKILL)
            # the supervisor looks a few times a second
            time.sleep(2)
