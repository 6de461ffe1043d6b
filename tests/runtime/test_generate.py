"""Texts that several ranks write, many at a time, are what one rank writes of each alone."""

from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch

from megaspec.core.errors import DataError, NonFiniteError, Preempted, UsageError
from megaspec.data.loader import read_batch
from megaspec.data.synthetic import SyntheticSource
from megaspec.data.tokenizer import ByteTokenizer
from megaspec.nn.attention.spec import GroupedQuerySpec
from megaspec.nn.layer.module import Layer
from megaspec.precision.scaler import build_scaler
from megaspec.rules.examples import H200
from megaspec.rules.kernel_use import use_of
from megaspec.runtime.build import initialise
from megaspec.runtime.draw import Draw, Sampling
from megaspec.runtime.generate import (
    Limits,
    Prompt,
    Written,
    for_one_device,
    generate,
    longest_text,
    why_uncached,
    write_sample,
)
from megaspec.runtime.step import evaluate, train_step
from megaspec.runtime.text_passes import ModelOnRanks, cached_passes, whole_passes
from megaspec.spec import Spec
from megaspec.train.spec import SampleSpec
from megaspec_kernels.catalog import CATALOG, unmet
from tests.runtime import lives
from tests.runtime.specs import spec

TOLERANCE = 1e-12
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [5], [35, 8, 9, 7], [9, 3], [2, 3, 8, 4, 6, 2])
SAMPLING = Sampling(temperature=1.3, top_k=20, top_p=0.95, seed=7)
LIMITS = Limits(tokens=9, max_seq_len=16, ends=frozenset({11}))
MOE = {
    "n_experts": 4,
    "top_k": 2,
    "d_expert": 12,
    "d_shared": 8,
    "capacity_factor": 0.5,
    "pad_to_capacity": True,
    "router": {"score": "sigmoid", "expert_bias": True, "bias_rate": 1e-3},
}
MODELS: dict[str, dict[str, Any]] = {
    "windows": {
        "model.init_std": 0.3,
        "model.n_layers": 4,
        "model.layer_types": {"local": {"mask": {"kind": "window", "size": 4}}, "full": {}},
        "model.layer_pattern": ["local", "full"],
        "model.attention": {"kind": "gqa", "qk_norm": "whole", "sinks": True},
    },
    "experts": {"model.init_std": 0.3, "model.moe": MOE},
    "learned positions": {"model.init_std": 0.3, "model.positions": {"kind": "learned"}, "model.tied_embeddings": True},
    "longrope": {
        "model.init_std": 0.3,
        "model.positions": {
            "kind": "rotary",
            "scaling": {
                "kind": "longrope",
                "short_factor": [1.0, 1.2, 1.5, 2.0],
                "long_factor": [2.0, 3.0, 4.0, 5.0],
                "original_max_seq_len": 8,
                "factor": 2.0,
            },
        },
    },
}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2": ("windows", {"parallelism.tp": 2, "parallelism.sequence_parallel": False}),
    "tp2, tokens split": ("windows", {"parallelism.tp": 2, "parallelism.sequence_parallel": True}),
    "tp2, learned": ("learned positions", {"parallelism.tp": 2, "parallelism.sequence_parallel": True}),
    "dp2": ("longrope", {"parallelism.dp_replicate": 2}),
    "fsdp": ("windows", {"parallelism.dp_strategy": "fsdp", "parallelism.dp_shard": 2}),
    "pp2": ("learned positions", {"parallelism.pp": 2, "parallelism.pipeline": {"schedule": "1f1b"}}),
    "pp2, interleaved": (
        "windows",
        {"parallelism.pp": 2, "parallelism.pipeline": {"schedule": "interleaved", "virtual_stages": 2}},
    ),
    "pp2, zb_v": ("windows", {"parallelism.pp": 2, "parallelism.pipeline": {"schedule": "zb_v", "virtual_stages": 2}}),
    "ep2": ("experts", {"parallelism.dp_replicate": 2, "parallelism.ep": 2}),
    "ep2, all_gather": (
        "experts",
        {"parallelism.dp_replicate": 2, "parallelism.ep": 2, "parallelism.dispatch": "all_gather"},
    ),
    "ep2 over tp2": ("experts", {"parallelism.tp": 2, "parallelism.sequence_parallel": True, "parallelism.ep": 2}),
    "etp2 over tp2": ("experts", {"parallelism.tp": 2, "parallelism.sequence_parallel": True, "parallelism.etp": 2}),
}


