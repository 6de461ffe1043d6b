"""The next tokens of several texts from a model on its ranks: out of what is kept of each text, or by whole forward
passes.

Note "Texts and ranks". All ranks know all texts, and call everything together. A text has a row, which lies on the
data-parallel rank row mod dp. A rank that has fewer texts than another in a pass computes a token of nothing instead,
so that all send messages of the same shape. One rank draws a text's token, and a sum over all tells it to the others.
"""

# B texts of this rank, T tokens of a pass, S tokens of a whole text with padding, V vocabulary

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import lcm
from typing import Protocol, Self

import torch
from torch import Tensor

from megaspec.core import counted
from megaspec.core.errors import NonFiniteError, Preempted
from megaspec.nn.attention.cache import NewTokens, cached
from megaspec.nn.decoder import Decoder
from megaspec.nn.moe.module import Moe
from megaspec.parallelism.context import ContextParallel
from megaspec.parallelism.mesh import Mesh
from megaspec.parallelism.pipeline import Pipeline
from megaspec.runtime.build import SplitModel, TrainState
from megaspec.runtime.draw import NOT_FINITE, Draw
from megaspec.spec import Spec

TOKENS_OF_A_PASS = 8192
"""With padding: as many texts as they hold start in one pass, or one that is longer."""


@dataclass
class GrowingText:
    """A text that is being written."""

    number: int
    """Of all that are asked for: no two have the same."""
    row: int
    """The place among those that are written at a time."""
    ids: list[int]
    """Its prompt and what follows so far."""
    key: int
    """What its draws follow from."""


class Passes(Protocol):
    """Where next tokens come from."""

    def next_tokens(self, texts: Sequence[GrowingText]) -> list[int]:
        """One for each text. All ranks call it together, with the same texts.

        NonFiniteError: logits hold NaN or infinities. Preempted: a rank was asked to stop.
        """
        ...


@dataclass(frozen=True)
class ModelOnRanks:
    """What of a model on its ranks a text is written with."""

    spec: Spec
    mesh: Mesh
    chunks: Sequence[Decoder]
    pipeline: Pipeline
    context: ContextParallel
    sequence_parallel: bool

    @classmethod
    def of_run(cls, built: TrainState) -> Self:
        """A run's, while it trains or afterwards."""
        return cls(
            built.spec,
            built.mesh,
            built.chunks,
            built.pipeline,
            built.context_parallel,
            built.tensor_parallel.sequence_parallel,
        )

    @classmethod
    def of_weights(cls, spec: Spec, mesh: Mesh, split: SplitModel) -> Self:
        """One without anything that trains."""
        strategies = split.strategies
        return cls(
            spec,
            mesh,
            split.chunks,
            strategies.pipeline,
            strategies.context,
            strategies.tensor.sequence_parallel,
        )

    @property
    def unit(self) -> int:
        """What the tokens of a pass must be a multiple of, so that ranks can split them."""
        tp = self.mesh.size("tp") if self.sequence_parallel else 1
        cp = self.mesh.size("cp")
        # a ring gives each rank a chunk from the front and one from the back, so that all have as much to attend to
        chunks_per_rank = 2
        if cp == 1 or self.context.spec.kind == "all_to_all":
            chunks_per_rank = 1
        return lcm(chunks_per_rank * cp, cp * tp)

    def texts_here(self, texts: Sequence[GrowingText]) -> list[GrowingText]:
        """Those that lie on this rank."""
        return [text for text in texts if text.row % self.mesh.size("dp") == self.mesh.index("dp")]

    def most_of_a_rank(self, texts: Sequence[GrowingText]) -> int:
        """How many texts the rank with the most of them has."""
        counts = [0] * self.mesh.size("dp")
        for text in texts:
            counts[text.row % len(counts)] += 1
        return max(counts)


def no_stop() -> bool:
    """Nobody asks to stop."""
    return False


