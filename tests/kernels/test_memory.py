"""That the plugin memory.py sees a kernel that touches what it was not given; see test_triton_interpreted.py."""

import sys

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton has no wheel for this platform")
tl = triton.language

pytestmark = [
    pytest.mark.skipif(
        not triton.knobs.runtime.interpret or "tests.kernels.memory" not in sys.modules,
        reason="runs under TRITON_INTERPRET=1: test_triton_interpreted.py",
    ),
    pytest.mark.parametrize("implementation", ["triton"]),
    pytest.mark.parametrize("device", ["cpu"]),
]


@triton.jit
def copy_kernel(from_ptr, to_ptr, read, written, b: tl.constexpr):
    at = tl.arange(0, b)
    x = tl.load(from_ptr + at, mask=at < read, other=0.0)
    tl.store(to_ptr + at, x, mask=at < written)


@triton.jit
def add_kernel(to_ptr, at, b: tl.constexpr):
    tl.atomic_add(to_ptr + at + tl.arange(0, b), 1.0)


def test_what_was_given_is_free_to_be_used(implementation: str, device: str) -> None:
    source = torch.arange(16.0)
    # every second element of the first half, and a matrix that is turned
    copy_kernel[(1,)](source[0:8:2], source.view(4, 4).t()[1:], 7, 12, 16)
    add_kernel[(1,)](source, 8, 8)


@pytest.mark.parametrize(
    ("read", "written", "said"),
    [(13, 12, "reads \\+0 bytes"), (12, 13, "writes \\+0 bytes"), (16, 12, "reads \\+0 bytes")],
)
def test_an_element_too_many_is_seen(read: int, written: int, said: str, implementation: str, device: str) -> None:
    """In the middle of memory that is somebody's."""
    source = torch.zeros(64)
    with pytest.raises(Exception, match=f"a kernel {said} from the end"):
        copy_kernel[(1,)](source[4:16], source[32:44], read, written, 16)


@pytest.mark.parametrize("at", [-1, 5, 64])
def test_a_sum_beside_it_is_seen(at: int, implementation: str, device: str) -> None:
    source = torch.zeros(64)
    with pytest.raises(Exception, match="a kernel changes"):
        add_kernel[(1,)](source[16:28], at, 8)
