"""Training with packed documents through every implementation of attention that is installed: the same losses."""

import pytest
import torch

from megaspec.data.loader import pinned, read_batch
from megaspec.data.synthetic import SyntheticSource
from megaspec.estimate.target import detect_target
from megaspec.parallelism.mesh import Mesh
from megaspec.precision.scaler import build_scaler
from megaspec.runtime.build import build, initialise
from megaspec.runtime.step import train_step
from megaspec_kernels.catalog import CATALOG, unmet
from tests.runtime.specs import spec

pytestmark = pytest.mark.gpu

STEPS = 3
MODEL = {"model.d_model": 256, "model.n_heads": 4, "model.n_kv_heads": 2, "model.d_head": 64, "model.max_seq_len": 512}
BASE = MODEL | {"precision.kind": "bf16", "data.seq_len": 512, "data.document_mask": True, "train.steps": 8}


def losses(name: str, *, compiled: bool) -> list[tuple[float, float]]:
    """Losses and gradient norms of a few steps."""
    compile_ = "block" if compiled else "none"
    made = spec(BASE | {"kernels.attention": name, "kernels.compile": compile_}, detect_target())
    built = build(made, mesh=Mesh({}, rank=0, device=torch.device("cuda", 0)))
    initialise(built)
    data = built.spec.data
    source = SyntheticSource(data, split="train", seed=data.seed, segments=(100,))
    scaler = build_scaler(built.spec.precision, device=built.device)
    found = []
    for step in range(STEPS):
        batch = pinned(read_batch(source, [2 * step, 2 * step + 1], document_mask=True)).to(built.device)
        result = train_step(built, [batch], lr=1e-3, weight_decay=0.1, scaler=scaler)
        found.append((result.loss.item(), result.grad_norm.item()))
    return found


PACKAGES = [name for name, need in CATALOG["attention"].implementations.items() if need.package]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_trains_as_torch_does(name: str, compiled: bool) -> None:
    """Losses and gradient norms of steps on packed documents, beside those of sdpa: what bf16 leaves apart."""
    target = detect_target()
    lacks = unmet("attention", name, device=target.device, sm=target.sm, packages=target.versions)
    if lacks is not None:
        pytest.skip(f"kernels.attention={name} {lacks}")
    for (loss, norm), (other, other_norm) in zip(
        losses(name, compiled=compiled), losses("sdpa", compiled=compiled), strict=True
    ):
        assert loss == pytest.approx(other, rel=2e-3)
        assert norm == pytest.approx(other_norm, rel=3e-2)
