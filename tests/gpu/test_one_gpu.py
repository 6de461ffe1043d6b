"""What runs on a GPU alone, held to what runs everywhere."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from megaspec.optim.adamw import AdamW
from megaspec.optim.spec import AdamWSpec
from megaspec.verify.parity import TOLERANCES, compare
from megaspec_kernels.cross_entropy.reference import VocabShard
from megaspec_kernels.gate import check as gate
from megaspec_kernels.gate import in_dtype, results
from megaspec_kernels.registry import REGISTRY
from tests.conftest import Tell
from tests.kernels.test_cross_entropy import Shape, make, plain, run
from tests.parity.cases import Case
from tests.parity.checks import check, check_low, failures
from tests.parity.tasks import run_case, truth_of
from tests.ranks import RankPool

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")]

BASE = Case(mask="uneven", kv_heads=2, d_head=64)
CASES = [
    replace(BASE, compile="block"),
    replace(BASE, compile="block", accumulate=3, cross_entropy="triton", tied=True, pad=8),
    replace(BASE, compile="block", documents=True, family="gpt", optimizer="sgd"),
    replace(BASE, compile="block", dropout=True, attention="reference"),
    # rows that the compiler would pad, see COMPILED in megaspec/nn/linear.py
    replace(BASE, compile="block", d_model=1048),
]
# In bf16 alone.
FLEX = [
    replace(BASE, attention="flex", documents=True),
    replace(BASE, attention="flex", documents=True, compile="block"),
    replace(BASE, attention="flex", options="sinks", compile="block"),
    replace(BASE, attention="flex", options="cap", compile="block", documents=True, accumulate=3),
    replace(BASE, attention="flex", options="window", also=(("parallelism.recompute.kind", "full"),), compile="block"),
    replace(
        BASE, attention="flex", options="all", also=(("parallelism.recompute.kind", "selective"),), compile="block"
    ),
]


@pytest.mark.parametrize("case", [replace(c, cross_entropy="chunked") for c in CASES], ids=str)
def test_compiled_blocks_equal_eager_ones_in_fp64(gpu_pool: RankPool, case: Case, tell: Tell) -> None:
    check(gpu_pool, case, tell, steps=5, device="cuda")


@pytest.mark.parametrize("case", [*CASES, *FLEX], ids=str)
def test_compiled_blocks_and_fused_kernels_lose_no_more_than_plain_ones_in_bf16(
    gpu_pool: RankPool, case: Case, tell: Tell
) -> None:
    eager = replace(case, compile="none", attention="reference", cross_entropy="reference")
    check_low(gpu_pool, case, tell, plain=eager, device="cuda")


def test_a_gpu_trains_as_the_cpu_does(gpu_pool: RankPool) -> None:
    """fp64, 20 steps: initial weights, dropout masks and the optimizer are the same function on both."""
    case = Case(mask="uneven", kv_heads=2, dropout=True, attention="reference", accumulate=3)
    findings = compare(run_case(gpu_pool, case, steps=20, device="cuda"), truth_of(case, steps=20), TOLERANCES["fp64"])
    assert all(f.passed for f in findings), failures(findings)


@pytest.mark.parametrize("grouped", [False, True])
def test_causal_attention_runs_on_cudnn(grouped: bool) -> None:
    q = torch.randn(2, 512, 8, 128, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(2, 512, 2 if grouped else 8, 128, device="cuda", dtype=torch.bfloat16)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        REGISTRY["attention"]["sdpa"].attend(q, k, k, documents=None, drop=None)
        torch.cuda.synchronize()
    names = [e.name for e in seen.events()]
    assert any("cudnn" in n.lower() for n in names), names


@pytest.mark.parametrize("name", ["chunked", "triton"])
def test_cross_entropy_at_the_size_of_a_real_vocabulary(name: str) -> None:
    shape = Shape(600, 256, 128_256, 64, size=3)
    inputs, others = make(shape, torch.device("cuda"))
    grad = torch.tensor(0.37, device="cuda", dtype=torch.float64)
    mine = in_dtype(inputs, torch.bfloat16)
    gate(
        results(partial(run, name, **others, shard=VocabShard(0, shape.V)), mine, grad),
        results(partial(plain, **others, valid=shape.V), mine, grad),
        results(partial(plain, **others, valid=shape.V), inputs, grad),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_fused_optimizer_equals_the_cpu(dtype: torch.dtype) -> None:
    """Ten updates, scaled down and one skipped, to 8 roundings of fp32."""
    torch.manual_seed(2)
    start = {"w": torch.randn(33, 17).to(dtype), "b": torch.randn(17).to(dtype)}
    spec = AdamWSpec(kind="adamw", lr=1e-2)
    steps = [{n: torch.randn(p.shape) for n, p in start.items()} for _ in range(10)]
    ends = {}
    for device in ("cpu", "cuda"):
        parameters = {n: nn.Parameter(p.clone().to(device)) for n, p in start.items()}
        optimizer = AdamW(parameters, spec)
        for i, gradients in enumerate(steps):
            bad = i == 4
            optimizer.update(
                {n: (g * (float("nan") if bad else 1)).to(device) for n, g in gradients.items()},
                lr=1e-2,
                weight_decay=0.1,
                divide_by=torch.tensor(3.0 + i, device=device),
                skip=torch.tensor(float(bad), device=device),
            )
        assert optimizer.updates == 9
        ends[device] = {
            **{n: m.cpu() for n, m in optimizer.masters.items()},
            **{f"{k}.{n}": t.cpu() for k, by in optimizer.state().items() for n, t in by.items()},
        }
        for n, p in parameters.items():
            assert torch.equal(p.cpu(), optimizer.masters[n].cpu().to(dtype))
    for name, expected in ends["cpu"].items():
        error = (ends["cuda"][name] - expected).abs().max() / expected.abs().max()
        assert error <= 8 * torch.finfo(torch.float32).eps, f"{name}: {error:.1e}"
