"""AdamW with narrow states against the fp64 one."""

import json

import pytest
import torch
from pydantic import TypeAdapter

from megaspec.optim.adamw import AdamW
from megaspec.optim.narrow import NarrowAdamW
from megaspec.optim.optimizer import build_optimizer
from megaspec.optim.spec import OptimSpec
from megaspec_kernels.adamw.formats import (
    FORMATS,
    decoded,
    decoded_square,
    draws,
    encoded,
    encoded_square,
    hashed,
    joined,
    scale_for,
    split,
)

SHAPES = {"matrix": (24, 40), "norm": (37,), "none": (0, 5), "small": (3, 1)}
ALL = {"master": "fp16", "exp_avg": "fp8", "exp_avg_sq": "fp16"}
ONE = torch.ones(())


def spec_of(formats, **more):
    content = {"kind": "adamw", "lr": 1.0, "formats": formats} | more
    return TypeAdapter(OptimSpec).validate_json(json.dumps(content))


def made(formats, dtype=torch.bfloat16, **more):
    generator = torch.Generator().manual_seed(0)
    weights = {
        n: (0.02 * torch.randn(s, generator=generator, dtype=torch.float64)).to(torch.bfloat16).to(dtype)
        for n, s in SHAPES.items()
    }
    return weights, build_optimizer(weights, spec_of(formats, **more), adamw="reference" if formats else "torch")


def gradients(step, dtype=torch.float32):
    """Elements whose sizes lie orders of magnitude apart, as those of models do, with a part that stays."""
    generator, stays = torch.Generator().manual_seed(step + 1), torch.Generator().manual_seed(0)
    out = {}
    for name, shape in SHAPES.items():
        size = 1e-4 * torch.exp(1.5 * torch.randn(shape, generator=stays, dtype=torch.float64))
        always = torch.randn(shape, generator=stays, dtype=torch.float64)
        new = torch.randn(shape, generator=generator, dtype=torch.float64)
        out[name] = (size * (always * (1 - step / 200) + new)).to(dtype)
    return out


def trained(formats, dtype=torch.bfloat16, *, steps=200, **more):
    weights, optimizer = made(formats, dtype, **more)
    one = torch.ones((), dtype=torch.promote_types(dtype, torch.float32))
    for step in range(steps):
        grads = gradients(step, one.dtype)
        optimizer.update(grads, lr=1e-3, weight_decay=0.1, divide_by=one, skip=torch.zeros(()))
    return weights, optimizer


def test_the_spec_says_which():
    assert type(made({})[1]) is AdamW
    assert type(made({"exp_avg": "bf16"})[1]) is NarrowAdamW


# About 1.5 times what was measured. Rounded to nearest, second moments of bf16 and fp8 with beta2 = 0.999 give 0.12 and
# more (see the test below).
@pytest.mark.parametrize(
    ("formats", "beta2", "bound"),
    [
        ({"master": "fp16"}, 0.95, 1e-5),
        ({"exp_avg": "bf16"}, 0.95, 2.2e-3),
        ({"exp_avg": "fp16"}, 0.95, 3e-4),
        ({"exp_avg": "fp8"}, 0.95, 0.04),
        ({"exp_avg_sq": "bf16"}, 0.95, 2.2e-3),
        ({"exp_avg_sq": "bf16"}, 0.999, 7e-3),
        ({"exp_avg_sq": "fp16"}, 0.95, 6e-4),
        ({"exp_avg_sq": "fp16"}, 0.999, 2e-3),
        ({"exp_avg_sq": "fp8"}, 0.95, 0.065),
        ({"exp_avg_sq": "fp8"}, 0.999, 0.13),
        ({"master": "fp16", "exp_avg": "bf16", "exp_avg_sq": "bf16"}, 0.95, 3e-3),
        ({"master": "fp16", "exp_avg": "fp8", "exp_avg_sq": "fp16"}, 0.95, 0.04),
    ],
    ids=str,
)
def test_the_way_of_the_weights(formats, beta2, bound):
    """How far the weights end from those of fp64, by the length of the way."""
    start, _ = made({}, torch.float64)
    _, truth = trained({}, torch.float64, beta2=beta2)
    _, narrow = trained(formats, beta2=beta2)
    for name in ("matrix", "norm"):
        way = truth.masters[name] - start[name]
        missed = narrow.masters[name].to(torch.float64) - truth.masters[name]
        assert missed.norm() < bound * way.norm(), (missed.norm() / way.norm()).item()
        # nor to one side, beyond what chance does
        assert missed.mean().abs() < 5 * missed.std() / missed.numel() ** 0.5
        # nor on the whole too far or not far enough
        assert ((missed * way).sum() / way.square().sum()).abs() < bound / 2


