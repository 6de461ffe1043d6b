"""The Triton kernels' arithmetic on machines without a GPU, in Triton's interpreter, which must be chosen at import."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A thousand rows are for a GPU: the interpreter takes one after the other. Norms of rows of 4,097 are taken in fp32
# alone, of shorter ones in every type.
INTERPRETED = "triton and cpu and not 1000x24 and not (test_equations and 4097 and float16)"


@pytest.mark.skipif(find_spec("triton") is None, reason="triton has no wheel for this platform")
@pytest.mark.parametrize(
    ("file", "least"),
    [
        ("test_cross_entropy.py", 20),
        ("test_unpermute.py", 32),
        ("test_attention_merge.py", 32),
        ("test_grouped.py", 18),
        ("test_fp8_cast.py", 130),
        ("test_norm.py", 110),
        ("test_gated.py", 120),
        ("test_gated_weighted.py", 30),
        ("test_rope.py", 80),
        ("test_fp8_groups.py", 28),
    ],
)
def test_passes_the_gate(file: str, least: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-k", INTERPRETED, f"tests/kernels/{file}"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|skipped|failed)", done.stdout)}
    assert counts.get("passed", 0) >= least, done.stdout[-500:]
    assert not counts.get("skipped"), done.stdout[-500:]
