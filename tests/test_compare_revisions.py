"""What compares two revisions for moves: it must never call equal what it did not compare."""

import pytest

from tests import compare_revisions


@pytest.fixture
def compare(monkeypatch):
    """The comparison of two empty folders, with commands that print what a test says."""

    def with_outputs(text: str, only: str = "plan-") -> int:
        def checked_out(revision, folder):
            (folder / "recipes").mkdir(parents=True)
            (folder / "recipes" / "toy.yaml").touch()
            return folder

        monkeypatch.setattr(compare_revisions, "checked_out", checked_out)
        monkeypatch.setattr(compare_revisions, "git", lambda *words: "")
        monkeypatch.setattr(compare_revisions, "keep", lambda tree, words, output: output.write_text(text))
        monkeypatch.setattr("sys.argv", ["compare", "one", "other", "--only", only])
        return compare_revisions.main()

    return with_outputs


def test_equal_outputs_are_equal(compare, capsys):
    assert compare("{}\nexit code 64\nmegaspec: it does not fit\n") == 0
    assert "4 outputs compared, 0 differences" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["Traceback (most recent call last):\n  ...", "python: No module named megaspec"])
def test_commands_that_break_alike_are_not_equal(compare, text, capsys):
    assert compare(text) == 1
    assert "plan-toy-cpu.json: broke before" in capsys.readouterr().out


def test_nothing_is_not_equal(compare, capsys):
    assert compare("{}", only="typo") == 1
    assert "nothing was compared: no output has typo in its name" in capsys.readouterr().out


def test_what_can_not_be_run_is_told(compare, monkeypatch):
    def refuse(*_):
        raise PermissionError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(compare_revisions, "write_specs", refuse)
        with pytest.raises(PermissionError):
            compare("{}", only="specs")
