"""The order of passes through the stages of a pipeline.

gpipe: Huang et al. 2019. 1f1b: Narayanan et al. 2019. interleaved: Narayanan et al. 2021. zb_h1: Qi et al. 2024. zb_v:
Qi et al. 2024 (controllable memory). With the last two the backward pass is split: B makes the input gradient, which
the stage before waits for, W the weight gradient, which nobody waits for and which fills idle time.

Stages are numbered in the order of the model. Chunk v of pipeline rank r is stage v · pp + r; with zb_v the way back
runs the other way round, so that chunk 1 of rank r is stage 2 pp - 1 - r, and rank 0 holds the first and last stage.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice, repeat
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
    return (chunk + 1) * pp - 1 - rank if is_v and chunk % 2 else chunk * pp + rank


def rank_of_stage(shape: Shape, stage: int) -> int:
    """The pipeline rank that holds a stage."""
    chunk, place = divmod(stage, shape.pp)
    return shape.pp - 1 - place if shape.is_v and chunk % 2 else place


def needed(shape: Shape, rank: int, one: Pass) -> Message | None:
    """What a pass waits for; None for the first stage's forward, the last one's backward and weight gradients."""
    stage = stage_number(rank, one.chunk, pp=shape.pp, is_v=shape.is_v)
    has_one = {"F": stage > 0, "B": stage < shape.pp * shape.virtual - 1, "W": False}[one.kind]
    return Message(one.kind, one.micro, stage) if has_one else None


def made(shape: Shape, rank: int, one: Pass) -> Message | None:
    """What a pass makes for another stage, which may lie on the same rank."""
    stage = stage_number(rank, one.chunk, pp=shape.pp, is_v=shape.is_v) + (1 if one.kind == "F" else -1)
    is_there = one.kind != "W" and 0 <= stage < shape.pp * shape.virtual
    return Message(one.kind, one.micro, stage) if is_there else None


def source(shape: Shape, message: Message) -> int:
    """The pipeline rank that makes a message."""
    return rank_of_stage(shape, message.stage + (-1 if message.kind == "F" else 1))


def order(shape: Shape, rank: int, *, backward: bool = True) -> tuple[Pass, ...]:
    """The passes of one pipeline rank; without `backward` the forward ones alone."""
    return orders(shape, backward=backward)[rank]


@lru_cache(maxsize=32)
def orders(shape: Shape, *, backward: bool = True) -> tuple[tuple[Pass, ...], ...]:
    """Passes of each pipeline rank, in order."""
    return tuple(tuple(one for one in passes(shape, rank) if backward or one.kind == "F") for rank in range(shape.pp))


def window(schedule: str, pp: int) -> int:
    """Micro batches whose forward passes are started in one go, without a step. In a V the first rank waits for the
    last of them to come back: a tenth of the time of so many."""
    return 8 * pp if schedule == "zb_v" else pp


def passes(shape: Shape, rank: int) -> Iterator[Pass]:
    """Those of one pipeline rank, in order, made one by one."""
    return {"zb_h1": _zb_h1, "zb_v": _zb_v}.get(shape.schedule, _whole_backward)(shape, rank)


def _whole_backward(shape: Shape, rank: int) -> Iterator[Pass]:
    """Forward passes for a while, then one forward and one backward in turn, then what is left of the backward."""
    forwards = (Pass("F", m, c) for m, c in _chunk_order(shape))
    yield from forwards if shape.schedule == "gpipe" else islice(forwards, warm_up(shape, rank))
    for m, c in _chunk_order(shape):
        yield from islice(forwards, 1)
        yield Pass("B", m, shape.virtual - 1 - c)


def warm_up(shape: Shape, rank: int) -> int:
    """Forward passes before the first backward follows one."""
    after = shape.pp - 1 - rank
    return after if shape.schedule == "1f1b" else 2 * after + (shape.virtual - 1) * shape.group


def _chunk_order(shape: Shape) -> Iterator[tuple[int, int]]:
    """(micro batch, chunk) of the forward passes: a group of micro batches through each chunk in turn."""
    group = shape.group if shape.schedule == "interleaved" else shape.micro_batches
    return (
        (micro, chunk)
        for start in range(0, shape.micro_batches, group)
        for chunk in range(shape.virtual)
        for micro in range(start, min(start + group, shape.micro_batches))
    )


def _zb_h1(shape: Shape, rank: int) -> Iterator[Pass]:
    """1f1b, with the weight gradient `rank` micro batches late: so many fill what 1f1b waits at the end."""
    ahead = min(shape.pp - 1 - rank, shape.micro_batches)
    yield from (Pass("F", m, 0) for m in range(ahead))
    for m in range(shape.micro_batches):
        if m + ahead < shape.micro_batches:
            yield Pass("F", m + ahead, 0)
        yield Pass("B", m, 0)
        if m >= rank:
            yield Pass("W", m - rank, 0)
    yield from (Pass("W", m, 0) for m in range(max(0, shape.micro_batches - rank), shape.micro_batches))


def _zb_v(shape: Shape, rank: int) -> Iterator[Pass]:
    """Chunk 0 until the first micro batch is back, both chunks in turn until pp micro batches are held, then F, B and W
    of each. A step of fewer than 2 pp - 1 micro batches leaves out those that it has not."""
    pp, n = shape.pp, max(shape.micro_batches, 2 * shape.pp - 1)
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
    count: dict[str, int] = {}
    for words, times in phases:
        for word in chain.from_iterable(repeat(words.split(), times)):
            number = count[word] = count.get(word, -1) + 1
            if number < shape.micro_batches:
                yield Pass(word[0], number, int(word[1]))
