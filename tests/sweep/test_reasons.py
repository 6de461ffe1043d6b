"""Why a point failed, from what its launcher and its ranks wrote."""

import json
import re
from pathlib import Path

import pytest

from megaspec.cli import main
from megaspec.sweep import attempt
from tests.sweep.conftest import points, states, sweep

NAMED = "megaspec: rank {} ended with exit code {}; what it wrote: runs/x/logs/rank-{}.log"


@pytest.mark.parametrize(
    ("log", "written", "reason"),
    [
        (["a table", "megaspec: the loss is nan"], {}, "the loss is nan"),
        (["megaspec: starting again", "megaspec:", "a=1 must be 2", "b=2 must be 3"], {}, "a=1 must be 2"),
        (["plain words", "", "  "], {}, "plain words"),
        ([], {}, ""),
        (
            ["megaspec: step 3 is the newest good one", NAMED.format(0, 76, 0)],
            {0: ["an earlier life", "step 2: loss=nan"]},
            "step 2: loss=nan (rank 0, exit code 76)",
        ),
        (
            [NAMED.format(1, 70, 1), "  [rank 1] tail"],
            {
                0: ["not asked"],
                1: [
                    "Traceback (most recent call last):",
                    '  File "x.py", line 3, in f',
                    "OutOfMemoryError: 9 GiB",
                    "[rank1]:[W1121 12:00:00 ProcessGroup] destroyed",
                    "",
                ],
            },
            "OutOfMemoryError: 9 GiB (rank 1, exit code 70)",
        ),
        ([NAMED.format(1, 65, 1)], {1: ["rank 1: a shard is cut"]}, "a shard is cut (rank 1, exit code 65)"),
        ([NAMED.format(1, 65, 1)], {}, NAMED.format(1, 65, 1).removeprefix("megaspec: ")),
        (
            ["megaspec: rank 1 was killed by SIGKILL, by hand; what it wrote: runs/x/logs/rank-1.log"],
            {1: ["of no matter"]},
            "rank 1 was killed by SIGKILL, by hand; what it wrote: runs/x/logs/rank-1.log",
        ),
    ],
)
def test_a_reason_is_what_was_written_last_that_says_something(log, written, reason, tmp_path):
    path = tmp_path / "point.log"
    path.write_text("\n".join(log))
    (tmp_path / "logs").mkdir()
    for rank, lines in written.items():
        (tmp_path / "logs" / f"rank-{rank}.log").write_text("\n".join(lines))
    assert attempt._last_words(path, tmp_path) == reason


def test_a_long_reason_keeps_its_beginning_and_its_end(tmp_path):
    path = tmp_path / "point.log"
    path.write_text("megaspec: begins " + "x" * 900 + " ends")
    found = attempt._last_words(path, tmp_path)
    assert len(found) == attempt.MOST_CHARACTERS
    assert found.startswith("begins x")
    assert found.endswith("x ends")


@pytest.mark.usefixtures("stubbed")
def test_the_table_and_show_tell_why(capsys):
    assert sweep("about.purpose=ok,fail", "data.seed=range(1,13)") == 76
    told = [line for line in capsys.readouterr().out.splitlines() if re.match(r"point \d+ failed", line)]
    assert len(told) == 10
    first = next(p for p in points().values() if p.state == "failed")
    assert told[0] == f"point {first.number} failed: the loss is nan; its log: sweeps/s/logs/{first.folder}.log"
    assert main(["sweep", "show", "sweeps/s"]) == 0
    assert "... and 2 more that failed" in capsys.readouterr().out


@pytest.mark.usefixtures("warm_launches")
def test_a_run_that_diverges_says_so_in_every_place(capsys):
    """Two ranks that train in earnest."""
    assert sweep("optim.lr=1e30,2e30", "launcher.ranks=2", steps=4) == 76
    assert states() == ["failed", "failed"]
    reason = points()[1].reason
    assert re.fullmatch(r"step \d: .* is not finite, .* \(rank [01], exit code 76\)", reason)
    out = capsys.readouterr().out
    assert out.count(reason) == 2
    assert json.dumps(reason)[1:-1] in Path("sweeps/s/index.html").read_text()