class Seen(Draw):
    """Keeps the logits that tokens are drawn from, by the text's key and how long it was."""

    def __init__(self, sampling: Sampling):
        super().__init__(sampling)
        self.logits: dict[tuple[int, int], list[float]] = {}

    def __call__(self, logits_nV: torch.Tensor, keys: Sequence[int], counters: Sequence[int]) -> list[int]:
        for logits_V, key, counter in zip(logits_nV, keys, counters, strict=True):
            self.logits[key, counter] = logits_V.tolist()
        return super().__call__(logits_nV, keys, counters)


def written_on(
    rank: int, text: str, prompts: Sequence[Sequence[int]], rows: int, cache: bool
) -> tuple[list[tuple[tuple[int, ...], str]], dict[tuple[int, int], list[float]]]:
    """-> tokens and ends of the texts, and the logits that this rank drew from"""
    made = Spec.model_validate_json(text)
    built = lives.build_here(made, rank)
    initialise(built)
    for chunk in built.chunks:
        chunk.eval()
    model = ModelOnRanks.of_run(built)
    seen = Seen(SAMPLING)
    asked = [Prompt(ids) for ids in prompts]
    how = whole_passes(model, seen)
    if cache:
        how = cached_passes(model, seen, rows=rows, length=longest_text(asked, LIMITS))
    with how as passes:
        written = generate(passes, asked, tokenizer=ByteTokenizer(), limits=LIMITS, rows=rows, seed=SAMPLING.seed)
    return [(one.ids, one.end) for one in written], seen.logits


def made_of(model: str, layout: dict[str, Any]) -> Spec:
    return spec({**MODELS[model], "model.max_seq_len": 16, **layout})


@pytest.fixture(scope="module")
def alone(pool: Any) -> Any:
    """What one rank writes of each prompt alone, by whole forward passes."""
    kept: dict[str, Any] = {}

    def of(model: str) -> Any:
        if model not in kept:
            written = []
            logits: dict[tuple[int, int], list[float]] = {}
            for prompt in PROMPTS:
                ((texts, seen),) = pool.run(
                    written_on, made_of(model, {}).model_dump_json(), [prompt], 1, False, ranks=1
                )
                written += texts
                logits |= seen
            kept[model] = written, logits
        return kept[model]

    return of


