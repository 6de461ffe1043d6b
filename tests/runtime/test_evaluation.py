"""Evaluation and the batch over the steps: the same on every layout, and what the definition says."""

from fractions import Fraction

import pytest
import torch

from megaspec.data.loader import open_source
from megaspec.runtime import evaluation, loop
from megaspec.runtime.build import initialise
from megaspec.runtime.step import evaluate
from tests.runtime import lives
from tests.runtime.specs import spec

LAYOUTS = {
    "tp2": {"parallelism.tp": 2},
    "dp2": {"parallelism.dp_replicate": 2},
    "dp2, a sequence at a time": {"parallelism.dp_replicate": 2, "train.micro_batch": 1},
    "one, three at a time": {"train.micro_batch": 3, "train.global_batch": 3},
}


def by_definition(rank, text):
    """The mean over the valid tokens of the first `eval_samples` validation sequences, one at a time."""
    made = lives.Spec.model_validate_json(text)
    built = lives.build_here(made, rank)
    initialise(built)
    source = open_source(made.data, split="valid", seed=made.data.seed, segments=made.segments, vocab_size=37)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for i in range(made.train.eval_samples):
        sample = source.read(i)
        tokens, mask = torch.from_numpy(sample.tokens), torch.from_numpy(sample.mask)
        with torch.no_grad():
            logits = built.model(tokens[None, :-1])[0, :, :37]
        losses = logits.logsumexp(-1) - logits.gather(-1, tokens[1:, None])[:, 0]
        total += losses[mask].sum()
        count += int(mask.sum())
    return float(total / count)


def evaluated(rank, text):
    made = lives.Spec.model_validate_json(text)
    built = lives.build_here(made, rank)
    initialise(built)
    return float(evaluate(built, lives.eval_batches_of(made, rank)))


@pytest.mark.parametrize("samples", [1, 4, 7])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_the_mean_over_tokens(layout, samples, pool):
    one = spec({"train.eval_samples": samples})
    made = spec({"train.eval_samples": samples, **LAYOUTS[layout]})
    truth = pool.run(by_definition, one.model_dump_json(), ranks=1)[0]
    for loss in pool.run(evaluated, made.model_dump_json(), ranks=made.world_size):
        assert loss == pytest.approx(truth, rel=1e-12, abs=0)


def splits_opened(rank, text, folder):
    """Which splits a whole run opens, in order."""
    opened = []

    def note(data_spec, *, split, **more):
        opened.append(split)
        return open_source(data_spec, split=split, **more)

    loop.open_source = note
    evaluation.open_source = note
    try:
        lives.live(rank, text, folder)
    finally:
        loop.open_source = open_source
        evaluation.open_source = open_source
    return opened


def test_the_validation_data_are_opened_and_checked_once(pool, tmp_path):
    made = spec({"train.steps": 6, "train.eval_every": 2, "train.eval_samples": 2})
    assert pool.run(splits_opened, made.model_dump_json(), str(tmp_path), ranks=1) == [["train", "valid"]]


def test_a_document_mask_changes_the_evaluation(pool):
    made = [spec({"train.eval_samples": 6, "data.document_mask": mask, "data.seq_len": 64}) for mask in (False, True)]
    plain, masked = (pool.run(evaluated, one.model_dump_json(), ranks=1)[0] for one in made)
    assert plain != masked


@pytest.mark.parametrize("layout", [{"parallelism.tp": 2}, {"parallelism.dp_replicate": 2}])
def test_the_batch_of_each_step_follows_the_ramp(layout, tmp_path, pool):
    start, increment, full, samples = 2, 4, 14, 50
    ramp = {"train.batch_ramp": {"start": start, "increment": increment, "samples": samples}}
    made = spec({**layout, **ramp, "train.global_batch": full, "train.steps": 16})
    events = pool.run(lives.live, made.model_dump_json(), str(tmp_path), ranks=2)[0]
    taken, expected = 0, []
    for _ in range(16):
        # the share of the ramp that lies behind decides how many increments were made
        done = Fraction(taken, samples) * ((full - start) // increment)
        batch = min(full, start + increment * int(done))
        expected.append((taken, taken + batch, batch * 16))
        taken += batch
    assert [(e["first_sample"], e["samples"], e["sequence_tokens"]) for e in events] == expected
    assert len({batch for *_, batch in expected}) == 4
