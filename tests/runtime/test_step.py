"""One step against the definition: the loss, its gradient by differences, clipping and the update."""

import pytest
import torch

from megaspec.data.loader import read_batch
from megaspec.data.synthetic import SyntheticSource
from megaspec.precision.scaler import build_scaler
from megaspec.runtime.build import initialise
from megaspec.runtime.step import train_step
from tests.families import GPT2
from tests.runtime import lives
from tests.runtime.specs import SGD, spec

N, VOCAB, LR = 6, 37, 0.1
PLAIN = {**SGD, "momentum": 0.0, "weight_decay": 0.0}
GPT = GPT2 | {"n_layers": 2, "d_model": 32, "n_heads": 4, "vocab_size": VOCAB}


def one_step(rank, text, *, empty=()):
    """What a step did, and what it has to have done."""
    made = lives.Spec.model_validate_json(text)
    built = lives.build_here(made, rank)
    initialise(built)
    source = SyntheticSource(made.data, split="train", seed=made.data.seed, segments=(100,))
    size = made.train.micro_batch
    batches = [read_batch(source, list(range(i, i + size)), document_mask=False) for i in range(0, N, size)]
    for i in empty:
        batches[i].mask.zero_()
    before = {n: p.detach().clone() for n, p in built.parameters.items()}
    count = sum(int(b.mask.sum()) for b in batches)
    loss = mean_loss(built, batches, count)
    numeric = directional(built, batches, before, count)
    result = train_step(
        built,
        batches,
        lr=LR,
        weight_decay=0.0,
        scaler=build_scaler(made.precision, device=built.device),
    )
    return {
        "loss": (float(result.loss), loss),
        "norm": float(result.grad_norm),
        "tokens": (int(result.tokens), count),
        "updates": {n: (p.detach() - before[n]).numpy() for n, p in built.parameters.items()},
        "numeric": numeric,
        "directions": {n: direction(n, p).numpy() for n, p in before.items()},
    }


def direction(name, tensor):
    return torch.randn(tensor.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(name)))


@torch.no_grad()
def mean_loss(built, batches, count):
    """By definition."""
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        logits = built.model(batch.tokens)[..., :VOCAB]
        each = logits.logsumexp(-1) - logits.gather(-1, batch.labels[..., None])[..., 0]
        total += each[batch.mask].sum()
    return float(total / count)


@torch.no_grad()
def directional(built, batches, before, count, h=1e-5):
    """By parameter, the derivative of the mean loss along a direction, by central differences."""
    found = {}
    for name, parameter in built.parameters.items():
        ends = []
        for sign in (1, -1):
            parameter.copy_(before[name] + sign * h * direction(name, parameter))
            ends.append(mean_loss(built, batches, count))
        parameter.copy_(before[name])
        found[name] = (ends[0] - ends[1]) / (2 * h)
    return found


CASES = {
    "whole": {"train.micro_batch": 6},
    "accumulated": {"train.micro_batch": 2},
    "tied": {"train.micro_batch": 3, "model.tied_embeddings": True},
    "gpt": {"train.micro_batch": 2, "model": GPT},
}


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_the_gradient_of_the_mean_over_valid_tokens(name, clip, pool):
    """Plain descent moves each weight by -lr · min(1, clip / norm) · gradient."""
    made = spec({**CASES[name], "train.global_batch": N, "optim": {**PLAIN, "clip": clip}})
    empty = [1] if name == "accumulated" else []
    (found,) = pool.run(one_step, made.model_dump_json(), empty=empty, ranks=1)
    assert found["loss"][0] == pytest.approx(found["loss"][1], rel=1e-14)
    assert found["tokens"][0] == found["tokens"][1]
    scale = 1.0 if clip is None else clip / found["norm"]
    assert found["norm"] > 0.1
    square = 0.0
    for parameter, update in found["updates"].items():
        gradient = -update / LR / scale
        square += float((gradient**2).sum())
        along = float((gradient * found["directions"][parameter]).sum())
        # central differences are good to h² and to eps / h
        assert along == pytest.approx(found["numeric"][parameter], rel=1e-6, abs=1e-8), parameter
    assert square**0.5 == pytest.approx(found["norm"], rel=1e-10)
