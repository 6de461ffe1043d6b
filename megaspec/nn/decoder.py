"""What every decoder of equal blocks has in common: the way from tokens to the loss."""

# B sequences, T tokens of this rank, S tokens of the whole sequence, D model, V vocabulary

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from megaspec.core.errors import UsageError
from megaspec.core.placement import Row
from megaspec.nn.attention.module import CausalCore, SequenceContext, document_positions
from megaspec.nn.dropout import Dropout, Noise
from megaspec.nn.head.module import OutputHead
from megaspec.nn.model_facts import ModelFacts
from megaspec.nn.moe.router import Router
from megaspec.nn.rope.module import Angles, Rope
from megaspec_kernels.attention.documents import Documents


def fill_buffers(model: nn.Module) -> None:
    """Computes what modules keep beside their parameters; for a model whose memory is new."""
    for module in model.modules():
        if isinstance(module, Rope | Dropout | CausalCore | Router):
            module.fill_buffers()


Role = Literal["embedding", "layer", "head"]
"""Of a unit. The first one looks tokens up; the last one ends in the loss, so its backward pass follows at once."""


@dataclass
class Unit:
    """Consecutive modules that are run, recomputed and sharded together. Strategies wrap `run`.

    embedding: run(tokens_BT, context) -> x_BTD
    layer (or several): run(x_BTD, context) -> x_BTD
    head: run(x_BTD, finish) -> finish(normed x_BTD)
    """

    name: str
    """For reports: strategies ask for the role."""
    role: Role
    modules: tuple[nn.Module, ...]
    run: Callable[..., Tensor]


