"""AdamW with narrow states: the reference in fp64 against the formula, the kernel against the reference."""

import os

import pytest
import torch

from megaspec_kernels.adamw import reference, triton
from megaspec_kernels.adamw.formats import FORMATS, decoded, hashed, split
from megaspec_kernels.adamw.reference import Moments, Step

# Sizes that hurt: one element, less than a block, one more than a block and than a program's part.
CHUNK = 2 * triton.BLOCK
SHAPES = ((1,), (3, 5), (63, 33), (triton.BLOCK + 1,), (CHUNK + 1,))
ALIGNED = ((16,), (64, 48), (CHUNK + 16,))
# Those that threads load by four beside those that they don't.
MIXED = ((16,), (3, 5), (CHUNK + 16,), (CHUNK + 1,), (64, 48))
# Weights, master weights, first and second moment.
STATES = [
    ("bf16", "halves", "bf16", "bf16"),
    ("bf16", "halves", "fp8", "fp16"),
    ("bf16", "fp32", "fp16", "fp8"),
    ("bf16", "fp32", "fp32", "bf16"),
    ("fp16", "fp32", "bf16", "fp32"),
    ("fp32", "fp32", "bf16", "fp8"),
    ("bf16", "fp32", "fp32", "fp32"),
    ("fp32", "fp32", "fp32", "fp32"),
]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def started(shapes, states, device):
    """Weights, masters and moments before the first step."""
    weight, master, *forms = states
    torch.manual_seed(0)
    values = [
        torch.randn(s, dtype=torch.float64).to(torch.promote_types(DTYPES[weight], torch.float32)) for s in shapes
    ]
    if master == "halves":
        weights, masters = (list(one) for one in zip(*(split(v) for v in values), strict=True))
    else:
        weights = [v.to(DTYPES[weight]) for v in values]
        masters = [w if w.dtype == v.dtype else v for w, v in zip(weights, values, strict=True)]
    wide = masters[0].dtype if masters[0].is_floating_point() else torch.float32
    moments = []
    for form in (FORMATS.get(name) for name in forms):
        made = [torch.zeros(s, dtype=form.dtype if form else wide, device=device) for s in shapes]
        zeros = torch.zeros(len(shapes), dtype=wide, device=device)
        moments.append(Moments(made, form, torch.ones_like(zeros), zeros))
    return [w.to(device) for w in weights], [m.to(device) for m in masters], *moments


def gradients(shapes, step, dtype, device):
    generator = torch.Generator().manual_seed(step + 1)
    made = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [(0.01 * g * torch.exp(2 * torch.randn(g.shape, generator=generator))).to(dtype).to(device) for g in made]


def trained(function, shapes, states, device, *, steps=4, skipped=2):
    state = started(shapes, states, device)
    wide = torch.float64 if states[0] == "fp64" else torch.float32
    decays = [len(s) > 1 for s in shapes]
    updates = torch.zeros((), dtype=torch.int64, device=device)
    for step in range(steps):
        skip = torch.tensor(float(step == skipped), device=device)
        keys = hashed(torch.arange(len(shapes), device=device) * 77 + updates)
        divide_by = torch.tensor(2.0, dtype=wide, device=device)
        made = Step(1e-2, 0.1, 0.9, 0.95, 1e-8, divide_by, skip, updates)
        function(*state, gradients(shapes, step, wide, device), decays, keys, made)
        updates = updates + (skip == 0)
    return state


def test_the_reference_in_fp64_is_the_formula():
    shapes = SHAPES[:3]
    weights, _, first, second = trained(reference.adamw_, shapes, ("fp64", "fp64", "fp64", "fp64"), "cpu")
    expected = [w.clone() for w in started(shapes, ("fp64", "fp64", "fp64", "fp64"), "cpu")[0]]
    m, v = ([torch.zeros_like(w) for w in expected] for _ in range(2))
    for t, step in enumerate((0, 1, 3), start=1):
        for i, g in enumerate(gradients(shapes, step, torch.float64, "cpu")):
            m[i] = 0.9 * m[i] + 0.1 * g / 2
            v[i] = 0.95 * v[i] + 0.05 * (g / 2) ** 2
            change = m[i] / (1 - 0.9**t) / ((v[i] / (1 - 0.95**t)).sqrt() + 1e-8)
            expected[i] -= 1e-2 * (change + 0.1 * (len(shapes[i]) > 1) * expected[i])
    for i in range(len(shapes)):
        torch.testing.assert_close(weights[i], expected[i], rtol=1e-13, atol=1e-15)
        torch.testing.assert_close(first.values[i], m[i], rtol=1e-13, atol=1e-18)
        torch.testing.assert_close(second.values[i], v[i], rtol=1e-13, atol=1e-18)


def whole(weight, kept):
    return reference.joined(weight, kept) if kept.dtype == torch.int16 else kept


@pytest.mark.parametrize("shapes", [SHAPES, ALIGNED, MIXED], ids=["odd", "aligned", "mixed"])
@pytest.mark.parametrize("states", STATES, ids="-".join)
def test_the_kernel_is_the_reference(states, shapes, device, monkeypatch):
    monkeypatch.setattr(triton, "CHUNK", CHUNK)
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("runs under TRITON_INTERPRET=1: test_triton_interpreted.py")
    slow, fast = (trained(one, shapes, states, device, steps=3) for one in (reference.adamw_, triton.adamw_))
    for i in range(len(shapes)):
        expected, found = (whole(one[0][i], one[1][i]) for one in (slow, fast))
        # the order of fp32's operations; and where that turned a draw, a neighbour of one moment in one step
        off = (found - expected).abs() / (1e-6 * expected.abs() + 1e-7)
        assert (off > 1).to(torch.float32).mean() < 1e-3
        assert (found - expected).abs().max() < 1e-2
        # halves round to the nearest; the interpreter cuts off what does not fit into bf16
        distance = {"bf16": 2.0**-8, "fp16": 2.0**-10, "fp32": 0.0}[states[0]]
        exact = states[1] == "halves" or device.type == "cuda"
        rounded = distance * (0.51 if exact else 1.0) * found.abs() + 1e-7 * (distance > 0)
        assert ((fast[0][i].to(torch.float32) - found).abs() <= 2 * rounded).all()
    for expected, found in zip(slow[2:], fast[2:], strict=True):
        assert torch.equal(expected.scale, found.scale)
        torch.testing.assert_close(expected.largest, found.largest, rtol=2**-3, atol=0)
        for i in range(len(shapes)):
            a, b = (decoded(one.values[i], one.scale[i], torch.float32) for one in (expected, found))
            limit = 1e-6 * a.abs().max() if expected.form is None else 0.0
            assert ((a - b).abs() > limit).to(torch.float32).mean() < 2e-3
            assert torch.isfinite(b).all()


@pytest.mark.parametrize("kept", [1, 1000])
def test_what_the_kernel_does_not_take(kept):
    weights, masters, first, second = started(((8, kept),), STATES[0], "cpu")
    across = [torch.zeros(kept, 8).t()]
    made = Step(1e-2, 0.1, 0.9, 0.95, 1e-8, torch.ones(()), torch.zeros(()), torch.zeros(()))
    keys = torch.zeros(1, dtype=torch.int64)
    if kept > 1:
        with pytest.raises(AssertionError, match="not contiguous"):
            triton.adamw_(weights, masters, first, second, across, [True], keys, made)
    grads = [torch.zeros(8, kept, dtype=torch.bfloat16)]
    with pytest.raises(AssertionError, match="gradients in torch"):
        triton.adamw_(weights, masters, first, second, grads, [True], keys, made)
