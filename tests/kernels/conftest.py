"""Where kernels are tested: on the CPU, and on CUDA under `-m gpu`."""

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)


@pytest.fixture
def poisoned() -> None:
    """Memory of the GPU that torch hands out holds NaN, in the modes in which nothing else fills it."""
    whole = torch.full((1 << 28,), float("nan"), device="cuda")
    small = [torch.full((1 << 16,), float("nan"), device="cuda") for _ in range(64)]
    del whole, small
