"""The order of passes through the stages of a pipeline.

gpipe: Huang et al. 2019. 1f1b: Narayanan et al. 2019. interleaved: Narayanan et al. 2021. zb_h1: Qi et al. 2024. zb_v:
Qi et al. 2024 (controllable memory). With the last two the backward pass is split: B makes the input gradient, which
the stage before waits for, W the weight gradient, which nobody waits for and which fills idle time.

Stages are numbered in the order of the model. Chunk v of pipeline rank r is stage v · pp + r; with zb_v the way back
runs the other way round, so that chunk 1 of rank r is stage 2 pp - 1 - r, and rank 0 holds the first and last stage.
"""

# F forward, B backward (the input gradient alone where the backward pass is split), W weight gradient

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Literal, NamedTuple

MESSAGES_KEPT = 2
"""From one rank to another, that may be on their way while the sender goes on."""
PAIR_CTAS = 4
"""SMs that a message may take from the arithmetic beside it: tests/benchmarks/README.md, "What stages wait"."""

Kind = Literal["F", "B", "W"]


class Pass(NamedTuple):
    """One micro batch through one chunk."""

    kind: Kind
    micro: int
    chunk: int


@dataclass(frozen=True)
class Shape:
    """What an order of passes depends on."""

    schedule: str
    pp: int
    micro_batches: int
    virtual: int = 1
    group: int = 1
    """Micro batches that an interleaved schedule takes through one chunk before the next."""
    first_trained: int = 0
    """The first stage that holds something to train. Those before it have no backward pass, and no gradient is sent to
    them."""

    @property
    def is_v(self) -> bool:
        return self.schedule == "zb_v"

    @property
    def splits_backward(self) -> bool:
        """B and W are passes of their own."""
        return self.schedule in ("zb_h1", "zb_v")


class Message(NamedTuple):
    """What one stage makes for the next: activations (F), or for the one before: their gradient (B)."""

    kind: Kind
    micro: int
    stage: int
    """That waits for it."""


def stage_number(rank: int, chunk: int, *, pp: int, is_v: bool) -> int:
    """The stage, in the order of the model, that is chunk `chunk` of a pipeline rank."""
    if is_v and chunk % 2:
        return (chunk + 1) * pp - 1 - rank
    return chunk * pp + rank


def rank_of_stage(shape: Shape, stage: int) -> int:
    """The pipeline rank that holds a stage."""
    chunk, offset = divmod(stage, shape.pp)
    if shape.is_v and chunk % 2:
        return shape.pp - 1 - offset
    return offset


def needed(shape: Shape, rank: int, pass_: Pass) -> Message | None:
    """What a pass waits for; None for the first stage's forward, the last one's backward and weight gradients."""
    stage = stage_number(rank, pass_.chunk, pp=shape.pp, is_v=shape.is_v)
    last_stage = shape.pp * shape.virtual - 1
    is_first_forward = pass_.kind == "F" and stage == 0
    is_last_backward = pass_.kind == "B" and stage == last_stage
    if pass_.kind == "W" or is_first_forward or is_last_backward:
        return None
    return Message(pass_.kind, pass_.micro, stage)


def made(shape: Shape, rank: int, pass_: Pass) -> Message | None:
    """What a pass makes for another stage, which may lie on the same rank."""
    if pass_.kind == "W":
        return None
    stage = stage_number(rank, pass_.chunk, pp=shape.pp, is_v=shape.is_v)
    # activations go down the model, their gradients up
    receiver = stage + 1 if pass_.kind == "F" else stage - 1
    first = 0 if pass_.kind == "F" else shape.first_trained
    if not first <= receiver < shape.pp * shape.virtual:
        return None
    return Message(pass_.kind, pass_.micro, receiver)


def source(shape: Shape, message: Message) -> int:
    """The pipeline rank that makes a message."""
    sender = message.stage - 1 if message.kind == "F" else message.stage + 1
    return rank_of_stage(shape, sender)


def order(shape: Shape, rank: int, *, backward: bool = True) -> tuple[Pass, ...]:
    """The passes of one pipeline rank; without `backward` the forward ones alone."""
    return orders(shape, backward=backward)[rank]


@lru_cache(maxsize=32)
def orders(shape: Shape, *, backward: bool = True) -> tuple[tuple[Pass, ...], ...]:
    """Passes of each pipeline rank, in order."""
    return tuple(tuple(passes(shape, rank, backward=backward)) for rank in range(shape.pp))


def runs_backward(shape: Shape, rank: int, chunk: int) -> bool:
    """Whether a chunk of a pipeline rank, or one before it in the model, holds something to train."""
    return stage_number(rank, chunk, pp=shape.pp, is_v=shape.is_v) >= shape.first_trained


