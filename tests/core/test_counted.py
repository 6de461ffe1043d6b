"""Collectives are counted where they begin and end, and nothing of the project calls torch's by another way."""

import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megaspec.core import counted
from megaspec.core.collective_word import ALL_REDUCE, NAMES, RETURNED, words_of_collective
from megaspec.launcher.beat import Page, Word
from tests.ranks import RankPool

ROOT = Path(__file__).parents[2]
CALL = re.compile(
    r"\b(?:dist|distributed|c10d)\.(?:all_\w+|reduce\w*|broadcast\w*|barrier|monitored_barrier|send\w*|recv\w*"
    r"|gather\w*|scatter\w*|batch_\w+)\("
)
MEASURE = ("megaspec/verify/measured_throughput.py", "megaspec/doctor/probe.py", "megaspec/doctor/world.py")
"""They time collectives themselves, outside of any run."""


def test_nothing_calls_torchs_collectives_by_another_way():
    found = []
    for room in ("megaspec", "kernels", "launchers"):
        for path in (ROOT / room).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            if name in ("megaspec/core/counted.py", *MEASURE):
                continue
            for number, line in enumerate(path.read_text().splitlines(), start=1):
                if CALL.search(line):
                    found.append(f"{name}:{number}: {line.strip()}")
    assert found == []


def test_no_pickle_goes_over_the_wire():
    """torch's object collectives pickle; JSON in tensors of bytes does what they do (checkpoint/comm.py)."""
    for room in ("megaspec", "kernels", "launchers"):
        for path in (ROOT / room).rglob("*.py"):
            assert not re.search(
                r"\b(gather|scatter|broadcast|send|recv|all_gather)_object(_list)?\(", path.read_text()
            ), path


def count_here(rank: int, folder: str) -> dict[str, Any]:
    page = Page.make(f"{folder}/page-{rank}")
    counted.forget()
    counted.publish(page.words, Word.COLLECTIVE, tell_groups=page.write_groups)
    told = []

    def note() -> None:
        other = Page.open(f"{folder}/page-{rank}")
        told.append(words_of_collective(other.words[Word.COLLECTIVE], other.read_groups()))

    note()
    x = torch.ones(4)
    counted.all_reduce(x)
    note()
    group = dist.new_group([0, 1], group_desc="tp")
    for _ in range(3):
        counted.all_gather([torch.empty(4), torch.empty(4)], x, group=group)
    note()
    op, peer = (dist.isend, 1) if rank == 0 else (dist.irecv, 0)
    for work in counted.batch_isend_irecv([dist.P2POp(op, x, peer, group)]):
        counted.wait(work)
    note()
    before = counted.seconds_inside()
    late = dist.new_group([0, 1], group_desc="late", timeout=timedelta(seconds=1))
    if rank == 1:
        time.sleep(1.5)
    else:
        with pytest.raises(RuntimeError):
            counted.all_reduce(x, group=late)
    note()
    return {"told": told, "inside": counted.seconds_inside() - before, "counts": counted.group_counts()}


def test_another_process_reads_which_collective_a_rank_is_in(tmp_path):
    with RankPool() as pool:
        first, second = pool.run(count_here, str(tmp_path), ranks=2)
    assert first["told"][:3] == ["", "behind all_reduce number 1 of all ranks", "behind all_gather number 3 of tp"]
    assert first["told"][3] == "behind send number 4 of tp"
    assert second["told"][3] == "behind recv number 4 of tp"
    # one that failed stays the one that the rank is in
    assert first["told"][4] == "in all_reduce number 1 of late"
    assert second["told"][4] == "behind recv number 4 of tp"
    assert 0.5 < first["inside"] < 5
    assert first["counts"] == {"all ranks": 1, "tp": 4, "late": 1}


def test_a_word_holds_as_many_collectives_as_a_run_of_years():
    """A thousand a second for a hundred years."""
    count = 1000 * 60 * 60 * 24 * 365 * 100
    assert count < RETURNED
    word = ALL_REDUCE << 56 | 4095 << 44 | RETURNED | count
    assert word < 2**64
    assert words_of_collective(word, []) == f"behind all_reduce number {count} of group 4095"
    assert len(NAMES) < 256


def test_an_unknown_word_breaks_no_report():
    assert words_of_collective(0, []) == ""
    assert words_of_collective(2**64 - 1, ["a"])


class Doubles(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counted.issued(ALL_REDUCE, None)
        return 2 * x


def test_nothing_is_counted_inside_of_what_is_compiled():
    """The compiler traces through without a break."""
    compiled = torch.compile(Doubles(), fullgraph=True, backend="eager")
    assert compiled(torch.ones(1)).item() == 2.0
