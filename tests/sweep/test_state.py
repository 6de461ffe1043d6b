"""The files of a sweep come through kills, and say when they are damaged."""

import pytest

from megaspec.core.errors import RecipeError
from megaspec.sweep.points import CheckedPoint, point_folder, without_repeats
from megaspec.sweep.results import Follower
from megaspec.sweep.spec import SweepSpec
from megaspec.sweep.state import HEAD, POINTS, Point, SweepFolder, SweepHead


def head(**fields) -> SweepHead:
    given = {"name": "s", "spec": SweepSpec(), "plain": (), "config_dirs": (), "axes": (), "launcher": "megaspec"}
    return SweepHead(**given, metric="loss", direction="minimize", **fields)


def point(number: int) -> Point:
    return Point(number=number, overrides=(f"a={number}",), folder=f"0{number}", fingerprint="f", recipe={"a": number})


@pytest.fixture
def folder(tmp_path):
    made = SweepFolder(tmp_path)
    made.make(head(), [point(1), point(2)])
    return made


def test_the_last_line_of_a_point_counts_and_its_recipe_is_kept(folder):
    folder.append(point(2).to("running", pid=7, ranks=4))
    folder.append(point(2).to("failed", code=76, reason="nan"))
    first, second = folder.points()
    assert first == point(1)
    assert (second.state, second.code, second.reason, second.pid) == ("failed", 76, "nan", None)
    assert second.recipe == {"a": 2}
    assert folder.path.joinpath(POINTS).read_text().count("recipe") == 2


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_line_that_a_kill_has_torn_does_not_count(folder, cut):
    folder.append(point(1).to("running", pid=7))
    path = folder.path / POINTS
    path.write_bytes(path.read_bytes()[:-cut])
    assert folder.points()[0].state == ("running" if cut == 1 else "waiting")
    folder.append(point(1).to("done", code=0))
    assert [p.state for p in folder.points()] == ["done", "waiting"]


def test_damage_is_told(folder):
    (folder.path / POINTS).write_text('{"number": 0}\n')
    with pytest.raises(RecipeError, match=r"points.jsonl is damaged"):
        folder.points()
    (folder.path / HEAD).write_text("{}")
    with pytest.raises(RecipeError, match=r"sweep.json is damaged"):
        folder.head()


def test_a_sweep_that_was_killed_while_it_was_made_is_made_again(folder):
    (folder.path / HEAD).unlink()
    assert not folder.exists()
    folder.make(head(), [point(1)])
    assert len(folder.points()) == 1


def test_folders_tell_the_values_and_differ():
    assert (
        point_folder(3, 12, ("optim.lr=0.001", "model=a/b", "data.split=[9,1,0]"))
        == "03-lr-0.001-model-a-b-split-9-1-0"
    )
    assert point_folder(3, 1200, ("a=x",)) == "0003-a-x"
    long = [point_folder(n, 9999, ("some.key=" + "y" * 200,)) for n in (1, 2)]
    assert long[0] != long[1]
    assert max(map(len, long)) <= 80


def test_repeats_are_told_apart_by_what_they_run():
    one, two, three = CheckedPoint(("a=1",)), CheckedPoint(("a=1",)), CheckedPoint(("a=2",))
    kept, repeats = without_repeats([one, two, three])
    assert kept == [one, three]
    assert [(r.overrides, e.overrides) for r, e in repeats] == [(("a=1",), ("a=1",))]


def test_numbers_of_a_run_are_read_as_it_grows_and_again_when_it_goes_back(tmp_path):
    path, follower = tmp_path / "metrics.jsonl", Follower(tmp_path)
    assert follower.read().metric("loss") is None
    step = '{{"event": "step", "step": {}, "steps": 9, "loss": {}, "sequence_tokens": 80, "seconds": 0.5}}\n'
    path.write_text(step.format(1, 4.0) + step.format(2, '"nan"') + step.format(3, 3.0)[:20])
    result = follower.read()
    assert (result.step, result.steps, result.metric("tokens_per_second")) == (2, 9, 160.0)
    assert result.metric("loss") != result.metric("loss")
    path.write_text(step.format(1, 4.0) + step.format(2, 3.5) + step.format(3, 3.0))
    follower.restart()
    assert follower.read().loss == {1: 4.0, 2: 3.5, 3: 3.0}
    with path.open("a") as file:
        file.write('{"event": "start", "step": 1, "steps": 9}\n' + step.format(2, 3.25))
        file.write('{"event": "eval", "step": 2, "split": "valid", "loss": 3.75, "seconds": 1}\n')
        file.write('{"event": "end", "step": 2, "how": "done"}\n')
    result = follower.read()
    assert (result.loss, result.metric("valid_loss"), result.is_done) == ({1: 4.0, 2: 3.25}, 3.75, True)
    path.write_text(step.format(1, 5.0))
    assert follower.read().loss == {1: 5.0}