@pytest.mark.parametrize(("name", "beta2"), [("bf16", 0.999), ("fp8", 0.999), ("fp8", 0.95)])
def test_why_rounding_draws_the_neighbour(name, beta2):
    """Gradients become ten times smaller: a second moment that is rounded to nearest stays where it was."""
    form, n = FORMATS[name], 4096
    steps = int(3 / (1 - beta2))
    start = torch.exp(torch.rand(n))
    top = start.max() if form.has_scale else torch.ones(())
    scale = scale_for(top.sqrt(), form)
    ends = []
    for is_drawn in (True, False):
        stored = encoded_square(start, form, scale, None)
        for step in range(steps):
            value = decoded_square(stored, form, scale, torch.float32)
            value = beta2 * value + (1 - beta2) * start / 100
            draw = draws(hashed(torch.tensor(step)), value.shape)[1] if is_drawn else None
            stored = encoded_square(value, form, scale, draw)
        ends.append((decoded_square(stored, form, scale, torch.float32) / start).mean().item())
    expected = beta2**steps * 0.99 + 0.01
    assert ends[0] == pytest.approx(expected, rel=0.1)
    assert ends[1] > 5 * expected


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_format(name, dtype):
    form = FORMATS[name]
    torch.manual_seed(0)
    x = (torch.randn(1 << 15, dtype=torch.float64) * torch.exp(2 * torch.randn(1 << 15, dtype=torch.float64))).to(dtype)
    x[:2] = torch.tensor([0.0, -0.0])
    scale = scale_for(x.abs().max(), form)
    assert form.has_scale == (scale != 1)
    assert not form.has_scale or form.largest / 2 < x.abs().max() * scale <= form.largest
    nearest = encoded(x, form, scale, None)
    plain = (x * scale).to(form.dtype)
    # but for ties
    assert (nearest.view(torch.uint8) != plain.view(torch.uint8)).to(dtype).mean() < 1e-3
    mean, square = torch.zeros_like(x), torch.zeros_like(x)
    root = scale_for(x.abs().max(), form)
    for i in range(64):
        first, second = draws(hashed(torch.tensor(i)), x.shape)
        mean += decoded(encoded(x, form, scale, first.to(dtype)), scale, dtype) / 64
        drawn = encoded_square(x**2, form, root, second.to(dtype))
        square += decoded_square(drawn, form, root, dtype) / 64
        assert (drawn.to(dtype)[2:] > 0).all()
    on_grid = x.abs() * scale >= 2.0**form.lowest
    distance = 2.0**-form.mantissa
    # 64 draws of at most half a distance of standard deviation, over thousands of elements
    assert ((mean / x - 1)[on_grid] / distance).mean().abs() < 2e-3
    assert ((square / x**2 - 1)[on_grid] / distance).mean().abs() < 4e-3
    # what lies on the grid stays there, whatever is drawn, and whatever scale it brings
    for encode, decode, given in (
        (encoded, decoded, nearest),
        (encoded_square, lambda s, sc, w: decoded_square(s, form, sc, w), encoded_square(x**2, form, root, None)),
    ):
        value = decode(given, scale, dtype)
        again = scale_for((value if encode is encoded else value.sqrt()).abs().max(), form)
        assert again >= scale
        for draw in (None, torch.zeros_like(x), torch.full_like(x, 65535 / 65536)):
            assert torch.equal(decode(encode(value, form, again, draw), again, dtype), value)


