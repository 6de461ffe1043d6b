"""What a store keeps of a run's checkpoints, through starts that are killed: what the recipe keeps, and no more."""

import json
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megaspec.checkpoint.comm import SoloComm
from megaspec.checkpoint.examine import read_manifest
from megaspec.checkpoint.remote import OWNER, PARTIAL, REMOTE_FAULT_POINTS, Remote
from megaspec.checkpoint.shard import SavedPiece
from megaspec.checkpoint.store import Store
from megaspec.core import faults
from megaspec.core.errors import Preempted, WriteError
from megaspec.launcher import stop
from megaspec.log.jsonl import JsonlSink, losses_by_step
from megaspec.log.sinks import METRICS
from megaspec.rules.belonging import fork_point, owner_of, refuse_copies_of_another
from megaspec.runtime import rank as runtime
from megaspec.runtime.loop import Run
from megaspec.spec import Spec
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

    def live(
        self, name: str, /, *, stop_after: int = 0, after_start: Callable[[], None] = lambda: None, **changes: Any
    ) -> None:
        """One life, to its end or until so many steps are done. Each copy is waited for: what is read for one stays in
        the run folder until a later save."""
        checkpoint = {"every": 2, "keep": 1, "keep_every": 6, "copy_to": self.url} | changes.pop("checkpoint", {})
        made = spec({"train.steps": 12, "checkpoint": checkpoint} | changes)
        runtime.seed_generators(made.train.seed)
        run_dir = self.folder / name
        run = Run(build_here(made, 0), run_dir, Store(run_dir), comm_of(made, 0))
        run.start()
        after_start()
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
        self._as_its_own(name, step, lambda remote: remote.upload(path, step, run_dir=run_dir))

    def remove(self, name: str, step: int) -> None:
        """What a start deleted of a run's copies before it was killed."""
        self._as_its_own(name, step, lambda remote: remote.remove(step))

    def _as_its_own(self, name: str, step: int, act: Callable[[Remote], object]) -> None:
        """What a run does there, by a version that knew of no claims. The one that is there stays."""
        manifest = read_manifest(self.folder / name / "checkpoints" / f"step-{step:08d}", step)
        claim = self.folder / "copies" / OWNER
        before = claim.read_bytes() if claim.exists() else None
        remote = Remote(self.url, owner=owner_of(Spec.model_validate_json(json.dumps(manifest.spec))))
        remote.claim()
        try:
            act(remote)
        finally:
            claim.unlink()
            if before is not None:
                claim.write_bytes(before)

    def contents(self) -> dict[str, bytes]:
        """Every file that is there."""
        files = {}
        for path in sorted((self.folder / "copies").rglob("*")):
            if path.is_file():
                files[str(path)] = path.read_bytes()
        return files


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
    """Newer: the run folder was put back from a backup. Of another run: they came there while this one was training."""
    an_earlier_start(store)
    store.copy("every", 12)
    store.live("other", checkpoint=EVERY | {"every": 3}, **{"train.seed": 7})

    def copy_others() -> None:
        store.copy("other", 3)
        store.copy("other", 9)

    store.live("run", stop_after=1, after_start=copy_others)
    assert store.remote.steps() == [3, 6, 9, 11, 12]


@pytest.mark.parametrize("claim", ["claimed", "by an earlier version"])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train.seed": 7}, "train.seed=1234 (this run: 7)"),
        # to the bit the same weights: two runs all the same
        ({"name": "second"}, "name=tiny (this run: second)"),
    ],
    ids=["another experiment", "another name"],
)
def test_a_run_is_not_started_where_another_has_its_copies(store, changes, said, claim) -> None:
    store.live("run", stop_after=4)
    if claim != "claimed":
        (store.folder / "copies" / OWNER).unlink()
    before = store.contents()
    with pytest.raises(WriteError) as raised:
        store.live("other", **changes)
    text = str(raised.value)
    assert f"checkpoint.copy_to={store.url} holds copies of another run: step 4 is of tiny (run): " in text
    assert said in text
    assert f"checkpoint.copy_to={store.url}/{changes.get('name', 'tiny')}, or another URL" in text
    assert store.contents() == before
    assert not (store.folder / "other" / "checkpoints").exists()
    # whose they are goes on
    store.live("run", checkpoint={"keep": 3})
    assert store.remote.steps()[-1] == 12


def test_a_fork_copies_to_a_place_of_its_own(store) -> None:
    """With the checkpoint that it began with, which is the other run's as well."""
    (store.folder / "run").mkdir()
    (store.folder / "run" / "spec.json").write_text(spec().model_dump_json())
    store.live("run", stop_after=4)
    path = store.folder / "run" / "checkpoints" / "step-00000004"
    began = fork_point(read_manifest(path, 4))
    forked = {"train.seed": 7}
    made = spec({"train.steps": 12} | forked).model_copy(update={"forked_from": began})
    refuse = partial(refuse_copies_of_another, run=copying_to(made, store.url))
    with pytest.raises(WriteError, match=r"spec\.json is of tiny"):
        # its only copy is the one that the fork begins with
        refuse(store.remote.holdings())
    place = Remote(f"{store.url}/fork", owner=owner_of(made))
    run_dir = store.folder / "fork"
    run_dir.mkdir()
    (run_dir / "spec.json").write_text(made.model_dump_json())
    place.upload(path, 4, run_dir=run_dir)
    assert [one.step for one in place.holdings()] == [4, None]
    refuse(place.holdings())


def copying_to(made: Spec, url: str) -> Spec:
    return made.model_copy(update={"checkpoint": made.checkpoint.model_copy(update={"copy_to": url})})


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

    def leave_halves() -> None:
        for name, step in (("every", 4), ("other", 9)):
            before, killed = store.remove, store.copy
            if "delete" in point:
                before, killed = store.copy, store.remove
            before(name, step)
            faults.arm(point, die)
            with pytest.raises(KeyboardInterrupt):
                killed(name, step)
            faults.disarm()
        halves = store.remote.found().partial
        assert halves == ([] if point == "before_remote_delete" else [4, 9])
        assert (store.folder / "copies" / "checkpoints" / "step-00000009" / PARTIAL).exists()

    store.live("run", after_start=leave_halves)
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
