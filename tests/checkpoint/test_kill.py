"""kill -9 at every named point and at random moments: a good checkpoint always loads, and the run goes on from it."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch.distributed as dist

from megaspec.checkpoint.comm import DistComm
from megaspec.checkpoint.lock import RunLock
from megaspec.checkpoint.publish import FAULT_POINTS
from megaspec.checkpoint.remote import REMOTE_FAULT_POINTS
from megaspec.checkpoint.store import Store
from megaspec.core import faults
from tests.checkpoint.checkpoint_cases import CHUNK, FORKS, SOLO, assert_holds, save

PACKAGE = Path(__file__).parents[2] / "megaspec" / "checkpoint"


def killed_at(point: str, count: int, run: str, step: int) -> None:
    """Re-save or save `step` with salt 5, prune and put a damaged one aside, dying at `point`."""
    faults.arm(point, count=count)
    with RunLock(run) as lock:
        store = Store(run, lock=lock, chunk_bytes=CHUNK)
        save(store, step, salt=5)
        store.prune(2)
        (store.folder / f"step-{step:08d}" / "manifest.json").write_bytes(b"")
        store.newest_good(SOLO)


def open_and_go_on(run: Path) -> tuple[int, int]:
    """As a restarted job does: lock at once, newest good, verify, save the next and the same step again."""
    started = time.monotonic()
    with RunLock(run) as lock:
        assert time.monotonic() - started < 5, "a dead holder of this machine is not waited for"
        store = Store(run, lock=lock, chunk_bytes=CHUNK)
        reader = store.newest_good(SOLO)
        found = (reader.step, reader.state["salt"])
        assert_holds(reader, *found)
        reader.close()
        for step, salt in ((found[0], 7), (found[0] + 1, 8), (found[0] + 1, 9)):
            save(store, step, salt=salt)
            with store.newest_good(SOLO) as reader:
                assert_holds(reader, step, salt)
        leftovers = [n for n in os.listdir(store.folder) if n != "quarantine" and not n.startswith("step-")]
        assert leftovers == []
    return found


# Steps 0 and 1 exist: saving 2 replaces nothing, saving 1 again prunes nothing.
NEVER = {("before_set_aside", 2), ("after_set_aside", 2), ("mid_delete", 1)}


@pytest.mark.parametrize(
    ("point", "step"), [(p, s) for p in FAULT_POINTS for s in (1, 2) if (p, s) not in NEVER], ids=str
)
def test_at_every_named_point(tmp_path, point, step) -> None:
    with RunLock(tmp_path) as lock:
        store = Store(tmp_path, lock=lock, chunk_bytes=CHUNK)
        save(store, 0)
        save(store, 1)
    child = FORKS.Process(target=killed_at, args=(point, 1, str(tmp_path), step))
    child.start()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL
    if point == "mid_quarantine":
        expected = (step - 1, 0)
    elif FAULT_POINTS.index(point) >= FAULT_POINTS.index("after_publish"):
        expected = (step, 5)
    else:
        expected = (1, 0)
    assert open_and_go_on(tmp_path) == expected


def test_between_two_chunks(tmp_path) -> None:
    with RunLock(tmp_path) as lock:
        save(Store(tmp_path, lock=lock, chunk_bytes=CHUNK), 1)
    child = FORKS.Process(target=killed_at, args=("before_chunk_write", 6, str(tmp_path), 1))
    child.start()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL
    assert (tmp_path / "checkpoints" / ".saving-00000001-2" / "rank-00000.safetensors").stat().st_size > 0
    assert open_and_go_on(tmp_path) == (1, 0)


def save_for_ever(run: str, told: Connection) -> None:
    """Each step three times over; says what is published."""
    with RunLock(run) as lock:
        store = Store(run, lock=lock, chunk_bytes=CHUNK)
        for i in range(10**6):
            save(store, 2 + i // 3, salt=i)
            told.send((2 + i // 3, i))
            if i % 3 == 2:
                store.prune(2)


def test_at_random_moments(tmp_path) -> None:
    rnd = random.Random(4)
    for i in range(12):
        run = tmp_path / str(i)
        save(Store(run, chunk_bytes=CHUNK), 1)
        said, told = FORKS.Pipe(duplex=False)
        child = FORKS.Process(target=save_for_ever, args=(str(run), told))
        child.start()
        told.close()
        last = said.recv()
        time.sleep(rnd.uniform(0, 0.06))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        try:
            while True:
                last = said.recv()
        except EOFError:
            pass
        assert open_and_go_on(run) >= last


def rank_process(run: str, rank: int, size: int, attempt: int, step: int, point: str, victim: int) -> None:
    """One gloo rank that saves `step` for ever, or dies at `point` when it is the victim."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{run}/rendezvous-{attempt}", size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=20),
    )
    if rank == victim and point:
        faults.arm(point, count=2)
    lock = RunLock(run).acquire() if rank == 0 else None
    comm = DistComm()
    comm.barrier()
    store = Store(run, lock=lock, chunk_bytes=CHUNK)
    with store.newest_good(comm) as reader:
        salt = reader.state["salt"]
        assert_holds(reader, reader.step, salt)
    Path(f"{run}/ready-{attempt}-{rank}").touch()
    for i in range(1, 200):
        save(store, step + i // 2, comm, salt=salt + i)
        if rank == 0:
            store.prune(2)
    os._exit(3)


def test_ranks_of_a_gloo_world(tmp_path) -> None:
    """A random rank at a random moment or point; the job restarts from the newest good one each time."""
    rnd = random.Random(5)
    save(Store(tmp_path, chunk_bytes=CHUNK), 1)
    step, salt = 1, 0
    points = ["after_shard_write", "", "after_set_aside", "", "before_chunk_write", "after_manifest"]
    for attempt, point in enumerate(points):
        rank0_only = point in ("after_set_aside", "after_manifest")
        victim = 0 if rank0_only else rnd.randrange(2)
        children = [
            FORKS.Process(target=rank_process, args=(str(tmp_path), r, 2, attempt, step, point, victim))
            for r in range(2)
        ]
        for c in children:
            c.start()
        deadline = time.monotonic() + 30
        if not point:
            while not all((tmp_path / f"ready-{attempt}-{r}").exists() for r in range(2)):
                assert time.monotonic() < deadline
                time.sleep(0.005)
            time.sleep(rnd.uniform(0, 0.15))
            os.kill(children[victim].pid, signal.SIGKILL)
        children[victim].join(30)
        assert children[victim].exitcode == -signal.SIGKILL
        for c in children:
            c.kill()
            c.join()
        found_step, found_salt = open_and_go_on(tmp_path)
        assert (found_step, found_salt) >= (step, 0)
        step, salt = found_step + 1, 9
    assert salt == 9


def test_every_point_in_the_code_is_listed() -> None:
    named = [name for file in PACKAGE.glob("*.py") for name in re.findall(r'\bfailpoint\("(\w+)"\)', file.read_text())]
    assert sorted(named) == sorted(FAULT_POINTS + REMOTE_FAULT_POINTS)


def test_the_environment_arms_a_fault() -> None:
    code = "from megaspec.core.faults import failpoint\nfor i in range(9): failpoint('here'); print(i, flush=True)"
    for value, printed in (("here:3", "0\n1\n"), ("here", ""), ("there:1", "".join(f"{i}\n" for i in range(9)))):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "MEGASPEC_FAULT": value, "PYTHONPATH": str(PACKAGE.parents[1])},
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        assert done.stdout == printed
        assert done.returncode == (0 if value == "there:1" else -signal.SIGKILL)