def assert_same(found: list[Any], truth: Any) -> None:
    written, logits = truth
    seen: dict[tuple[int, int], list[float]] = {}
    for texts, here in found:
        assert texts == written
        seen |= here
    assert seen.keys() == logits.keys()
    for place, values in seen.items():
        off = (torch.tensor(values) - torch.tensor(logits[place])).abs().max()
        assert off <= TOLERANCE * torch.tensor(logits[place]).abs().max(), place


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_a_text_is_what_it_is_alone(model: str, cache: bool, rows: int, pool: Any, alone: Any) -> None:
    text = made_of(model, {}).model_dump_json()
    assert_same(pool.run(written_on, text, PROMPTS, rows, cache, ranks=1), alone(model))
    # not all end alike, and they differ
    ends = {end for _, end in alone(model)[0]}
    assert "tokens" in ends
    assert len(set(alone(model)[0])) == len(PROMPTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_write_what_one_does(layout: str, pool: Any, alone: Any) -> None:
    model, changes = LAYOUTS[layout]
    text = made_of(model, changes).model_dump_json()
    assert_same(pool.run(written_on, text, PROMPTS, 3, True, ranks=2), alone(model))


@pytest.mark.parametrize("kind", ["ring", "all_gather", "all_to_all"])
def test_ranks_that_split_texts_write_what_one_does(kind: str, pool: Any, alone: Any) -> None:
    text = made_of("windows", {"parallelism.cp": 2, "parallelism.context.kind": kind}).model_dump_json()
    assert_same(pool.run(written_on, text, PROMPTS, 3, False, ranks=2), alone("windows"))


def one_rank(changes: dict[str, Any] | None = None) -> ModelOnRanks:
    built = lives.build_here(made_of("windows", changes or {}), 0)
    initialise(built)
    return ModelOnRanks.of_run(built)


def write(model: ModelOnRanks, prompts: Sequence[Prompt], limits: Limits, *, seed: int = 7) -> list[Written]:
    draw = Draw(Sampling(temperature=1.3, seed=seed))
    with cached_passes(model, draw, rows=2, length=longest_text(prompts, limits)) as passes:
        return generate(passes, prompts, tokenizer=ByteTokenizer(), limits=limits, rows=2, seed=seed)


def test_draws_follow_from_seed_prompt_and_sample() -> None:
    model = one_rank()
    limits = Limits(tokens=8, max_seq_len=16)
    prompts = [Prompt([1, 2, 3]), Prompt([1, 2, 3]), Prompt([1, 2, 3], sample=1), Prompt([1, 2, 4])]
    one, again, sample, other = write(model, prompts, limits)
    assert one.ids == again.ids
    assert len({one.ids, sample.ids, other.ids}) == 3
    assert write(model, prompts[2:3], limits)[0].ids == sample.ids
    assert write(model, prompts[:1], limits, seed=8)[0].ids != one.ids


def test_what_ends_a_text() -> None:
    model = one_rank()
    prompts = [Prompt([1, 2, 3])]
    (whole,) = write(model, prompts, Limits(tokens=8, max_seq_len=16))
    assert (whole.end, len(whole.ids)) == ("tokens", 8)
    (cut,) = write(model, prompts, Limits(tokens=80, max_seq_len=16))
    assert (cut.end, len(cut.ids)) == ("max_seq_len", 13)
    assert cut.ids[:8] == whole.ids
    end = whole.ids[4]
    first = whole.ids.index(end)
    (ended,) = write(model, prompts, Limits(tokens=8, max_seq_len=16, ends=frozenset({end, 36})))
    assert (ended.end, ended.ids) == ("end_of_text", whole.ids[:first])
    stop = whole.text[2:4]
    (stopped,) = write(model, prompts, Limits(tokens=8, max_seq_len=16, stops=("none", stop)))
    assert (stopped.end, stopped.text) == ("stop", whole.text[: whole.text.index(stop)])
    (nothing,) = write(model, prompts, Limits(tokens=0, max_seq_len=16))
    assert (nothing.end, nothing.ids, nothing.text) == ("tokens", (), "")


def test_texts_are_told_in_the_order_of_prompts_and_as_they_grow() -> None:
    model = one_rank()
    prompts = [Prompt(list(range(1, 5 + n))) for n in range(5)]
    limits = Limits(tokens=30, max_seq_len=16)
    pieces: dict[int, str] = {}
    done: list[Written] = []
    draw = Draw(Sampling(seed=3))

    def grow(number: int, piece: str) -> None:
        pieces[number] = pieces.get(number, "") + piece

    with cached_passes(model, draw, rows=3, length=16) as passes:
        generate(
            passes,
            prompts,
            tokenizer=ByteTokenizer(),
            limits=limits,
            rows=3,
            seed=3,
            on_piece=grow,
            on_done=done.append,
        )
    assert [one.number for one in done] == [0, 1, 2, 3, 4]
    assert {one.number: one.text for one in done} == pieces


def test_a_long_prompt_is_refused() -> None:
    model = one_rank()
    limits = Limits(tokens=1, max_seq_len=16)
    assert len(write(model, [Prompt(list(range(15)))], limits)[0].ids) == 1
    with pytest.raises(DataError, match=r"prompt 2 has 16 tokens.*model\.max_seq_len=16"):
        write(model, [Prompt([1]), Prompt(list(range(16)))], limits)


def test_logits_that_are_no_numbers_are_told() -> None:
    model = one_rank()
    with torch.no_grad():
        model.chunks[0].norm.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="NaN or infinities"):
        write(model, [Prompt([1])], Limits(tokens=1, max_seq_len=16))


def test_a_request_to_stop_ends_the_writing() -> None:
    model = one_rank()
    limits = Limits(tokens=8, max_seq_len=16)
    with (
        cached_passes(model, Draw(Sampling()), rows=1, length=9, stops=lambda: True) as passes,
        pytest.raises(Preempted, match="stopped while texts were written"),
    ):
        generate(passes, [Prompt([1])], tokenizer=ByteTokenizer(), limits=limits, rows=1, seed=0)


class _OtherLayer(Layer):
    """Of a plug-in, say."""


def test_a_part_of_a_plug_in_keeps_nothing_and_says_so() -> None:
    model = one_rank()
    layer = model.chunks[0].layers["1"]
    layer.__class__ = _OtherLayer
    with pytest.raises(UsageError, match=r"layers\.1 is a _OtherLayer, which keeps no keys and values"):
        write(model, [Prompt([1])], Limits(tokens=1, max_seq_len=16))
    with whole_passes(model, Draw(Sampling())) as passes:
        limits = Limits(tokens=3, max_seq_len=16)
        assert generate(passes, [Prompt([1])], tokenizer=ByteTokenizer(), limits=limits, rows=1, seed=0)