@dataclass
class RankPasses:
    """What both ways to the next token have in common. `stops`: whether this rank was asked to stop."""

    model: ModelOnRanks
    draw: Draw
    stops: Callable[[], bool] = no_stop

    def _grouped(self, texts: Sequence[GrowingText]) -> Iterator[list[GrowingText]]:
        """As many texts at a time as a pass of whole texts takes."""
        group: list[GrowingText] = []
        longest = 0
        for text in texts:
            length = max(longest, len(text.ids))
            if group and (len(group) + 1) * length > TOKENS_OF_A_PASS:
                yield group
                group = []
                length = len(text.ids)
            group.append(text)
            longest = length
        if group:
            yield group

    def _forward(
        self,
        texts: Sequence[GrowingText],
        tokens_BT: Tensor,
        positions_BT: Tensor,
        last_B: Tensor,
        way: object,
    ) -> dict[int, int]:
        """One pass of `texts`. -> the tokens that were drawn, by the texts' numbers

        `tokens`, `positions`: on the CPU, this rank's texts and others of nothing. `last`: index in T of the last token
        of each, below 0 where another rank has it.
        """
        model = self.model
        here = model.texts_here(texts)
        device = model.mesh.device
        # as long as any: those of nothing have the frequencies of the first
        lengths = [len(text.ids) for text in here]
        lengths += [len(texts[0].ids)] * (len(tokens_BT) - len(here))
        tokens_BT = tokens_BT.to(device)
        positions_BT = positions_BT.to(device)
        n_whole = tokens_BT.shape[1] * model.mesh.size("cp")
        drawn = torch.zeros(len(texts) + 1, dtype=torch.int64)
        drawn[-1] = int(self.stops())

        def forward(chunk: int, micro: int, x: Tensor | None) -> Tensor:
            decoder = model.chunks[chunk]
            context = decoder.context_of_rows(positions_BT, lengths=lengths, length=n_whole, way=way)
            y = decoder.body(tokens_BT if x is None else x, context)
            if decoder.head is None:
                return y
            return decoder.finish(y, lambda h_BTD: self._drawn_into(drawn, decoder, h_BTD, texts, last_B))

        size = torch.Size((len(tokens_BT), self._tokens_here(tokens_BT.shape[1]), model.spec.model.d_model))
        model.pipeline.forward_only(1, size=size, forward=forward)
        model.pipeline.finish()
        return self._told(texts, drawn.to(device))

    def _drawn_into(
        self, drawn: Tensor, decoder: Decoder, h_BTD: Tensor, texts: Sequence[GrowingText], last_B: Tensor
    ) -> Tensor:
        """Draws the tokens of the texts whose last token is here; on one of the ranks that have the same logits."""
        here = self.model.texts_here(texts)
        h_BTD = decoder.head.gather(h_BTD)
        rows = [row for row in range(len(here)) if last_B[row] >= 0]
        if not rows:
            return h_BTD
        h_1nD = h_BTD[rows, last_B[rows].to(h_BTD.device)][None]
        logits_1nV = decoder.head.whole_logits(h_1nD)
        if self.model.mesh.index("tp") == 0:
            ours = [here[row] for row in rows]
            tokens = self.draw(logits_1nV[0], [text.key for text in ours], [len(text.ids) for text in ours])
            places = {text.number: place for place, text in enumerate(texts)}
            for text, token in zip(ours, tokens, strict=True):
                drawn[places[text.number]] = token
        return logits_1nV

    def _told(self, texts: Sequence[GrowingText], drawn: Tensor) -> dict[int, int]:
        """What any rank has drawn, on all of them; on the others it is 0."""
        if self.model.mesh.world_size > 1:
            counted.all_reduce(drawn)
        *tokens, n_stops = drawn.tolist()
        if n_stops:
            raise Preempted("stopped while texts were written; those that were done are kept")
        if NOT_FINITE in tokens:
            text = "the model's logits hold NaN or infinities: weights, or a number format, that give no text"
            raise NonFiniteError(f"{text}; take an earlier checkpoint with --step, or precision=fp32")
        return {text.number: token for text, token in zip(texts, tokens, strict=True)}

    def _tokens_here(self, tokens: int) -> int:
        """Of a pass's tokens between stages."""
        if not self.model.sequence_parallel:
            return tokens
        return tokens // self.model.mesh.size("tp")

    def _padded(self, tokens: int) -> int:
        """The next number that ranks can split."""
        unit = self.model.unit
        return -(-tokens // unit) * unit


@dataclass
class CachedPasses(RankPasses):
    """Each token is computed once, from keys and values that are kept of those before; see nn/attention/cache.py. Use
    `cached_passes`."""

    n_rows: int = 1
    """Texts at a time, on all ranks together."""
    kept: dict[int, tuple[int, int, list[list[int]]]] = field(default_factory=dict)
    """By row: the text's number, how many of its tokens are kept, and the frequencies that they were turned with."""

    @torch.no_grad()
    def next_tokens(self, texts: Sequence[GrowingText]) -> list[int]:
        """See Passes. A text that is new in its row, or whose frequencies its length has changed, starts."""
        going_on = []
        starting = []
        for text in texts:
            before = (text.number, len(text.ids) - 1, self._frequencies(text))
            if self.kept.get(text.row) == before:
                going_on.append(text)
            else:
                starting.append(text)
        drawn: dict[int, int] = {}
        for group in self._grouped(starting):
            drawn |= self._pass(group, starts=True)
        if going_on:
            drawn |= self._pass(going_on, starts=False)
        for text in texts:
            self.kept[text.row] = (text.number, len(text.ids), self._frequencies(text))
        return [drawn[text.number] for text in texts]

    def _frequencies(self, text: GrowingText) -> list[list[int]]:
        return [rope.effective_lengths([len(text.ids)]) for rope in self.model.chunks[0].ropes]

    def _pass(self, texts: Sequence[GrowingText], *, starts: bool) -> dict[int, int]:
        model = self.model
        dp = model.mesh.size("dp")
        here = model.texts_here(texts)
        B = model.most_of_a_rank(texts)
        T = 1
        if starts:
            T = max(len(text.ids) for text in texts)
        T = self._padded(T)
        tokens_BT = torch.zeros(B, T, dtype=torch.int64)
        positions_BT = torch.zeros(B, T, dtype=torch.int64)
        counts_B = torch.ones(B, dtype=torch.int64)
        # texts of nothing share a row of their own, behind all others: what they write there nobody reads
        rows = [spare_row(self.model, self.n_rows)] * B
        for number, text in enumerate(here):
            rows[number] = text.row // dp
            new = text.ids if starts else text.ids[-1:]
            first = len(text.ids) - len(new)
            tokens_BT[number, : len(new)] = torch.tensor(new)
            positions_BT[number] = (first + torch.arange(T)).clamp(max=len(text.ids) - 1)
            counts_B[number] = len(new)
        device = model.mesh.device
        way = NewTokens(
            rows=torch.tensor(rows, device=device),
            counts=counts_B.to(device),
            starts=starts,
            longest=max(len(text.ids) for text in texts),
            leading=rows == list(range(B)),
        )
        return self._forward(texts, tokens_BT, positions_BT, counts_B - 1, way)


def spare_row(model: ModelOnRanks, n_rows: int) -> int:
    """The row of a rank's cache behind those of its texts."""
    return -(-n_rows // model.mesh.size("dp"))


@contextmanager
def cached_passes(
    model: ModelOnRanks, draw: Draw, *, rows: int, length: int, stops: Callable[[], bool] = no_stop
) -> Iterator[CachedPasses]:
    """While it lasts, the model keeps keys and values of `rows` texts of up to `length` tokens. Raises UsageError."""
    assert model.mesh.size("cp") == 1, "a text that lies on several ranks has no cache"
    n_rows_here = spare_row(model, rows) + 1
    with ExitStack() as stack:
        stack.enter_context(dropless(model.chunks))
        stack.enter_context(cached(model.chunks, rows=n_rows_here, length=length))
        yield CachedPasses(model, draw, stops, n_rows=rows)


@dataclass
class WholePasses(RankPasses):
    """Each token takes a forward pass of the whole text: for parts that keep nothing, and for context parallelism. Use
    `whole_passes`."""

    @torch.no_grad()
    def next_tokens(self, texts: Sequence[GrowingText]) -> list[int]:
        drawn: dict[int, int] = {}
        for group in self._grouped(texts):
            drawn |= self._pass(group)
        return [drawn[text.number] for text in texts]

    def _pass(self, texts: Sequence[GrowingText]) -> dict[int, int]:
        model = self.model
        here = model.texts_here(texts)
        B = model.most_of_a_rank(texts)
        S = self._padded(max(len(text.ids) for text in texts))
        index_T = model.context.index(S).cpu()
        tokens_BS = torch.zeros(B, S, dtype=torch.int64)
        last_B = torch.full((B,), -1)
        for number, text in enumerate(here):
            tokens_BS[number, : len(text.ids)] = torch.tensor(text.ids)
            places = (index_T == len(text.ids) - 1).nonzero().flatten().tolist()
            if places:
                last_B[number] = places[0]
        # padding may lie behind the last position that there is
        positions_T = index_T.clamp(max=model.spec.model.max_seq_len - 1)
        return self._forward(texts, tokens_BS[:, index_T], positions_T.expand(B, -1), last_B, model.context.way)


@contextmanager
def whole_passes(model: ModelOnRanks, draw: Draw, *, stops: Callable[[], bool] = no_stop) -> Iterator[WholePasses]:
    """While it lasts, next tokens come from whole forward passes."""
    with dropless(model.chunks):
        yield WholePasses(model, draw, stops)


@contextmanager
def dropless(chunks: Sequence[Decoder]) -> Iterator[None]:
    """While it lasts, experts take every token: what a text is must not depend on what is written beside it."""
    moes = []
    for chunk in chunks:
        moes += [module for module in chunk.modules() if isinstance(module, Moe)]
    before = [(moe.router.moe, moe.pad) for moe in moes]
    for moe in moes:
        moe.router.moe = moe.router.moe.model_copy(update={"capacity_factor": None})
        moe.pad = False
    try:
        yield
    finally:
        for moe, (spec, pad) in zip(moes, before, strict=True):
            moe.router.moe = spec
            moe.pad = pad
