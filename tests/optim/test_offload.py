"""Updates in the CPU's memory are the same to the bit."""

from functools import partial

import pytest
import torch

from megaspec.optim import offload
from megaspec.optim.offload import OffloadedOptimizer
from megaspec.optim.optimizer import build_optimizer
from megaspec.optim.spec import AdamWSpec, OptimSpec, SgdSpec


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("adamw", ["torch", "reference"])
@pytest.mark.parametrize(
    "spec", [AdamWSpec(kind="adamw", lr=1e-2), SgdSpec(kind="sgd", lr=1e-2)], ids=lambda spec: spec.kind
)
def test_updates_on_the_cpu_are_the_same_to_the_bit(
    spec: OptimSpec, adamw: str, share: float, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "GROUP_BYTES", 2000)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}[precision]
    wide = torch.promote_types(dtype, torch.float32)
    draw = torch.Generator().manual_seed(5)
    shapes = {"a": (16, 24), "b": (24,), "none": (0, 24), "c": (40, 8), "d": (8, 8)}
    start = {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}
    both = [{name: w.clone() for name, w in start.items()} for _ in range(2)]
    plain, away = (
        build_optimizer(both[0], spec, adamw=adamw),
        OffloadedOptimizer(both[1], make=partial(build_optimizer, spec=spec), spec=spec, share=share, adamw=adamw),
    )
    for step in range(4):
        gradients = {name: torch.randn(w.shape, generator=draw).to(wide) for name, w in start.items()}
        for optimizer in (plain, away):
            optimizer.update(
                {name: g.clone() for name, g in gradients.items()},
                lr=1e-2,
                weight_decay=0.1,
                divide_by=torch.tensor(2.0, dtype=wide),
                skip=torch.tensor(float(step == 2)),
            )
    assert plain.updates == away.updates == 3
    assert list(away.masters) == list(plain.masters)
    moved = sum(start[name].numel() for name, part in away._part_of.items() if part is not away._here)
    assert 0.8 * share <= moved / sum(w.numel() for w in start.values()) <= share
    for name in start:
        assert torch.equal(both[0][name], both[1][name]), name
        assert torch.equal(plain.masters[name], away.masters[name]), name
    for kind, values in plain.state().items():
        assert all(torch.equal(value, away.state()[kind][name]) for name, value in values.items()), kind


def test_what_is_put_into_an_offloaded_optimizer_reaches_the_weights() -> None:
    weights = {"a": torch.zeros(4, 4, dtype=torch.bfloat16), "b": torch.zeros(2, dtype=torch.bfloat16)}
    spec = AdamWSpec(kind="adamw", lr=1e-2)
    make = partial(build_optimizer, spec=spec)
    optimizer = OffloadedOptimizer(weights, make=make, spec=spec, share=0.9, adamw="torch")
    for name in weights:
        optimizer.put("master", name, torch.full(weights[name].shape, 3.0))
        optimizer.put("exp_avg", name, torch.full(weights[name].shape, 5.0))
    optimizer.updates = 7
    optimizer.write_back(["a"])
    assert weights["a"].eq(3).all()
    assert weights["b"].eq(0).all()
    optimizer.write_back()
    assert weights["b"].eq(3).all()
    assert all(state.eq(5).all() for state in optimizer.state()["exp_avg"].values())
    assert [part.updates for part in optimizer._parts] == [7] * len(optimizer._parts)