class Decoder(nn.Module):
    """A model, or the chunk of it that lies on one pipeline stage: `embed`, `norm` and `head` are None elsewhere, and
    `layers` holds the chunk's, by their numbers in the model.

    `facts`: what its parts say of themselves. `positions`: learned ones, None where there are none. `ropes`: angles of
    rotary ones, a table for each way in which layers turn.
    """

    embedding_names: tuple[str, ...] = ("embed", "positions", "embed_dropout")
    """The modules of the first unit."""
    _units: list[Unit] | None = None

    def __init__(
        self,
        *,
        facts: ModelFacts,
        embed: nn.Module,
        positions: nn.Module | None,
        embed_dropout: Dropout,
        ropes: Sequence[Rope],
        layers: nn.ModuleDict,
        norm: nn.Module,
        head: OutputHead,
    ):
        super().__init__()
        self.facts = facts
        self.embed: nn.Module | None = embed
        self.positions = positions
        self.embed_dropout: nn.Module | None = embed_dropout
        self.ropes = nn.ModuleList(ropes)
        self.layers = layers
        self.norm: nn.Module | None = norm
        self.head: OutputHead | None = head
        if self.tied:
            head.weight = embed.weight

    @property
    def tied(self) -> bool:
        """The output head's weight is the embedding's."""
        return self.facts.is_tied

    @property
    def placement(self) -> tuple[Row, ...]:
        """How parameters may be split."""
        return self.facts.placement

    def embed_tokens(self, tokens_BT: Tensor, context: SequenceContext) -> Tensor:
        """-> [B, T, D]"""
        x_BTD = self.embed(tokens_BT)
        if self.positions is not None:
            x_BTD = self.positions(x_BTD, context.positions)
        return self.embed_dropout(x_BTD, context.noise)

    def angles(self, positions: Tensor, *, length: int) -> tuple[Angles, ...]:
        """Cosine and sine at int64 [T] or [B, T] of a sequence of `length` tokens, of every table."""
        return tuple(rope.angles(positions, length=length) for rope in self.ropes)

    def context(
        self,
        index_T: Tensor,
        *,
        length: int,
        documents: Documents | None = None,
        noise: Noise | None = None,
        aux_weight: Tensor | None = None,
        way: Any = None,
    ) -> SequenceContext:
        """What blocks need to know of a batch of which this rank has the tokens `index_T`; see SequenceContext."""
        positions = index_T if documents is None else document_positions(documents.number)[:, index_T]
        angles = self.angles(positions, length=length)
        return SequenceContext(positions, angles, documents, noise, index_T, length, aux_weight, way)

    def context_of_rows(
        self, positions_BT: Tensor, *, lengths: Sequence[int], length: int, way: Any = None
    ) -> SequenceContext:
        """Of sequences that are not equally long, each of which is computed as if it were alone, without dropout.

        `positions`: int64, of this rank's tokens of each sequence. `lengths`: tokens of each. `length`: tokens of the
        batch, padding included.
        """
        angles = tuple(rope.angles_of_rows(positions_BT, lengths=lengths) for rope in self.ropes)
        return SequenceContext(positions_BT, angles, length=length, way=way)

    def body(self, x: Tensor, context: SequenceContext) -> Tensor:
        """tokens [B, T] on the first stage, activations [B, T, D] on others -> activations [B, T, D]"""
        for unit in self.units:
            if unit.role != "head":
                x = unit.run(x, context)
        return x

    def finish(self, x_BTD: Tensor, what: Callable[[Tensor], Tensor]) -> Tensor:
        """`what` of the normed activations, on the stage that has the head."""
        return self.units[-1].run(x_BTD, what)

    def forward(self, tokens_BT: Tensor, documents: Documents | None = None) -> Tensor:
        """int64 [B, T] -> logits [B, T, V], where this rank has the whole sequence and model."""
        return self.finish(self.body(tokens_BT, self._whole_context(tokens_BT, documents)), self.head)

    def loss(
        self, tokens_BT: Tensor, labels_BT: Tensor, weights_BT: Tensor, *, documents: Documents | None = None
    ) -> Tensor:
        """Σ weight · cross-entropy, where this rank has the whole sequence and model: a scalar in at least fp32."""
        x_BTD = self.body(tokens_BT, self._whole_context(tokens_BT, documents))
        return self.finish(x_BTD, lambda h_BTD: self.head.loss(h_BTD, labels_BT, weights_BT))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `to_empty` calls, which gives a model from the meta device memory that holds anything."""
        left_meta = any(buffer.is_meta for buffer in self.buffers())
        super()._apply(fn, recurse)
        if left_meta and not any(buffer.is_meta for buffer in self.buffers()):
            fill_buffers(self)
        return self

    def _whole_context(self, tokens_BT: Tensor, documents: Documents | None) -> SequenceContext:
        """UsageError: the model has no weights yet."""
        if not tokens_BT.is_meta and any(parameter.is_meta for parameter in self.parameters()):
            text = "the model is on the meta device, where it has shapes and no values; megaspec.plain_model(spec,"
            raise UsageError(f"{text} device=...) gives a model with weights, megaspec.build one in a layout")
        T = tokens_BT.shape[1]
        return self.context(torch.arange(T, device=tokens_BT.device), length=T, documents=documents)

    def part(self, layers: Sequence[int], *, embedding: bool, head: bool) -> Self:
        """The chunk with these layers, sharing its modules with this model."""
        chunk = copy.copy(self)
        chunk._modules = dict(self._modules)
        chunk.layers = nn.ModuleDict({str(i): self.layers[str(i)] for i in layers})
        absent = () if embedding else self.embedding_names
        for name in (*absent, *(() if head else ("norm", "head"))):
            chunk._modules[name] = None
        chunk._units = None
        return chunk

    def global_parameters(self) -> dict[str, nn.Parameter]:
        """This chunk's by the names that they have in the whole model."""
        tied = "head.weight" if self.tied else None
        return {"embed.weight" if n == tied else n: p for n, p in self.named_parameters()}

    @property
    def units(self) -> list[Unit]:
        """What the chunk is made of, in order: embedding, layers, head, as far as they lie here."""
        if self._units is None:
            self._units = self._make_units()
        return self._units

    @units.setter
    def units(self, units: list[Unit]) -> None:
        self._units = units

    def _make_units(self) -> list[Unit]:
        units = []
        if self.embed is not None:
            modules = tuple(m for m in map(self._modules.get, self.embedding_names) if m is not None)
            units.append(Unit("embed", "embedding", modules, self.embed_tokens))
        units += [Unit(f"layers.{n}", "layer", (layer,), layer) for n, layer in self.layers.items()]
        if self.head is not None:
            modules = (self.norm, self.head)
            units.append(Unit("head", "head", modules, lambda x_BTD, finish: finish(self.norm(x_BTD))))
        return units
