"""What waits in the CPU's memory comes back the same to the bit, and is not on the device meanwhile."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megaspec.parallelism import offload
from megaspec.parallelism.offload import Offload
from megaspec.parallelism.saved import SavedTensors
from megaspec.runtime.build import build_model, materialise
from megaspec.verify.parity import run_steps
from megaspec_kernels.registry import kernels_of
from tests.parallelism.kept import kept_bytes
from tests.parallelism.test_recompute import NONE, batch_of, built_of, gradients, spec_of
from tests.ranks import RankPool

RECOMPUTE = (NONE, "{kind: full}", "{kind: full, layers: 2}", "{kind: selective, parts: [norm, core_attention]}")


@pytest.fixture(autouse=True)
def everything_is_worth_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Offload.__init__, "__kwdefaults__", {"smallest": 0})


@pytest.mark.parametrize("recompute", RECOMPUTE)
# each family and each number of layers by default
@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("llama", 4),
        ("gpt", 2),
        pytest.param("llama", 2, marks=pytest.mark.slow),
        pytest.param("gpt", 4, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_the_same_to_the_bit(family: str, layers: int, recompute: str) -> None:
    words = [f"parallelism.offload.layers={layers}"]
    plain = gradients(0, spec_of(family=family))
    found = gradients(0, spec_of(*words, f"parallelism.recompute={recompute}", family=family))
    assert [name for name, value in plain.items() if value.tobytes() != found[name].tobytes()] == []


def test_every_tensor_of_an_offloaded_layer_leaves() -> None:
    """But for what its neighbours keep: its input and its result."""
    spec = spec_of("model.n_layers=2", dropout=False)
    model = build_model(spec.model, kernels_of(spec.kernels), dtype=torch.float64)
    materialise(model, device=torch.device("cpu"), dtype=torch.float64)
    for parameter in model.parameters():
        parameter.data.normal_()
    context = model.context(torch.arange(16), length=16)
    x_BTD = torch.randn(2, 16, 32, dtype=torch.float64, requires_grad=True)
    here = (x_BTD, *model.parameters(), *(x for table in context.angles for x in table))
    plain = kept_bytes(lambda: model.units[1].run(x_BTD, context), without=here)
    copies = []
    one = Offload(1, SavedTensors(), device=torch.device("cpu"))
    one.apply(model)
    host = offload.on_host

    def counted(like: Tensor) -> Tensor:
        copies.append(host(like))
        return copies[-1]

    offload.on_host = counted
    try:
        left = kept_bytes(lambda: model.units[1].run(x_BTD, context), without=here)
    finally:
        offload.on_host = host
    moved = sum(copy.nbytes for copy in copies)
    assert plain > 0
    assert moved == plain + x_BTD.nbytes
    assert left == moved, "the copies are all that is left"


def test_a_run_with_everything_away_is_the_same_run() -> None:
    def run(*words: str) -> Any:
        spec = spec_of(*words)
        return run_steps(spec, mesh=built_of(spec).mesh, batches=[batch_of()] * 3)

    plain, away = run(), run("parallelism.offload={layers: 2, optimizer: 0.6}")
    assert (plain.losses, plain.norms) == (away.losses, away.norms)
    assert all(torch.equal(value, away.weights.values[name]) for name, value in plain.weights.values.items())


def test_host_memory_is_taken_for_what_is_away_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each micro batch, nor for each step."""
    taken: list[int] = []
    host = offload.on_host

    def counted(like: Tensor) -> Tensor:
        taken.append(like.nbytes)
        return host(like)

    monkeypatch.setattr(offload, "on_host", counted)

    def run(steps: int, micro_batch: int) -> list[int]:
        taken.clear()
        spec = spec_of("parallelism.offload.layers=2", f"train.micro_batch={micro_batch}")
        run_steps(spec, mesh=built_of(spec).mesh, batches=[batch_of()] * steps)
        return list(taken)

    once = run(1, 1)
    assert once
    assert run(3, 1) == once
    assert sum(run(1, 2)) > sum(once)


@pytest.mark.parametrize("recompute", [RECOMPUTE[2], pytest.param(RECOMPUTE[3], marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "words",
    [
        ("parallelism.pp=2", "launcher.ranks=2", "parallelism.pipeline.schedule=zb_h1"),
        ("launcher.ranks=2", "parallelism.dp_strategy=fsdp", "train.micro_batch=1"),
    ],
    ids=["zero bubble", "fsdp"],
)
def test_with_weight_gradients_deferred_and_with_weights_gathered(words: tuple[str, ...], recompute: str) -> None:
    more = (f"parallelism.recompute={recompute}", "parallelism.offload.layers=2")
    with RankPool() as pool:
        specs = (spec_of(*words, *extra, dropout=False) for extra in ((), more))
        plain, away = (pool.run(gradients, spec, ranks=2)[0] for spec in specs)
    assert [name for name, value in plain.items() if value.tobytes() != away[name].tobytes()] == []
