"""Documents through cuDNN's frontend: what it is told, on a CPU; its kernels against fp64, on a GPU."""

import importlib.util

import pytest
import torch
from torch import Tensor

from megaspec_kernels.attention import cudnn
from megaspec_kernels.attention.documents import documents_of
from megaspec_kernels.gate import check, in_dtype, results
from megaspec_kernels.registry import REGISTRY
from tests.kernels import cudnn_frontend
from tests.kernels.test_attention_documents import PACKED, Packed, alone, compiles_once, hold, host_never_waits, make

HAS_FRONTEND = importlib.util.find_spec("cudnn") is not None
needs_frontend = pytest.mark.skipif(not HAS_FRONTEND, reason="nvidia-cudnn-frontend is not installed")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[cudnn_frontend.Graph]:
    """Graphs that are made, by a frontend that computes on the CPU."""
    return cudnn_frontend.put_in_place(monkeypatch)


@pytest.mark.parametrize("packed", PACKED, ids=str)
def test_cudnn_is_told_of_documents_windows_groups_and_sinks(packed: Packed, told: list[cudnn_frontend.Graph]) -> None:
    """Empty and one-token documents, several rows; memory that nobody writes is NaN."""
    hold("cudnn", packed, torch.bfloat16, torch.device("cpu"))
    assert len(told) == 2


def test_a_window_lies_in_rows_of_one_document(told: list[cudnn_frontend.Graph]) -> None:
    packed = Packed(((70,), (70,)), window=9)
    inputs, grad, _ = make(packed)
    kernel = REGISTRY["attention"]["cudnn"]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernel.attend(q, k, v, window=9)

    def truth(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return alone(packed, q, k, v)

    mine = in_dtype(inputs, torch.bfloat16)
    check(results(attend, mine, grad), results(truth, mine, grad), results(truth, inputs, grad))


def test_other_documents_take_the_same_plan(told: list[cudnn_frontend.Graph]) -> None:
    """Lengths are data; only other bounds are another plan."""
    q, k, v = (torch.randn(1, 64, heads, 16, dtype=torch.bfloat16) for heads in (4, 2, 2))
    for lengths in ((30, 34), (17, 1, 17, 29), (20, 20, 24)):
        number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None].to(torch.int32)
        REGISTRY["attention"]["cudnn"].attend(q, k, v, documents=documents_of(number))
    bounds = [(key[2].sequences, key[2].longest) for key in cudnn._PLANS]
    assert bounds == [(32, 64), (32, 32)]
    assert len(told) == 2


@pytest.mark.parametrize("sinks", [False, True])
def test_the_compiler_neither_breaks_nor_begins_anew(sinks: bool, told: list[cudnn_frontend.Graph]) -> None:
    compiles_once("cudnn", torch.bfloat16, sinks=sinks)


def test_a_package_that_is_not_there_is_named() -> None:
    if HAS_FRONTEND:
        pytest.skip("nvidia-cudnn-frontend is installed")
    shape = cudnn.Shape(1, 8, 8, 1, 1, 16, None, 0.25, torch.bfloat16)
    with pytest.raises(ImportError, match=r"nvidia-cudnn-frontend; pip install 'megaspec\[cudnn\]'"):
        cudnn.plan_of("forward", shape)


def test_gradients_in_order_are_refused(told: list[cudnn_frontend.Graph]) -> None:
    q, k, v = (torch.randn(1, 8, 2, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = REGISTRY["attention"]["cudnn"].attend(q, k, v, window=4)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(AssertionError, match="in no order"):
            out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)


# Rows of a training batch, as the loader makes them: documents of a few lengths, the rest of the bound empty.
TRAINED = [
    Packed(((300, 1, 700, 23, 1024),), N=8, K=2, H=128),
    Packed(((256,) * 8, (2047, 1)), N=8, K=2, H=64),
    Packed(((1,) * 100 + (924,),), N=4, K=4, H=64),
    Packed(((64, 192, 320, 448),), N=4, K=1, H=128),
    Packed(((1500, 548),), N=8, K=2, H=64, window=128, sinks=True),
]


@pytest.mark.gpu
@needs_frontend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("packed", [*PACKED, *TRAINED], ids=str)
def test_documents_on_a_gpu(packed: Packed, dtype: torch.dtype) -> None:
    """Each as if it were alone, against fp64, with NaN where nobody writes."""
    hold("cudnn", packed, dtype, torch.device("cuda"))


@pytest.mark.gpu
@needs_frontend
def test_plans_are_kept_and_the_host_runs_ahead() -> None:
    """Other documents make no further plan, and no call waits for the GPU."""
    q, k, v = (torch.randn(1, 4096, n, 128, device="cuda", dtype=torch.bfloat16) for n in (32, 8, 8))
    batches = []
    for seed in range(4):
        draw = torch.Generator().manual_seed(seed)
        cuts = torch.randperm(4095, generator=draw)[:15] + 1
        number = torch.zeros(1, 4096, dtype=torch.int32)
        number[0, cuts] = 1
        documents = documents_of(number.cumsum(dim=1, dtype=torch.int32))
        batches.append(documents.map(lambda x: x.cuda()))
    longest = max(batch.longest for batch in batches)
    batches = [type(one)(one.number, one.starts, one.most, longest) for one in batches]
    attend = REGISTRY["attention"]["cudnn"].attend
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def both(documents: object) -> None:
        torch.autograd.grad(attend(*leaves, documents=documents), leaves, torch.ones_like(q))

    both(batches[0])
    made = set(cudnn._PLANS)
    with host_never_waits():
        for documents in batches:
            both(documents)
    torch.cuda.synchronize()
    assert set(cudnn._PLANS) == made


@pytest.mark.gpu
@needs_frontend
def test_documents_compile_on_a_gpu() -> None:
    """Without a break of the graph, with the same numbers as eager."""
    packed = TRAINED[0]
    inputs, grad, documents = make(packed, torch.device("cuda"))
    mine = in_dtype(inputs, torch.bfloat16)
    attend = REGISTRY["attention"]["cudnn"].attend

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, documents=documents)

    compiled = torch.compile(eager, fullgraph=True)
    expected = eager(**mine)
    assert torch.equal(compiled(**mine), expected)
    leaves = [x.detach().requires_grad_() for x in mine.values()]
    grads = torch.autograd.grad(compiled(*leaves), leaves, grad.bfloat16())
    again = torch.autograd.grad(eager(*leaves), leaves, grad.bfloat16())
    for one, other in zip(grads, again, strict=True):
        # only the order of the sums differs
        assert (one - other).abs().max() <= 2**-6 * other.abs().max()
