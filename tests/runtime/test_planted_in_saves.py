"""Planted bugs in locks, saves and copies: the tests of what they break see each of them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint import test_fallback, test_lock
from tests.runtime import test_copies, test_late_save
from tests.small_disks import small_disk
from tests.source_patch import Patch, planted

LOCK = "megaspec.checkpoint.lock"
FALLBACK = "megaspec.checkpoint.fallback"
COPIER = "megaspec.checkpoint.copier"
REMOTE = "megaspec.checkpoint.remote"
LOOP = "megaspec.runtime.loop"


def full_disk(test: Callable[[Path], None]) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        with small_disk(folder / "disk", "400k") as disk:
            test(disk)

    return run


def copies(test: Callable, *more: object) -> Callable[[Path], None]:
    return lambda folder: test(test_copies.Copies(folder), *more)


def late_save(folder: Path) -> None:
    test_late_save.test_a_save_is_published_as_soon_as_its_file_is_there(folder, 1)


def without_room(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        test_fallback.test_what_has_no_room_stays_and_the_newest_of_it_is_named(folder, monkeypatch)


class Silent:
    """In place of capfd where nothing of what is said matters."""

    def readouterr(self) -> object:
        raise AssertionError("what is said is looked at")


PLANTED = {
    "the first holder keeps no spare": (
        Patch(LOCK, "        self._write_beat(1)\n        self._keep_spare()\n", "        self._write_beat(1)\n"),
        full_disk(test_lock.test_a_full_disk_keeps_nobody_from_the_lock),
    ),
    "a file that another folder has as well is written over": (
        Patch(LOCK, "if os.fstat(fd).st_nlink != 1:", "if os.fstat(fd).st_nlink < 1:"),
        full_disk(test_lock.test_a_folder_that_was_copied_by_hard_links_shares_no_lock),
    ),
    "half a lock stays": (
        Patch(
            LOCK,
            "            self._withdraw()\n            raise write_failure",
            "            self._drop_flock()\n            raise write_failure",
        ),
        full_disk(test_lock.test_a_counter_that_has_no_room_gives_the_lock_back),
    ),
    "the newest that stays elsewhere is not named": (
        Patch(FALLBACK, "                    stays = candidate\n", "                    stays = None\n"),
        without_room,
    ),
    "a copy of another run is deleted": (
        Patch(LOOP, "        if unlike(copy, self", "        if not unlike(copy, self"),
        copies(test_copies.test_what_is_newer_or_of_another_run_stays, Silent()),
    ),
    "a run starts among copies of another": (
        Patch(
            LOOP,
            "self.copier.check(partial(refuse_copies_of_another, run=self.built.spec))",
            "self.copier.check(print)",
        ),
        copies(
            test_copies.test_a_run_is_not_started_where_another_has_its_copies,
            {"train.seed": 7},
            "train.seed=1234 (this run: 7)",
            "claimed",
        ),
    ),
    "only what is here is kept there": (
        Patch(LOOP, "stay = here | kept({*there.whole, *here}, checkpoint, self.losses)", "stay = here"),
        copies(test_copies.test_of_a_folder_that_was_fetched_anew_only_what_nobody_keeps_goes),
    ),
    "what is there is looked at once": (
        Patch(COPIER, "        self._is_newest_there = False\n        self._is_listed = False\n", ""),
        copies(test_copies.test_of_a_folder_that_was_fetched_anew_only_what_nobody_keeps_goes),
    ),
    "all that is newer goes": (
        Patch(LOOP, "            copy.step >= window.first and [window", "            [window"),
        copies(test_copies.test_what_learned_from_a_window_that_is_left_out_goes_though_it_is_newer),
    ),
    "nothing that is newer goes": (
        Patch(LOOP, "if self.guard.windows:\n            may_go", "if not self.guard.windows:\n            may_go"),
        copies(test_copies.test_what_learned_from_a_window_that_is_left_out_goes_though_it_is_newer),
    ),
    "nothing says whose a half copy is": (
        Patch(
            REMOTE,
            '            self.put(f"{target}/{PARTIAL}", data)\n            self.tried',
            "            self.tried",
        ),
        copies(test_copies.test_a_half_is_told_from_anothers_and_goes, "mid_remote_copy"),
    ),
    "nothing says whose a half that is deleted is": (
        Patch(REMOTE, "if manifest is not None:\n            self.put", "if manifest is None:\n            self.put"),
        copies(test_copies.test_a_half_is_told_from_anothers_and_goes, "mid_remote_delete"),
    ),
    "what ranks say is read a step late": (
        Patch(LOOP, "                if self.saving_word.read() >=", "                if getattr(self, '_late', 0) >="),
        late_save,
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_seen(name, tmp_path) -> None:
    patch, test = PLANTED[name]
    (tmp_path / "whole").mkdir()
    test(tmp_path / "whole")
    (tmp_path / "planted").mkdir()
    with planted(patch), pytest.raises((Exception, pytest.fail.Exception)) as seen:
        test(tmp_path / "planted")
    # by what it breaks, not by a name that is gone
    assert not isinstance(seen.value, NameError | TypeError | pytest.skip.Exception), seen.value
