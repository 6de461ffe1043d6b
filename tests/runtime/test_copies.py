"""What a store keeps of a run's checkpoints, through starts that are killed: what the recipe keeps, and no more."""

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megaspec.checkpoint.comm import SoloComm
from megaspec.checkpoint.remote import PARTIAL, REMOTE_FAULT_POINTS, Remote
from megaspec.checkpoint.shard import SavedPiece
from megaspec.checkpoint.store import Store
from megaspec.core import faults
from megaspec.core.errors import Preempted
from megaspec.launcher import stop
from megaspec.log.jsonl import JsonlSink, losses_by_step
from megaspec.log.sinks import METRICS
from megaspec.runtime import rank as runtime
from megaspec.runtime.loop import Run
from tests.runtime.lives import build_here, comm_of
from tests.runtime.specs import spec

# All that it saves, and no copies.
EVERY = {"keep": 100, "copy_to": None}


class Copies:
    """A place for copies, and lives of runs that copy there."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.url = f"file://{folder}/copies"
        self.remote = Remote(self.url)

    def live(self, name: str, *, stop_after: int = 0, **changes: Any) -> None:
        """One life, to its end or until so many steps are done. Each copy is waited for: what is read for one stays in
        the run folder until a later save."""
        checkpoint = {"every": 2, "keep": 1, "keep_every": 6, "copy_to": self.url} | changes.pop("checkpoint", {})
        made = spec({"train.steps": 12, "checkpoint": checkpoint} | changes)
        runtime.seed_generators(made.train.seed)
        run_dir = self.folder / name
        run = Run(build_here(made, 0), run_dir, Store(run_dir), comm_of(made, 0))
        run.start()
        run_dir.mkdir(exist_ok=True)
        run.emit = JsonlSink(run_dir / METRICS, step=run.step)
        if run.copier is not None:
            copy = run.copier.copy

            def copy_now(path: Path, step: int) -> None:
                copy(path, step)
                run.copier.finish()

            run.copier.copy = copy_now
        taken = 0

        def each_step() -> None:
            nonlocal taken
            taken += 1
            if taken == stop_after:
                stop._note(signal.SIGTERM, None)

        faults.arm("step", each_step)
        try:
            run.train()
        except Preempted:
            assert stop_after
        finally:
            faults.disarm()
            stop._asked.clear()
            run.emit.close()

    def copy(self, name: str, step: int) -> None:
        """What a start copied of a run before it was killed."""
        run_dir = self.folder / name
        path = run_dir / "checkpoints" / f"step-{step:08d}"
        self.remote.upload(path, step, run_dir=run_dir)


@pytest.fixture
def store(tmp_path) -> Copies:
    return Copies(tmp_path)


def kept_by(name: str, store: Copies) -> list[int]:
    """What that run has, every one of its checkpoints."""
    return Store(store.folder / name).steps()


def an_earlier_start(store: Copies, **changes: Any) -> None:
    """Copied steps 2 to 10 and deleted none of them: it was killed. In its folder there are 6 and 10."""
    store.live("every", checkpoint=EVERY, **changes)
    store.live("run", stop_after=10, checkpoint={"copy_to": None}, **changes)
    for step in (2, 4, 6, 8, 10):
        store.copy("every", step)


def test_what_a_killed_start_had_not_deleted_goes_with_the_next(store, capfd) -> None:
    an_earlier_start(store)
    assert kept_by("run", store) == [6, 10]
    assert store.remote.steps() == [2, 4, 6, 8, 10]
    store.live("run")
    assert store.remote.steps() == kept_by("run", store) == [6, 12]
    assert "what an earlier start had to leave there is deleted: step 2, 4, 8" in capfd.readouterr().err
    # nothing is left to say
    store.live("run")
    assert "an earlier start" not in capfd.readouterr().err
    assert store.remote.steps() == [6, 12]


def test_what_is_newer_or_of_another_run_stays(store, capfd) -> None:
    """Newer: the run folder was put back from a backup. Of another run: two recipes name one place."""
    an_earlier_start(store)
    store.copy("every", 12)
    store.live("other", checkpoint=EVERY | {"every": 3}, **{"train.seed": 7})
    store.copy("other", 3)
    store.copy("other", 9)
    store.live("run", stop_after=1)
    assert store.remote.steps() == [3, 6, 9, 11, 12]


def test_the_best_stay_there_as_here(store) -> None:
    evaluated = {"train.eval_every": 2, "train.eval_samples": 2}
    checkpoint = {"keep_best": 1, "keep_every": 0}
    store.live("every", checkpoint=EVERY | checkpoint, **evaluated)
    losses = losses_by_step(store.folder / "every" / METRICS, "mean")
    best = min(losses, key=lambda step: (losses[step], -step))
    for step in (2, 4, 6, 8, 10):
        store.copy("every", step)
    store.live("run", checkpoint=checkpoint, **evaluated)
    assert store.remote.steps() == kept_by("run", store) == sorted({best, 12})
    # where nothing tells the losses any more each may be the best
    for step in (2, 4):
        store.copy("every", step)
    (store.folder / "run" / METRICS).write_text("")
    store.live("run", checkpoint=checkpoint, **evaluated)
    assert {2, 4} <= set(store.remote.steps())


def test_of_a_folder_that_was_fetched_anew_only_what_nobody_keeps_goes(store) -> None:
    """The run folder holds one checkpoint; the store those that the recipe keeps."""
    an_earlier_start(store)
    store.remote.download(store.folder / "back", 10)
    store.live("back", checkpoint={"keep": 2})
    # 10 and 12 are the newest two, 6 and 12 multiples of keep_every
    assert store.remote.steps() == [6, 10, 12]


@pytest.mark.parametrize("point", REMOTE_FAULT_POINTS)
def test_a_half_is_told_from_anothers_and_goes(store, point) -> None:
    """What a kill leaves between two files, or between a manifest and its files."""
    an_earlier_start(store)
    store.live("other", checkpoint=EVERY | {"every": 3}, **{"train.seed": 7})

    def die() -> None:
        raise KeyboardInterrupt

    for name, step in (("every", 4), ("other", 9)):
        faults.disarm()
        if "delete" in point:
            store.copy(name, step)
        else:
            store.remote.remove(step)
        faults.arm(point, die)
        act = partial(store.remote.remove, step) if "delete" in point else partial(store.copy, name, step)
        with pytest.raises(KeyboardInterrupt):
            act()
    faults.disarm()
    halves = store.remote.found().partial
    assert halves == ([] if point == "before_remote_delete" else [4, 9])
    assert (store.folder / "copies" / "checkpoints" / "step-00000009" / PARTIAL).exists()
    store.live("run")
    left = sorted(path.name for path in (store.folder / "copies" / "checkpoints").iterdir())
    assert left == ["step-00000006", "step-00000009", "step-00000012"]


def test_what_learned_from_a_window_that_is_left_out_goes_though_it_is_newer(store) -> None:
    """The run went back and was killed before that was deleted; who fetched it would train on from it."""
    left_out = {"train.numbers": {"rollbacks": 1}}
    store.live("run", stop_after=6, checkpoint={"copy_to": None}, **left_out)
    store.live("ahead", checkpoint=EVERY, **left_out)
    for step in (8, 10):
        store.copy("ahead", step)
    # what the run saved after it had gone back
    path = store.folder / "run"
    going_on(path, windows=[[9, 9]])
    store.live("run", stop_after=1, checkpoint={"keep": 100}, **left_out)
    # step 8 is before the window
    assert store.remote.steps() == [6, 7, 8]


def going_on(run_dir: Path, *, windows: list[list[int]]) -> None:
    """Saves the newest checkpoint of a run anew, as one that has gone back there."""
    store = Store(run_dir)
    with store.newest_good(SoloComm()) as reader:
        state = reader.state | {"numbers": reader.state["numbers"] | {"windows": windows, "rollbacks": 1}}
        pieces = []
        for name in reader.names():
            tensor = reader.read(name)
            pieces.append(SavedPiece(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor))
        saved_spec = reader.manifest.spec
        step = reader.step
    store.save(step, pieces, spec=saved_spec, state=state, comm=SoloComm())
