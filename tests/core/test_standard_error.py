"""A full disk, or nothing at all, behind stderr costs what is said there, and no exit code."""

import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")
SAYS = "import sys; from megaspec.core.standard_error import survive_full_disk; survive_full_disk(); "
SAYS += "print('lost', file=sys.stderr, flush=True); sys.exit(64)"


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
def test_a_full_disk_behind_it_changes_no_exit_code() -> None:
    with FULL.open("wb") as full:
        done = subprocess.run([sys.executable, "-P", "-c", SAYS], stderr=full)
        # without it the flush fails
        plain = subprocess.run([sys.executable, "-c", SAYS.replace("survive_full_disk();", "")], stderr=full)
    assert done.returncode == 64
    assert plain.returncode != 64


def test_a_closed_one_is_left_alone() -> None:
    done = subprocess.run(["/bin/sh", "-c", f'exec "{sys.executable}" -P -c "{SAYS}" 2>&-'])
    assert done.returncode == 64
