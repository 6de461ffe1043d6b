"""Texts from a model, one token of each at a time."""

import json
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from megaspec.core.errors import DataError
from megaspec.data.provenance import tokenizer_of_data
from megaspec.data.spec import IndexedSpec, StreamSpec
from megaspec.data.stream_files import stream_tokenizer
from megaspec.data.tokenizer import Tokenizer, load_tokenizer
from megaspec.hf.companions import FOLDER, TOKENIZER, kept_companions
from megaspec.model.builders import MODELS
from megaspec.model.part_builders import PARTS
from megaspec.rules.kernel_use import use_of
from megaspec.runtime.draw import Draw, Sampling, text_key
from megaspec.runtime.plugins import loaded_builders
from megaspec.runtime.text_passes import GrowingText, ModelOnRanks, Passes, cached_passes, whole_passes
from megaspec.runtime.text_stream import TextStream
from megaspec.spec import Spec
from megaspec.train.spec import SampleSpec
from megaspec_kernels.catalog import CATALOG, choose

End = Literal["end_of_text", "stop", "tokens", "max_seq_len"]
"""Why a text ends: a token that ends texts, one of the texts that were named, as many tokens as were asked for, or as
many as the model can see."""


@dataclass(frozen=True)
class Prompt:
    """What to go on from."""

    ids: Sequence[int]
    sample: int = 0
    """Texts of the same prompt differ by it."""


@dataclass(frozen=True)
class Limits:
    """What ends a text."""

    tokens: int
    """At most so many are written."""
    max_seq_len: int
    """Tokens of the longest text, its prompt included."""
    ends: frozenset[int] = frozenset()
    """Tokens that end a text, and are no part of it."""
    stops: tuple[str, ...] = ()
    """Texts that do the same."""


@dataclass(frozen=True)
class Written:
    """What was written from one prompt."""

    number: int
    """Of the prompt, from 0 on."""
    ids: tuple[int, ...]
    """Tokens of it, with the one that ended it where that was a stop."""
    text: str
    end: End


@dataclass
class _Writing:
    """A text under way."""

    growing: GrowingText
    n_prompt: int
    stream: TextStream

    @property
    def written(self) -> list[int]:
        return self.growing.ids[self.n_prompt :]


def keep_silent(number: int, piece: str) -> None:
    """For who takes texts when they are done."""


def generate(
    passes: Passes,
    prompts: Sequence[Prompt],
    *,
    tokenizer: Tokenizer,
    limits: Limits,
    rows: int,
    seed: int,
    on_piece: Callable[[int, str], None] = keep_silent,
    on_done: Callable[[Written], None] | None = None,
) -> list[Written]:
    """Writes a text from each prompt, `rows` of them at a time: where one ends, the next prompt takes its place. A text
    is what it is alone. All ranks call it together, with the same prompts.

    `on_piece(number, text)`: what goes on a text, as soon as it is certain. `on_done`: each text, in the order of the
    prompts. Raises what Passes does, and DataError: a prompt is too long.
    """
    refuse_long(prompts, limits)
    waiting = deque(range(len(prompts)))
    free = list(range(rows))
    writing: list[_Writing] = []
    done: dict[int, Written] = {}
    told: list[Written] = []
    while waiting or writing:
        while free and waiting:
            number = waiting.popleft()
            prompt = prompts[number]
            if limits.tokens == 0:
                done[number] = Written(number, (), "", "tokens")
                continue
            key = text_key(seed, prompt.ids, prompt.sample)
            growing = GrowingText(number, free.pop(0), list(prompt.ids), key)
            writing.append(_Writing(growing, len(prompt.ids), TextStream(tokenizer, prompt.ids, limits.stops)))
        if writing:
            tokens = passes.next_tokens([one.growing for one in writing])
            going_on = []
            for one, token in zip(writing, tokens, strict=True):
                end = _grow(one, token, limits, on_piece)
                if end is None:
                    going_on.append(one)
                    continue
                number = one.growing.number
                done[number] = Written(number, tuple(one.written), one.stream.text, end)
                free.append(one.growing.row)
            free.sort()
            writing = going_on
        while len(told) in done:
            told.append(done[len(told)])
            if on_done is not None:
                on_done(told[-1])
    return told


def _grow(one: _Writing, token: int, limits: Limits, on_piece: Callable[[int, str], None]) -> End | None:
    """Adds a token. -> why the text ends with it, or None"""
    number = one.growing.number
    end: End | None = None
    if token in limits.ends:
        end = "end_of_text"
    else:
        one.growing.ids.append(token)
        on_piece(number, one.stream.add(token))
        if one.stream.is_stopped:
            end = "stop"
        elif len(one.written) == limits.tokens:
            end = "tokens"
        elif len(one.growing.ids) == limits.max_seq_len:
            end = "max_seq_len"
    if end is not None:
        on_piece(number, one.stream.finish())
        # what waited for a character may have held a stop
        if one.stream.is_stopped:
            end = "stop"
    return end


