"""No worker outlives the process that started it, whatever it is at."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
PARENT = """
import time
from megaspec.data.workers import start_worker
worker = start_worker("tests.data.endless_worker")
worker.stdout.readline()
print(worker.pid, flush=True)
time.sleep(60)
"""


def test_a_worker_in_the_middle_of_a_part_ends_with_a_killed_parent():
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    end = time.monotonic() + 5
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "the worker lives on"
        time.sleep(0.05)


@pytest.mark.parametrize("module", ["prepare_worker", "scan_worker", "stream_worker"])
def test_every_worker_watches_its_parent(module):
    """One that was orphaned before it could look ends, too: it has never seen that parent."""
    nobody = 2**22 + 1  # no process has this number
    command = [sys.executable, "-P", "-m", f"megaspec.data.{module}", str(nobody)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as orphan:
        assert orphan.wait(timeout=30) == 74
