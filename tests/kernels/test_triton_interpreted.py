"""The Triton kernels' arithmetic on machines without a GPU, in Triton's interpreter, which must be chosen at import."""

import os
import re
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A thousand rows are for a GPU: the interpreter takes one after the other. Norms of rows of 4,097 are taken in fp32
# alone, of shorter ones in every type.
OF_KERNELS = "cpu and not 1000x24 and not (test_equations and 4097 and float16) and (triton or is_the_reference)"
# Whole layers with these kernels.
OF_LAYERS = "test_fused_kernels"
# Tests that run at least: with few cases for all pairs of what they are made of, and with all cases.
LEAST = {
    "test_adamw.py": (8, 24),
    "test_attention_merge.py": (32, 32),
    "test_cross_entropy.py": (30, 30),
    "test_flex_blocks.py": (8, 40),
    "test_fp8_cast.py": (50, 191),
    "test_fp8_groups.py": (14, 29),
    "test_fused_kernels.py": (5, 5),
    "test_gated.py": (35, 140),
    "test_gated_weighted.py": (25, 82),
    "test_grouped.py": (18, 18),
    "test_memory.py": (7, 7),
    "test_norm.py": (45, 146),
    "test_rope.py": (24, 99),
    "test_unpermute.py": (16, 32),
}
PYTEST = (sys.executable, "-m", "pytest", "-rps", "-p", "tests.kernels.interpreter", "-p", "tests.kernels.memory")
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton has no wheel for this platform")


def passed(*options: str) -> Counter[str]:
    """Tests that passed, by file: all of them in one process, since a process takes seconds to begin."""
    done = subprocess.run(
        [*PYTEST, *options, "-k", f"({OF_KERNELS}) or {OF_LAYERS}", *map(folder_of, LEAST)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert not re.search(r"^SKIPPED", done.stdout, re.MULTILINE), done.stdout[-3000:]
    return Counter(re.findall(r"^PASSED tests/\w+/(\w+\.py)::", done.stdout, re.MULTILINE))


def folder_of(name: str) -> str:
    room = "nn" if name == f"{OF_LAYERS}.py" else "kernels"
    return f"tests/{room}/{name}"


def test_few_cases_pass_the_gate() -> None:
    found = passed("-p", "tests.kernels.drawn")
    assert all(found[file] >= few for file, (few, _) in LEAST.items()), found


@pytest.mark.slow
def test_all_cases_pass_the_gate() -> None:
    found = passed()
    assert all(found[file] >= whole for file, (_, whole) in LEAST.items()), found
