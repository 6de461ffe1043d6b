"""Muon against its formula, matrix by matrix, written out with numpy in fp64."""

import json

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

from megaspec.core.layout import whole
from megaspec.nn.embedding.module import Embedding
from megaspec.nn.linear import Linear
from megaspec.nn.model_facts import consecutive
from megaspec.nn.moe.module import GroupedLinear
from megaspec.nn.moe.router import Router
from megaspec.nn.moe.spec import MoeSpec
from megaspec.nn.norm.module import RmsNorm
from megaspec.nn.norm.spec import RmsNormSpec
from megaspec.optim.newton_schulz import COEFFICIENTS, orthogonalised, orthogonalised_all, working_dtype
from megaspec.optim.optimizer import build_optimizer
from megaspec.optim.spec import OptimSpec
from megaspec.parallelism.whole_matrices import WholeMatrices
from megaspec_kernels.registry import REGISTRY
from tests.plan.plans import LLAMA, MOE, plan

MUON = {"kind": "muon", "lr": 1.0, "momentum": 0.9, "beta1": 0.8, "beta2": 0.9, "eps": 1e-3}


class Model(nn.Module):
    """Something of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embedding(11, 6)
        self.norm = RmsNorm(6, RmsNormSpec())
        self.wqkv = Linear(6, 8, 4, 4, bias=True)
        # two experts with two outputs of three rows each
        self.experts = GroupedLinear(2, 5, 3, 3, kernel=REGISTRY["grouped"]["reference"])
        self.router = Router(6, MoeSpec(n_experts=4, top_k=1, d_expert=4), site="router")
        self.w_down = Linear(9, 6)


def filled(dtype=torch.float64):
    torch.manual_seed(3)
    return {n: torch.randn(p.shape, dtype=torch.float64).to(dtype) for n, p in Model().named_parameters()}


def gradients(step):
    generator = torch.Generator().manual_seed(step)
    shapes = {n: p.shape for n, p in Model().named_parameters()}
    return {n: torch.randn(s, dtype=torch.float64, generator=generator) for n, s in shapes.items()}


def local_matrices(weights):
    layouts = {name: whole(name, tuple(weight.shape)) for name, weight in weights.items()}
    return WholeMatrices(layouts, MATRICES, group=None, device=torch.device("cpu"))


def made(weights, **content):
    spec = TypeAdapter(OptimSpec).validate_json(json.dumps(MUON | content))
    return build_optimizer(weights, spec, adamw="torch", matrices=local_matrices(weights))


def newton_schulz(x, steps, table):
    x = x / np.sqrt((x**2).sum())
    for step in range(steps):
        a, b, c = table[min(step, len(table) - 1)]
        x = a * x + b * (x @ x.T @ x) + c * (x @ x.T @ x @ x.T @ x)
    return x


SCALES = {
    "spectral": lambda o, i: max(o, i) ** 0.5,
    "unit_rms_norm": lambda o, i: (o / i) ** 0.5,
    "shape_scaling": lambda o, i: max(1, o / i) ** 0.5,
}
MATRICES = {
    "wqkv.weight": consecutive(8, 4, 4),
    "experts.weight": consecutive(3, 3, 3, 3),
    "w_down.weight": consecutive(6),
}
ROWS = {"wqkv.weight": [0, 8, 12, 16], "experts.weight": [0, 3, 6, 9, 12], "w_down.weight": [0, 6]}


def by_formula(weights, steps, *, nesterov, ns_steps, table, scale, extra):
    """steps: (gradients, lr, weight decay) of each update."""
    weights = {n: w.copy() for n, w in weights.items()}
    first, second = ({n: np.zeros_like(w) for n, w in weights.items()} for _ in range(2))
    for t, (grads, lr, decay) in enumerate(steps, start=1):
        for name, weight in weights.items():
            grad = grads[name]
            if name in ROWS:
                first[name] = 0.9 * first[name] + 0.1 * grad
                direction = 0.9 * first[name] + 0.1 * grad if nesterov else first[name]
                update = np.zeros_like(weight)
                for begin, end in zip(ROWS[name], ROWS[name][1:], strict=False):
                    shape = (end - begin, weight.shape[1])
                    part = newton_schulz(direction[begin:end], ns_steps, table)
                    update[begin:end] = extra * SCALES[scale](*shape) * part
            else:
                first[name] = 0.8 * first[name] + 0.2 * grad
                second[name] = 0.9 * second[name] + 0.1 * grad**2
                update = first[name] / (1 - 0.8**t) / (np.sqrt(second[name] / (1 - 0.9**t)) + 1e-3)
            rate = decay if weight.ndim == 2 else 0.0
            weights[name] = weight - lr * (update + rate * weight)
    return weights, first, second


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    ("scale", "coefficients", "ns_steps", "extra"),
    [("spectral", "quintic", 5, 0.2), ("unit_rms_norm", "simple", 3, 1.0), ("shape_scaling", "quintic", 7, 0.7)],
)
def test_updates(nesterov, scale, coefficients, ns_steps, extra):
    weights = filled()
    before = {n: w.numpy().copy() for n, w in weights.items()}
    kind = {"nesterov": nesterov, "scale": scale, "ns_steps": ns_steps, "extra_scale": extra}
    optimizer = made(weights, coefficients=coefficients, **kind)
    steps = []
    for step in range(5):
        lr, decay, divisor = 0.1 / (step + 1), 0.05 * step, 2.0**step
        grads = gradients(step)
        steps.append(({n: g.numpy() / divisor for n, g in grads.items()}, lr, decay))
        divide_by = torch.tensor(divisor, dtype=torch.float64)
        optimizer.update(grads, lr=lr, weight_decay=decay, divide_by=divide_by, skip=torch.zeros(()))
    table = COEFFICIENTS[coefficients]
    expected, first, second = by_formula(
        before, steps, nesterov=nesterov, ns_steps=ns_steps, table=table, scale=scale, extra=extra
    )
    assert optimizer.updates == 5
    assert set(optimizer.state()["momentum"]) == set(ROWS)
    assert optimizer.state().keys() == {"momentum", "exp_avg", "exp_avg_sq"}
    assert list(optimizer.masters) == list(weights)
    kinds = {"momentum": first, "exp_avg": first, "exp_avg_sq": second}
    for name, weight in weights.items():
        np.testing.assert_allclose(weight.numpy(), expected[name], rtol=1e-12, atol=1e-13)
    for kind, tensors in optimizer.state().items():
        for name, tensor in tensors.items():
            np.testing.assert_allclose(tensor.numpy(), kinds[kind][name], rtol=1e-12, atol=1e-15)


def test_the_hidden_matrices_of_a_model():
    assert {name: [m.first for m in held] + [held[-1].last] for name, held in MATRICES.items()} == ROWS
    facts = plan(LLAMA | {"n_layers": 2, "moe": MOE | {"first_dense": 1}}).model.facts
    sizes = {name: [m.last - m.first for m in held] for name, held in facts.matrices().items()}
    # neither the embedding, nor the output head, nor the router
    assert sizes == {
        "layers.0.attn.wqkv.weight": [32, 16, 16],
        "layers.0.attn.wo.weight": [32],
        "layers.0.mlp.w_gate_up.weight": [48, 48],
        "layers.0.mlp.w_down.weight": [32],
        "layers.1.attn.wqkv.weight": [32, 16, 16],
        "layers.1.attn.wo.weight": [32],
        "layers.1.moe.experts.w_gate_up.weight": [16, 16] * 8,
        "layers.1.moe.experts.w_down.weight": [32] * 8,
        "layers.1.moe.shared.w_gate_up.weight": [12, 12],
        "layers.1.moe.shared.w_down.weight": [32],
        "layers.1.moe.shared_gate.weight": [1],
    }


@pytest.mark.parametrize(("coefficients", "low", "high"), [("simple", 0.67, 1.21), ("quintic", 0.85, 1.15)])
@pytest.mark.parametrize("shape", [(40, 100), (100, 40), (64, 64), (1, 9), (9, 1)])
def test_singular_values_come_to_about_one(coefficients, low, high, shape):
    torch.manual_seed(0)
    rank = min(shape)
    u, _, v = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    # from 1 down to a fiftieth of it, which five iterations still reach
    given = u @ torch.diag(torch.logspace(0, -1.7, rank, dtype=torch.float64)) @ v
    found = orthogonalised(given[None], steps=5, coefficients=coefficients)[0]
    values = torch.linalg.svdvals(found)
    assert low <= values.min(), values
    assert values.max() <= high, values
    # the same singular vectors
    turned = u.mT @ found @ v.mT
    assert (turned - torch.diag(torch.diagonal(turned))).abs().max() < 1e-9


def test_together_or_alone_and_zero():
    torch.manual_seed(0)
    given = [torch.randn(s, dtype=torch.float64) for s in [(4, 6), (6, 4), (4, 6), (3, 3)]] + [
        torch.zeros(4, 6).double()
    ]
    together = orthogonalised_all(given, steps=5, coefficients="quintic")
    for one, result in zip(given, together, strict=True):
        alone = orthogonalised(one[None], steps=5, coefficients="quintic")[0]
        torch.testing.assert_close(result, alone, rtol=1e-13, atol=1e-14)
    assert torch.equal(together[-1], given[-1])


def test_what_is_worked_in():
    assert [working_dtype(torch.zeros(1, dtype=d)) for d in (torch.float64, torch.float32)] == [
        torch.float64,
        torch.float32,
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_skipped_update_changes_no_byte(dtype):
    weights = filled(dtype)
    optimizer = made(weights)
    wide = torch.promote_types(dtype, torch.float32)

    def update(grads, skip):
        divide_by = torch.ones((), dtype=wide)
        optimizer.update(grads, lr=0.1, weight_decay=0.1, divide_by=divide_by, skip=torch.tensor(float(skip)))

    def everything():
        tensors = [*weights.values(), *optimizer.masters.values()]
        tensors += [t for kind in optimizer.state().values() for t in kind.values()]
        return [t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors]

    update({n: g.to(wide) for n, g in gradients(1).items()}, 0)
    before = everything()
    poisoned = {n: g.to(wide) for n, g in gradients(2).items()}
    for grad in poisoned.values():
        grad.view(-1)[0] = float("nan")
    update(poisoned, 1)
    assert everything() == before
    assert optimizer.updates == 1
    update({n: g.to(wide) for n, g in gradients(2).items()}, 0)
    assert everything() != before
    for name, weight in weights.items():
        assert torch.equal(weight, optimizer.masters[name].to(dtype))


def test_state_that_was_read_goes_on_as_if_it_had_not_stopped():
    ends = []
    for stop in (None, 2):
        weights = filled()
        optimizer = made(weights)
        for step in range(4):
            if step == stop:
                old, weights = optimizer, {n: torch.zeros_like(w) for n, w in weights.items()}
                optimizer = made(weights)
                for kind, tensors in {"master": old.masters, **old.state()}.items():
                    for name, tensor in tensors.items():
                        optimizer.put(kind, name, tensor)
                optimizer.updates = old.updates
                optimizer.write_back()
            one = torch.ones((), dtype=torch.float64)
            optimizer.update(gradients(step), lr=0.1, weight_decay=0.1, divide_by=one, skip=torch.zeros(()))
        ends.append([w.numpy().tobytes() for w in weights.values()])
    assert ends[0] == ends[1]


@pytest.mark.gpu
def test_on_a_gpu():
    """In bf16: within the rounding of bf16 of what fp64 gives, over matrices of the sizes of a model."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(0)
    for shape in [(1, 512, 512), (3, 1024, 4096), (2, 4096, 1024)]:
        given = torch.randn(shape, device="cuda")
        truth = orthogonalised(given.double(), steps=5, coefficients="quintic")
        assert working_dtype(given) == torch.bfloat16
        found = orthogonalised(given.to(torch.bfloat16), steps=5, coefficients="quintic")
        assert torch.linalg.matrix_norm(found.double(), 2).max() < 1.4
        cosine = (found.double() * truth).sum() / found.double().norm() / truth.norm()
        assert cosine > 0.99
