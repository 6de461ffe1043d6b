"""Compiled blocks stay compiled, however many kinds of layers a model has."""

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters

from megaspec.data.loader import read_batch
from megaspec.data.synthetic import SyntheticSource
from megaspec.precision.scaler import build_scaler
from megaspec.runtime import build
from megaspec.runtime.build import initialise
from megaspec.runtime.state import TrainState
from megaspec.runtime.step import train_step
from tests.runtime import lives
from tests.runtime.specs import SGD, spec

# With gradients and without, these make ten graphs of one block.
WINDOWS = (2, 3, 4, 5)
KINDS = len(WINDOWS) + 1
TOKENS = 16


@pytest.fixture(autouse=True)
def graphs_as_they_are(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs are traced and run without generated code, which takes a second each. The limits of other tests' graphs
    stay as they were."""
    monkeypatch.setattr(torch._TorchCompileInductorWrapper, "__call__", lambda self, graph, inputs: graph.forward)
    # torch's own; the second one is larger and would not be met here
    limits = {"recompile_limit": 8, "accumulated_recompile_limit": 8, "fail_on_recompile_limit_hit": False}
    with dynamo_config.patch(limits):
        torch._dynamo.reset()
        counters.clear()
        yield
    torch._dynamo.reset()


def built_here() -> TrainState:
    """A model whose layers are all of different kinds, compiled block by block."""
    kinds = {f"window_{size}": {"mask": {"kind": "window", "size": size}} for size in WINDOWS}
    changes = {
        "model.n_layers": KINDS,
        "model.layer_types": {**kinds, "global": {}},
        "model.layer_pattern": [*kinds, "global"],
        "precision": {"kind": "bf16"},
        "kernels.compile": "block",
        "optim": SGD,
    }
    built = lives.build_here(spec(changes), 0)
    initialise(built)
    return built


def train_and_evaluate(built: TrainState) -> None:
    made = spec()
    source = SyntheticSource(made.data, split="train", seed=made.data.seed, segments=(100,))
    batch = read_batch(source, [0, 1], document_mask=False)
    train_step(built, [batch], lr=0.1, weight_decay=0.0, scaler=build_scaler(made.precision, device=built.device))
    with torch.no_grad():
        built.model(batch.tokens)


def test_every_kind_of_layer_is_compiled_with_gradients_and_without() -> None:
    train_and_evaluate(built_here())
    assert counters["frames"] == {"total": 2 * KINDS, "ok": 2 * KINDS}
    assert not counters["graph_break"]


def test_what_is_beyond_the_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "GRAPHS_OF_BLOCK", 8)
    with pytest.raises(FailOnRecompileLimitHit):
        train_and_evaluate(built_here())