def refuse_long(prompts: Sequence[Prompt], limits: Limits) -> None:
    """DataError: a prompt leaves no room for a token."""
    if limits.tokens == 0:
        return
    for number, prompt in enumerate(prompts, start=1):
        if len(prompt.ids) >= limits.max_seq_len:
            text = f"prompt {number} has {len(prompt.ids):,} tokens, which leaves no room"
            raise DataError(f"{text}: model.max_seq_len={limits.max_seq_len:,} is of prompt and text; shorten it")


def write_sample(model: ModelOnRanks, sample: SampleSpec, tokenizer: Tokenizer) -> str:
    """What a run's model writes, however it is divided. All ranks call it together."""
    spec = model.spec
    sampling = Sampling(sample.temperature, sample.top_k, sample.top_p, sample.min_p, seed=spec.train.seed)
    ends = frozenset() if tokenizer.eod is None else frozenset({tokenizer.eod})
    limits = Limits(sample.tokens, spec.model.max_seq_len, ends, sample.stop)
    prompt = Prompt(encode(tokenizer, sample.prompt))
    draw = Draw(sampling)
    with ExitStack() as stack:
        # what was compiled for training would be compiled again for each length
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        passes: Passes
        if why_uncached(spec) is None:
            length = longest_text([prompt], limits)
            passes = stack.enter_context(cached_passes(model, draw, rows=1, length=length))
        else:
            passes = stack.enter_context(whole_passes(model, draw))
        (written,) = generate(passes, [prompt], tokenizer=tokenizer, limits=limits, rows=1, seed=sampling.seed)
    return written.text


def why_uncached(spec: Spec) -> str | None:
    """Why texts of a run need whole forward passes, as `path=value, reason`. None: keys and values can be kept."""
    # one that our builder makes has our layers, whatever kinds of them
    if loaded_builders().models[type(spec.model)] not in MODELS.values():
        return f"model.kind={spec.model.kind} is of a plug-in: whether its layers keep keys and values is not known"
    if type(spec.model.attention) not in PARTS.attentions:
        kind = spec.model.attention.kind
        return f"model.attention.kind={kind} is of a plug-in: how it keeps keys and values is not known"
    if spec.parallelism.cp > 1:
        return f"parallelism.cp={spec.parallelism.cp} divides each text among ranks, none of which has all of its keys"
    return None


def longest_text(prompts: Sequence[Prompt], limits: Limits) -> int:
    """Tokens of the longest text that may come of prompts."""
    longest = max((len(prompt.ids) for prompt in prompts), default=0) + limits.tokens
    return max(1, min(longest, limits.max_seq_len))


def for_one_device(spec: Spec, *, cuda: bool) -> Spec:
    """The same model without parallelism, compilation or, on a CPU, low precision."""
    fields = spec.model_dump(mode="json")
    fields["parallelism"] = {
        "tp": 1,
        "dp_replicate": 1,
        "dp_shard": 1,
        "sequence_parallel": False,
        "pipeline": {"schedule": "1f1b", "micro_batch_group": 1},
    }
    fields["kernels"] |= {"compile": "none", "cross_entropy": "chunked"}
    fields |= {"world_size": 1, "device": "cuda"}
    if not cuda:
        fields["device"] = "cpu"
        if spec.precision.kind != "fp64":
            fields["precision"] = {"kind": "fp32"}
        # text is written without dropout
        use = replace(use_of(spec), attention_dropout=False, precision=fields["precision"]["kind"])
        for operation in CATALOG:
            fields["kernels"][operation] = choose(operation, device="cpu", sm=0, use=use)
    return Spec.model_validate_json(json.dumps(fields))


def run_tokenizer(spec: Spec, run_dir: Path) -> Tokenizer:
    """The tokenizer that made a run's data, or else the one that the weights came with that it began with.

    DataError: there is neither. CheckpointError: the run's folder has a link in its place.
    """
    data = spec.data
    if isinstance(data, IndexedSpec):
        return tokenizer_of_data(data, spec.remote)
    if isinstance(data, StreamSpec):
        return stream_tokenizer(data)
    if TOKENIZER in kept_companions(run_dir):
        return load_tokenizer(run_dir / FOLDER)
    text = f"data.kind={data.kind} has no tokenizer, and {run_dir / FOLDER} keeps none, so there is no text to write"
    raise DataError(f"{text}; use data.kind=indexed")


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of one text; at least one, the end-of-document token where the text is empty."""
    ids = [int(i) for i in tokenizer.encode_batch([text])[0]]
    if not ids and tokenizer.eod is None:
        raise DataError("the prompt is empty and the tokenizer has no end-of-document token to start from")
    return ids or [tokenizer.eod]