def test_a_master_weight_of_two_halves():
    torch.manual_seed(0)
    x = torch.randn(1 << 16) * torch.exp(10 * torch.randn(1 << 16))
    high, low = split(x)
    assert torch.equal(joined(high, low), x)
    assert (high != x.to(torch.bfloat16)).sum() < 20  # ties
    assert ((high.to(torch.float32) - x).abs() <= (x.to(torch.bfloat16).to(torch.float32) - x).abs()).all()


def test_two_halves_train_as_one_whole():
    formats = {"exp_avg": "bf16"}
    (_, whole), (weights, halves) = trained(formats, steps=30), trained(formats | {"master": "fp16"}, steps=30)
    for name, weight in weights.items():
        assert torch.equal(whole.masters[name], halves.masters[name])
        assert torch.equal(weight, split(halves.masters[name])[0])


@pytest.mark.parametrize("formats", [ALL, {"exp_avg": "bf16", "exp_avg_sq": "fp8"}], ids=str)
def test_a_skipped_update_changes_no_byte(formats):
    weights, optimizer = trained(formats, steps=2)

    def everything():
        tensors = [*weights.values(), *optimizer._kept.values()]
        for moment in optimizer._moments.values():
            tensors += [*moment.values, moment.scale, moment.largest]
        return [t.view(torch.uint8).numpy().tobytes() for t in tensors]

    before = everything()
    poisoned = gradients(3)
    poisoned["matrix"][0, 0], poisoned["norm"][0] = float("nan"), float("inf")
    optimizer.update(poisoned, lr=0.1, weight_decay=0.1, divide_by=ONE, skip=torch.ones(()))
    assert everything() == before
    assert optimizer.updates == 2
    optimizer.update(gradients(3), lr=0.1, weight_decay=0.1, divide_by=ONE, skip=torch.zeros(()))
    assert everything() != before
    assert optimizer.updates == 3


@pytest.mark.parametrize("formats", [ALL, {"exp_avg": "bf16", "exp_avg_sq": "fp8"}], ids=str)
def test_state_that_was_read_goes_on_as_if_it_had_not_stopped(formats):
    _, straight = trained(formats, steps=6)
    _, old = trained(formats, steps=3)
    weights = {n: torch.zeros(s, dtype=torch.bfloat16) for n, s in SHAPES.items()}
    again = build_optimizer(weights, spec_of(formats), adamw="reference" if formats else "torch")
    for kind, tensors in {"master": old.masters, **old.state()}.items():
        for name, tensor in tensors.items():
            assert tensor.dtype == torch.float32
            assert tensor.shape == weights[name].shape
            again.put(kind, name, tensor)
    again.updates = old.updates
    again.write_back()
    for step in range(3, 6):
        again.update(gradients(step), lr=1e-3, weight_decay=0.1, divide_by=ONE, skip=torch.zeros(()))
    for kind, tensors in {"master": straight.masters, **straight.state()}.items():
        there = again.masters if kind == "master" else again.state()[kind]
        for name, tensor in tensors.items():
            assert torch.equal(tensor, there[name]), (kind, name)


@pytest.mark.parametrize("formats", [{}, ALL], ids=str)
def test_a_rank_with_nothing_but_empty_shares(formats):
    weights = {"a": torch.zeros(0, 3, dtype=torch.bfloat16), "b": torch.zeros(0, dtype=torch.bfloat16)}
    optimizer = build_optimizer(weights, spec_of(formats), adamw="reference" if formats else "torch")
    empty = {n: torch.zeros(w.shape) for n, w in weights.items()}
    for skip in (0.0, 1.0, 0.0):
        optimizer.update(empty, lr=1.0, weight_decay=0.1, divide_by=ONE, skip=torch.tensor(skip))
    assert optimizer.updates == 2
    assert all(t.shape == weights[n].shape for kind in optimizer.state().values() for n, t in kind.items())
    optimizer.put("exp_avg", "a", torch.zeros(0, 3))
    optimizer.write_back()


def test_other_weights_than_bf16_have_no_rest():
    with pytest.raises(AssertionError, match=r"rest of bf16 weights, these are \['torch.float16'\]"):
        made({"master": "fp16"}, torch.float16)