def window(schedule: str, pp: int) -> int:
    """Micro batches whose forward passes are started in one go, without a step."""
    # In a V the first rank waits for the last of them to come back: with 8 pp that is a tenth of their time.
    if schedule == "zb_v":
        return 8 * pp
    return pp


def passes(shape: Shape, rank: int, *, backward: bool = True) -> Iterator[Pass]:
    """Those of one pipeline rank, in order, made one by one; without `backward` the forward ones alone."""
    for pass_ in _SCHEDULES[shape.schedule](shape, rank):
        if pass_.kind == "F" or (backward and runs_backward(shape, rank, pass_.chunk)):
            yield pass_


def _gpipe(shape: Shape, rank: int) -> Iterator[Pass]:
    """All forward passes, then all backward passes."""
    for micro, chunk in _chunk_order(shape):
        yield Pass("F", micro, chunk)
    for micro, chunk in _chunk_order(shape):
        yield Pass("B", micro, shape.virtual - 1 - chunk)


def _one_forward_one_backward(shape: Shape, rank: int) -> Iterator[Pass]:
    """Warm-up: forward passes alone. Steady state: one forward and one backward in turn. Cool-down: what is left of the
    backward passes, which take the chunks from the last to the first."""
    forwards = (Pass("F", micro, chunk) for micro, chunk in _chunk_order(shape))
    yield from islice(forwards, warm_up(shape, rank))
    for micro, chunk in _chunk_order(shape):
        # nothing in the cool-down, where the forward passes are used up
        yield from islice(forwards, 1)
        yield Pass("B", micro, shape.virtual - 1 - chunk)


def warm_up(shape: Shape, rank: int) -> int:
    """Forward passes before the first backward follows one."""
    ranks_behind = shape.pp - 1 - rank
    if shape.schedule == "1f1b":
        return ranks_behind
    return 2 * ranks_behind + (shape.virtual - 1) * shape.group


def _chunk_order(shape: Shape) -> Iterator[tuple[int, int]]:
    """(micro batch, chunk) of the forward passes: a group of micro batches through each chunk in turn."""
    # without interleaving all micro batches are one group
    group = shape.group if shape.schedule == "interleaved" else shape.micro_batches
    for start in range(0, shape.micro_batches, group):
        end = min(start + group, shape.micro_batches)
        for chunk in range(shape.virtual):
            for micro in range(start, end):
                yield micro, chunk


def _zb_h1(shape: Shape, rank: int) -> Iterator[Pass]:
    """1f1b, with the weight gradient `rank` micro batches late: so many fill what 1f1b waits at the end."""
    n = shape.micro_batches
    warm_up_passes = min(shape.pp - 1 - rank, n)
    for micro in range(warm_up_passes):
        yield Pass("F", micro, 0)
    for micro in range(n):
        if micro + warm_up_passes < n:
            yield Pass("F", micro + warm_up_passes, 0)
        yield Pass("B", micro, 0)
        if micro >= rank:
            yield Pass("W", micro - rank, 0)
    # the weight gradients that are still due
    for micro in range(max(0, n - rank), n):
        yield Pass("W", micro, 0)


def _zb_v(shape: Shape, rank: int) -> Iterator[Pass]:
    """Chunk 0 until the first micro batch is back, both chunks in turn until pp micro batches are held, then F, B and W
    of each. A step of fewer than 2 pp - 1 micro batches leaves out those that it has not."""
    pp = shape.pp
    n = max(shape.micro_batches, 2 * pp - 1)
    # (passes as kind and chunk, how often in a row)
    phases = (
        ("F0", 2 * (pp - rank) - 1),
        ("F1 F0", rank),
        ("F1 B1 W1", pp - rank),
        ("F0 B0 W0 F1 B1 W1", n - 2 * pp + 1 + rank),
        ("B0 W0 F1 B1 W1", pp - 1 - rank),
        ("B0 B1", rank),
        ("B0 W0", pp - rank),
        ("W1", rank),
        ("W0", rank),
    )
    # Each kind of each chunk takes the micro batches one after the other: the next one's number, by "F0" and so on.
    next_micro: dict[str, int] = defaultdict(int)
    for words, times in phases:
        for word in words.split() * times:
            micro = next_micro[word]
            next_micro[word] += 1
            if micro < shape.micro_batches:
                kind, chunk = word
                yield Pass(kind, micro, int(chunk))


_SCHEDULES = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _one_forward_one_backward,
    "zb_h1": _zb_h1,
    "zb_v": _zb_v,
}
