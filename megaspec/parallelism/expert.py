"""Expert parallelism: the experts of a layer on several ranks, over the same ranks as the dense grid.

Experts are split over ep, the matrices of each over etp, by parallelism/tensor.py; here tokens find them, routers see
the whole micro batch, and a step's statistics are added up.
"""

# B sequences, T tokens of this rank, S tokens of the whole sequence, L layers with experts, E experts

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaspec.core import counted
from megaspec.nn.decoder import Decoder
from megaspec.nn.moe.module import Moe
from megaspec.nn.moe.router import LOSSES, Router, Tokens
from megaspec.parallelism.collectives import all_reduce, gather_sequence, wait, wait_sequence
from megaspec.parallelism.dispatch import AllGather, AllToAll
from megaspec.parallelism.mesh import Mesh
from megaspec.parallelism.spec import ParallelismSpec


class SplitTokens(Tokens):
    """Sequences that are split over the ranks of cp and, inside these, of tp.

    `index(S)`: int64, the places in a sequence of S tokens that this cp rank has, in order, `index(S, rank)` those of
    another; its tp ranks have equal parts of them, one after the other.
    """

    def __init__(self, mesh: Mesh, index: Callable[..., Tensor]):
        self._mesh, self._index, self._group = mesh, index, mesh.group("tp-cp")
        self._orders: dict[int, Tensor] = {}

    def gather(self, x_BT: Tensor) -> Tensor:
        whole_BS = wait_sequence(gather_sequence(x_BT, self._group))
        return whole_BS[:, self._order(whole_BS.shape[1])]

    def take(self, x_BS: Tensor) -> Tensor:
        return x_BS[:, self._mine(x_BS.shape[1])]

    def sum(self, x: Tensor) -> Tensor:
        return wait(all_reduce(x, self._group))

    def _mine(self, length: int) -> Tensor:
        return self._index(length).chunk(self._mesh.size("tp"))[self._mesh.index("tp")]

    def _order(self, length: int) -> Tensor:
        """Where each token of the sequence lies when ranks' tokens lie one after the other."""
        if length not in self._orders:
            places = [self._index(length, rank) for rank in range(self._mesh.size("cp"))]
            self._orders[length] = torch.cat(places).argsort()
        return self._orders[length]


@dataclass(frozen=True)
class RouterStatistics:
    """What the routers of this rank's layers did with the global batch, still on the device; fp64."""

    layers: list[str]
    """The L layers by name."""
    loads_LE: Tensor
    """Tokens that chose each expert, over the even share."""
    drops_L: Tensor
    """Share of choices that were dropped."""
    entropy_L: Tensor
    """Mean entropy of a token's probabilities, in nats."""
    losses: dict[str, Tensor]
    """[L] each: mean over micro batches, with the coefficient."""


class ExpertParallel:
    """The strategy. `split_model` before memory is taken, behind TensorParallel's."""

    def __init__(self, mesh: Mesh, spec: ParallelismSpec, *, index: Callable[..., Tensor], overlap_shared: bool):
        """`index`: see SplitTokens. `overlap_shared`: shared experts are computed while tokens are on their way."""
        self._mesh, self._index, self._overlap = mesh, index, overlap_shared
        self._splits_sequences, self._kind = spec.sequence_parallel, spec.dispatch
        self._routers: dict[str, Router] | None = None
        """Those of the chunks, by global name; None: no step has been finished."""

    def split_model(self, model: nn.Module) -> None:
        """Puts this layout's ways into the slots of every Moe and its router."""
        mesh, group = self._mesh, self._mesh.group("ep-etp")
        sequences_are_split = mesh.group("tp-cp") is not None
        for moe in (m for m in model.modules() if isinstance(m, Moe)):
            assert mesh.size("tp") == 1 or self._splits_sequences, "experts under tp need sequence parallel"
            if sequences_are_split:
                moe.router.tokens = SplitTokens(mesh, self._index)
            if group is not None:
                moe.dispatch = self._dispatch(group)

    def _dispatch(self, group: dist.ProcessGroup) -> AllToAll | AllGather:
        degrees = {"ep": self._mesh.size("ep"), "etp": self._mesh.size("etp")}
        if self._kind == "all_gather":
            return AllGather(group, **degrees, overlap=self._overlap)
        side = torch.cuda.Stream(self._mesh.device) if self._mesh.device.type == "cuda" else None
        return AllToAll(group, **degrees, overlap=self._overlap, side=side)

    @torch.no_grad()
    def finish_step(self, chunks: Sequence[Decoder], *, skip: Tensor) -> RouterStatistics | None:
        """Call after the last backward pass of a step, on all ranks: moves biases and shares unless `skip`, a scalar,
        is 1. None: no experts here. `chunks`: the same in each step."""
        if self._routers is None:
            # to look through all modules takes the host as long as some of them take it in a step
            self._routers = dict(routers_of(chunks))
        routers = self._routers
        if not routers:
            return None
        sums = torch.stack([router.sums for router in routers.values()])
        group = self._mesh.group("tp-dp-cp")
        if group is not None:
            counted.all_reduce(sums, group=group)
        seen = [router.read(one) for router, one in zip(routers.values(), sums, strict=True)]
        tokens_LE = torch.stack([one.tokens for one in seen])
        choices_L = tokens_LE.sum(1).clamp(min=1)
        micro_batches_L = torch.stack([one.micro_batches for one in seen])
        losses = torch.stack([one.losses for one in seen]) / micro_batches_L[:, None]
        top_k = next(iter(routers.values())).moe.top_k
        statistics = RouterStatistics(
            layers=list(routers),
            loads_LE=tokens_LE * tokens_LE.shape[1] / choices_L[:, None],
            drops_L=torch.stack([one.drops.sum() for one in seen]) / choices_L,
            entropy_L=torch.stack([one.entropy for one in seen]) * top_k / choices_L,
            losses=dict(zip(LOSSES, losses.unbind(1), strict=True)),
        )
        for router, one in zip(routers.values(), sums, strict=True):
            router.finish_step(one, skip=skip)
        return statistics


def routers_of(chunks: Sequence[Decoder]) -> Iterator[tuple[str, Router]]:
    """The routers of this rank's layers by global name."""
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if isinstance(module, Router):
                yield name, module


def buffers_of(chunks: Sequence[Decoder]) -> dict[str, Tensor]:
    """What routers keep from step to step, by global name: it belongs into checkpoints. Equal on all ranks that have
    the layer."""
    return {
        f"{name}.{key}": getattr(router, key)
        for name, router in routers_of(chunks)
        for key in ("expert_bias", "shares")
        if getattr(router, key) is not None
    }
