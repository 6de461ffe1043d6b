"""Stands in for the run of a point: `python stub.py RUN`. What it does is the recipe's about.purpose.

ok: its steps, at once. slow: fifty steps a second, stopped by SIGTERM. deaf: the same, and SIGTERM changes nothing.
held: the same, and no step behind the third before there is a file `go` beside the folder of sweeps.
fail: exit code 76. die: killed. The loss is the learning rate.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

run = Path(sys.argv[1])
recipe = json.loads((run / "recipe.json").read_text())
how, steps, metrics = recipe["about"]["purpose"], recipe["train"]["steps"], run / "metrics.jsonl"
asked = []
signal.signal(signal.SIGTERM, lambda *_: None if how == "deaf" else asked.append(1))
done = sum('"step"' in line for line in metrics.read_text().splitlines()) if metrics.exists() else 0
with (run / "lives").open("a") as lives:
    print(json.dumps({"from": done, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "at": time.time()}), file=lives)
with metrics.open("a") as file:
    for step in range(done + 1, steps + 1):
        line = {"event": "step", "step": step, "steps": steps, "loss": recipe["optim"]["lr"]}
        print(json.dumps(line | {"sequence_tokens": 100, "seconds": 0.1}), file=file, flush=True)
        if how == "fail":
            print("megaspec: the loss is nan", file=sys.stderr)
            sys.exit(76)
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how in ("slow", "deaf", "held"):
            time.sleep(0.02)
        while how == "held" and step == 3 and not asked and not (run.resolve().parents[2] / "go").exists():
            time.sleep(0.01)
        if asked:
            sys.exit(75)
    print(json.dumps({"event": "end", "step": steps, "how": "done"}), file=file)
