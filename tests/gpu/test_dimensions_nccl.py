"""Every parallel dimension over NCCL, on 2 and 4 devices, against one: in fp64; what is fused or compiled, in bf16."""

import pytest

from megaspec.parallelism.spec import OverlapSpec
from megaspec.verify.parity import TOLERANCES, compare
from tests.conftest import Tell
from tests.parity.cases import Case
from tests.parity.checks import check, check_low, failures
from tests.parity.tasks import truth_of
from tests.parity.test_fp8 import steps_of, writing
from tests.ranks import RankPool, needs_gpus

pytestmark = pytest.mark.gpu
DEEP = {"n_layers": 4, "accumulate": 3, "mask": "uneven"}
OVERLAP_OFF = tuple((f"parallelism.overlap.{name}", False) for name in OverlapSpec.model_fields)
OFFLOADED = (("parallelism.offload.layers", 1), ("parallelism.offload.optimizer", 0.5))
CASES = [
    *(Case(pp=2, schedule=s, **DEEP) for s in ("gpipe", "1f1b", "zb_h1")),
    *(Case(pp=2, schedule=s, virtual=2, tied=True, **DEEP) for s in ("interleaved", "zb_v")),
    Case(pp=2, schedule="zb_v", virtual=2, also=(*OVERLAP_OFF, *OFFLOADED), **DEEP),
    *(Case(cp=2, context=c, kv_heads=4, mask="uneven") for c in ("ring", "all_gather", "all_to_all")),
    *(Case(cp=2, context=c, kv_heads=2, documents=True, mask="uneven") for c in ("ring", "all_gather", "all_to_all")),
    Case(cp=2, context="ring", kv_heads=4, mask="empty_part", also=OVERLAP_OFF),
    *(Case(dp=2, strategy=s, accumulate=3, mask="empty_rank", tied=True) for s in ("zero1", "zero2", "fsdp")),
    *(Case(dp=2, strategy=s, accumulate=3, optimizer="muon", mask="uneven") for s in ("replicate", "zero1", "fsdp")),
    *(Case(dp=2, strategy=s, accumulate=3, mask="uneven", also=(*OVERLAP_OFF, *OFFLOADED)) for s in ("zero1", "fsdp")),
    *(
        Case(dp=2, ep=2, router=r, dispatch=d, drop=drop, shared="gate", mask="uneven")
        for d in ("all_to_all", "all_gather")
        for r, drop in (("softmax", "none"), ("sigmoid", "probs"), ("root", "position"), ("first", "padded"))
    ),
    Case(dp=2, ep=2, router="sinkhorn", strategy="zero1", accumulate=3, mask="uneven"),
    Case(dp=2, ep=2, router="softmax", strategy="fsdp", shared="plain", mask="uneven", also=OVERLAP_OFF),
    Case(tp=2, sequence=True, etp=2, router="sigmoid", shared="gate", mask="uneven"),
    Case(tp=2, sequence=True, ep=2, router="softmax", documents=True, mask="uneven"),
    Case(cp=2, ep=2, router="root", drop="probs", mask="uneven"),
    Case(dp=2, ep=2, router="best two of group", experts="plain", drop="padded", mask="uneven"),
    Case(dp=2, etp=2, router="logit bias", experts="bias", mask="uneven"),
    Case(dp=2, etp=2, router="scores", experts="inputs, bias", dispatch="all_gather", drop="probs", mask="uneven"),
    *(Case(pp=4, schedule=s, **DEEP) for s in ("gpipe", "1f1b", "zb_h1")),
    Case(pp=2, tp=2, sequence=True, schedule="interleaved", virtual=2, tied=True, **DEEP),
    Case(pp=2, schedule="zb_v", virtual=2, tp=2, sequence=True, **DEEP),
    *(Case(cp=4, context=c, kv_heads=4, mask="uneven") for c in ("ring", "all_gather", "all_to_all", "hierarchical")),
    Case(cp=2, tp=2, sequence=True, kv_heads=2, documents=True, mask="uneven"),
    *(Case(dp=4, strategy=s, accumulate=3, mask="empty_rank") for s in ("zero1", "zero2", "fsdp")),
    Case(dp=4, strategy="hsdp", replicas=2, accumulate=3, mask="uneven", tied=True),
    Case(pp=2, dp=2, strategy="fsdp", **DEEP),
    *(Case(dp=4, ep=4, router="softmax", dispatch=d, mask="uneven") for d in ("all_to_all", "all_gather")),
    Case(dp=2, tp=2, sequence=True, ep=2, etp=2, router="sigmoid", shared="gate", mask="uneven"),
    Case(cp=2, dp=2, ep=4, router="root", drop="probs", mask="uneven"),
]
FUSED = {"d_head": 64, "cross_entropy": "triton", "compile": "block", "mask": "uneven"}
LOW = [
    *(Case(pp=2, schedule=s, n_layers=4, accumulate=3, **FUSED) for s in ("1f1b", "zb_h1")),
    *(Case(pp=2, schedule=s, virtual=2, n_layers=4, accumulate=3, **FUSED) for s in ("interleaved", "zb_v")),
    *(Case(cp=2, context=c, **FUSED) for c in ("ring", "all_gather", "all_to_all")),
    *(Case(dp=2, strategy=s, accumulate=3, **FUSED) for s in ("zero1", "zero2", "fsdp")),
    Case(pp=4, schedule="1f1b", n_layers=4, accumulate=3, **FUSED),
    Case(pp=2, dp=2, schedule="zb_h1", strategy="zero1", n_layers=4, accumulate=3, **FUSED),
    Case(cp=4, context="ring", kv_heads=2, **FUSED),
    Case(cp=4, context="all_to_all", **FUSED),
    Case(dp=4, strategy="zero1", accumulate=3, **FUSED),
    Case(dp=4, strategy="fsdp", accumulate=3, **FUSED),
]
# Norms, gates and rotations write fp8: of norms what ranks gather, in bytes.
WRITTEN = [
    Case(tp=2, sequence=True, precision="fp8 delayed", accumulate=2, mask="uneven"),
    Case(tp=2, sequence=True, precision="fp8 delayed", accumulate=2, compile="block"),
    Case(tp=2, precision="fp8 delayed", accumulate=2, mask="uneven"),
    Case(tp=2, pp=2, sequence=True, schedule="zb_h1", precision="fp8 delayed", n_layers=4, accumulate=4),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fp64_equals_one_gpu(gpu_pool: RankPool, case: Case, tell: Tell) -> None:
    needs_gpus(case.ranks)
    check(gpu_pool, case, tell, steps=3, device="cuda")


@pytest.mark.parametrize("case", LOW, ids=str)
def test_bf16_is_as_close_to_the_truth_as_one_gpu(gpu_pool: RankPool, case: Case, tell: Tell) -> None:
    needs_gpus(case.ranks)
    check_low(gpu_pool, case, tell, device="cuda")


@pytest.mark.parametrize("case", WRITTEN, ids=str)
def test_fp8_that_is_written_is_what_one_gpu_quantises(gpu_pool: RankPool, case: Case, tell: Tell) -> None:
    """By plain operations in fp64, so that nothing but the grid rounds."""
    needs_gpus(case.ranks)
    found = writing(gpu_pool, case, device="cuda")
    findings = compare(found, truth_of(case, steps=steps_of(case), device="cuda"), TOLERANCES["fp64"])
    tell(f"{case}: {findings[0]}")
    assert all(one.passed for one in findings), failures(findings)
