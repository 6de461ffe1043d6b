"""Which checkpoints stay, and that none goes that somebody reads."""

import os
from functools import partial

import pytest

from megaspec.checkpoint.lock import RunLock
from megaspec.checkpoint.retention import kept_beside_newest
from megaspec.checkpoint.spec import CheckpointSpec
from megaspec.checkpoint.store import Store
from megaspec.core.errors import CheckpointError
from tests.checkpoint.checkpoint_cases import CHUNK, SOLO, assert_holds, save

LOSSES = {1: 5.0, 2: 3.0, 3: float("nan"), 4: 3.0, 5: 2.0, 6: 4.0}


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ({}, set()),
        ({"keep_every": 3}, {3, 6}),
        ({"keep_best": 1}, {5}),
        ({"keep_best": 2}, {5, 4}),
        ({"keep_best": 3}, {5, 4, 2}),
        ({"keep_best": 99}, {1, 2, 4, 5, 6}),
        ({"keep_best": 1, "keep_every": 2}, {2, 4, 5, 6}),
    ],
    ids=str,
)
def test_what_stays_beside_the_newest(rule, kept) -> None:
    # step 7 was not evaluated
    assert kept_beside_newest(range(1, 8), CheckpointSpec(**rule), LOSSES) - {7} == kept


def test_what_may_be_the_best_stays_where_nothing_tells_its_loss() -> None:
    """metrics.jsonl was lost, or its line: a full disk, a kill. Saves of other steps were asked for by a stop."""
    spec = CheckpointSpec(every=2, keep_best=1)
    assert kept_beside_newest(range(1, 8), spec, {4: 3.0, 6: 2.0}) == {2, 6}
    assert kept_beside_newest(range(1, 8), spec, {2: float("nan"), 4: 3.0, 6: 2.0}) == {6}
    assert kept_beside_newest(range(1, 8), CheckpointSpec(every=2), {}) == set()


def test_the_store_keeps_newest_every_and_best(tmp_path) -> None:
    spec = CheckpointSpec(keep=1, keep_every=4, keep_best=1)
    store = Store(tmp_path, chunk_bytes=CHUNK)
    losses: dict[int, float] = {}
    for step in range(1, 8):
        losses[step] = abs(step - 3.2)
        save(store, step)
        store.prune(1, beside=partial(kept_beside_newest, spec=spec, losses=losses))
    assert store.steps() == [3, 4, 7]


def test_the_one_that_a_resume_needs_stays(tmp_path) -> None:
    """The newest is not whole: the newest whole one counts as the first that is kept."""
    store = Store(tmp_path, chunk_bytes=CHUNK)
    for step in (1, 2, 3):
        save(store, step)
    (store.folder / "step-00000003" / "manifest.json").write_bytes(b"{")
    assert Store(tmp_path).prune(1) == [1]
    assert store.steps() == [2, 3]


def test_what_somebody_reads_stays_until_it_is_closed(tmp_path) -> None:
    with RunLock(tmp_path) as lock:
        store = Store(tmp_path, lock=lock, chunk_bytes=CHUNK)
        for step in (1, 2, 3):
            save(store, step)
        with Store(tmp_path).open(1, SOLO) as reader, Store(tmp_path).open(1, SOLO):
            assert store.prune(1) == [2]
            assert_holds(reader, 1, 0)
        assert store.prune(1) == [1]
    assert os.listdir(store.folder) == ["step-00000003"]


def test_what_is_deleted_can_not_be_opened(tmp_path, monkeypatch) -> None:
    """Between opening its folder and holding it, a checkpoint goes: the reader says so, and reads nothing."""
    store = Store(tmp_path, chunk_bytes=CHUNK)
    save(store, 1)
    save(store, 2)
    from megaspec.checkpoint import reader as reader_module

    hold = reader_module.hold

    def prune_and_hold(folder, folder_fd):
        # what the other job removes later than it renames
        store.prune(1, remove=lambda path: None)
        return hold(folder, folder_fd)

    monkeypatch.setattr(reader_module, "hold", prune_and_hold)
    with pytest.raises(CheckpointError, match="step-00000001: was deleted"):
        reader_module.Reader(store.folder / "step-00000001")
