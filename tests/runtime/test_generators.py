"""What is built and trained draws from no generator of the process, and leaves them as they are."""

import random
from typing import Any

import numpy as np
import torch

from megaspec.data.loader import read_batch
from megaspec.data.synthetic import SyntheticSource
from megaspec.parallelism.mesh import Mesh
from megaspec.precision.scaler import build_scaler
from megaspec.runtime.build import build, initialise
from megaspec.runtime.rank import seed_generators
from megaspec.runtime.step import train_step
from tests.runtime.specs import spec

DROPOUT = {
    "model.dropout": 0.1,
    "model.attention": {"kind": "gqa", "dropout": 0.1},
    "kernels": {"attention": "reference"},
}


def states() -> list[Any]:
    """Of python's, numpy's and torch's generator."""
    kind, keys, *places = np.random.get_state()
    return [random.getstate(), (kind, keys.tolist(), *places), torch.get_rng_state().tolist()]


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def test_building_and_training_leave_the_generators_of_the_process_alone() -> None:
    made = spec(DROPOUT)
    losses = []
    for seed in (5, 6):
        seed_all(seed)
        before = states()
        built = build(made, mesh=Mesh({}, rank=0, device=torch.device("cpu")))
        assert states() == before
        initialise(built)
        source = SyntheticSource(made.data, split="train", seed=made.data.seed, segments=(100,))
        batch = read_batch(source, [0, 1, 2, 3], document_mask=False)
        scaler = build_scaler(made.precision, device=built.device)
        result = train_step(built, [batch], lr=0.1, weight_decay=0.0, scaler=scaler)
        assert states() == before
        losses.append(result.loss.item())
    assert losses[0] == losses[1]


def test_a_rank_of_a_launched_run_seeds_its_own() -> None:
    """What a plugin draws is the same in every start."""
    found = []
    for seed in (5, 6):
        seed_all(seed)
        seed_generators(1234)
        found.append((random.random(), torch.rand(3).tolist()))
    assert found[0] == found[1]