def test_capacity_is_as_it_was_when_texts_are_written() -> None:
    """Experts take every token of a text; a run that writes one goes on with the capacity that it has."""
    built = lives.build_here(made_of("experts", {}), 0)
    initialise(built)
    model = ModelOnRanks.of_run(built)
    before = [(type(module), getattr(module, "pad", None)) for module in built.model.modules()]
    write(model, [Prompt([1, 2])], Limits(tokens=3, max_seq_len=16))
    assert [(type(module), getattr(module, "pad", None)) for module in built.model.modules()] == before
    assert built.model.layers["0"].moe.router.moe.capacity_factor == 0.5


def sampled_on(rank: int, text: str) -> str:
    """What a run writes at its end."""
    made = Spec.model_validate_json(text)
    built = lives.build_here(made, rank)
    initialise(built)
    sample = SampleSpec(prompt="!", tokens=9, temperature=1.5, top_k=15, top_p=0.9, min_p=0.01, stop=("zz",))
    return write_sample(ModelOnRanks.of_run(built), sample, ByteTokenizer())


def test_a_run_writes_its_sample_on_any_layout(pool: Any) -> None:
    layouts: dict[str, dict[str, Any]] = {
        "one": {},
        "cp2": {"parallelism.cp": 2},
        "tp2": {"parallelism.tp": 2, "parallelism.sequence_parallel": True},
        "fsdp": {"parallelism.dp_strategy": "fsdp", "parallelism.dp_shard": 2},
    }
    texts = set()
    for changes in layouts.values():
        made = made_of("windows", changes)
        texts |= set(pool.run(sampled_on, made.model_dump_json(), ranks=made.world_size))
    assert len(texts) == 1
    assert len(texts.pop()) == 9


def logits_behind_steps(rank: int, text: str, evaluates: bool) -> dict[tuple[int, int], list[float]]:
    """What texts are drawn from after two steps, in which numbers grow, and an evaluation or none."""
    made = Spec.model_validate_json(text)
    built = lives.build_here(made, rank)
    initialise(built)
    source = SyntheticSource(made.data, split="train", seed=made.data.seed, segments=made.segments)
    batch = read_batch(source, list(range(made.train.micro_batch)), document_mask=False)
    scaler = build_scaler(made.precision, device=built.device)
    for _ in range(2):
        train_step(built, [batch], lr=0.1, weight_decay=0.0, scaler=scaler)
    if evaluates:
        evaluate(built, [batch])
    seen = Seen(SAMPLING)
    prompts = [Prompt(ids) for ids in PROMPTS]
    with cached_passes(ModelOnRanks.of_run(built), seen, rows=2, length=longest_text(prompts, LIMITS)) as passes:
        generate(passes, prompts, tokenizer=ByteTokenizer(), limits=LIMITS, rows=2, seed=SAMPLING.seed)
    return seen.logits


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_text_behind_a_step_is_the_same_whether_the_step_was_evaluated(recipe: str, pool: Any) -> None:
    """Delayed scales are those of the next step in both cases."""
    precision = {"kind": "fp8", "recipe": recipe, "outside": "fp64", "first_layers_bf16": 0, "last_layers_bf16": 0}
    changes = {"model.d_head": 16, "model.d_ffn": 64, "precision": precision}
    text = spec({**changes, "model.max_seq_len": 16}).model_dump_json()
    (plain,) = pool.run(logits_behind_steps, text, False, ranks=1)
    (evaluated,) = pool.run(logits_behind_steps, text, True, ranks=1)
    assert plain == evaluated


class _OtherAttention(GroupedQuerySpec):
    """Of a plug-in."""

    kind: Literal["other"] = "other"


def test_why_texts_need_whole_passes() -> None:
    made = made_of("windows", {})
    assert why_uncached(made) is None
    split = made_of("windows", {"parallelism.cp": 2})
    assert why_uncached(split).startswith("parallelism.cp=2 divides each text among ranks")
    other = made.model_copy(update={"model": made.model.model_copy(update={"attention": _OtherAttention()})})
    assert why_uncached(other).startswith("model.attention.kind=other is of a plug-in")


@pytest.mark.parametrize("name", ["windows", "experts"])
def test_a_model_of_gpus_computes_on_a_cpu(name: str) -> None:
    """hf verify runs it there: no kernel is left that a CPU can't run."""
    changes = MODELS[name] | {"precision": {"kind": "bf16"}, "model.d_head": 64}
    of_gpus = spec(changes, H200.model_copy(update={"gpus": 1}))
    assert of_gpus.kernels.unpermute == "triton"
    here = for_one_device(of_gpus, cuda=False)
    for operation in CATALOG:
        name = getattr(here.kernels, operation)
        assert unmet(operation, name, device="cpu", sm=0, use=use_of(here)) is None, f"{operation}={name}"
