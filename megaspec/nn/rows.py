"""Rows of tokens, sorted by the expert that takes them: there, back, and the gradients of both."""

# M tokens, k choices of a token, R rows, E experts, D features

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megaspec_kernels.registry import UnpermuteKernel


@dataclass(frozen=True)
class Rows:
    """Which of M·k choices lies in which row. Choice m·k + j is the j-th of token m."""

    choice: Tensor
    """int64 [R]: what lies in each row."""
    place: Tensor
    """int64 [M, k]: the row of each choice."""
    ends: Tensor
    """int32 [E]: the end of each expert's rows."""
    kernel: UnpermuteKernel
    """What sums each token's rows."""
    filled: Tensor | None = None
    """bool [R]: rows that hold a choice; others are zero. None: all."""
    kept: Tensor | None = None
    """bool [M, k]: choices that have a row; others count zero. None: all."""
    whole: bool = True
    """Every row belongs to an expert. Otherwise the last rows hold choices that were dropped."""

    def permute(self, x_MD: Tensor) -> Tensor:
        """[M, D] -> [R, D]: the token of each row."""
        return _Permute.apply(x_MD, self)

    def unpermute(self, y_RD: Tensor) -> Tensor:
        """[R, D] -> [M, D]: the sum of each token's rows."""
        return _Unpermute.apply(y_RD, self)

    def pick(self, weights_Mk: Tensor) -> Tensor:
        """[M, k] -> [R]: the weight of each row."""
        return _Pick.apply(weights_Mk, self)

    def first(self, count: int) -> "Rows":
        """The first `count` rows, where no expert has any behind them."""
        if count == self.choice.shape[0]:
            return replace(self, whole=True)
        kept = self.place < count
        return replace(self, choice=self.choice[:count], place=torch.where(kept, self.place, 0), kept=kept, whole=True)

    def padded(self, count: int) -> "Rows":
        """`count` rows for each expert, which has so many at most."""
        E, (M, k) = self.ends.shape[0], self.place.shape
        ends, rows = self.ends.to(torch.int64), torch.arange(M * k, device=self.ends.device)
        # of sorted rows; those past the last end go to one more expert, and from there to one row more
        expert = torch.searchsorted(ends, rows, right=True)
        place = rows - torch.cat((ends.new_zeros(1), ends))[expert]
        slot = torch.where(expert < E, expert * count + place, E * count)
        choice = torch.zeros(E * count + 1, dtype=torch.int64, device=ends.device).scatter(0, slot, self.choice)
        filled = torch.zeros(E * count + 1, dtype=torch.bool, device=ends.device).scatter(0, slot, True)
        moved = slot[self.place.flatten()].view(M, k)
        kept = moved < E * count
        ends = torch.arange(1, E + 1, device=ends.device, dtype=torch.int32) * count
        return Rows(choice[:-1], torch.where(kept, moved, 0), ends, self.kernel, filled[:-1], kept)


def sorted_rows(experts_Mk: Tensor, keep_Mk: Tensor | None, n_experts: int, *, unpermute: UnpermuteKernel) -> Rows:
    """Choices by expert, the earlier token first, and last those that are not kept.

    `experts_Mk`: int64 in [0, n_experts).
    """
    assert n_experts < 2**15, f"{n_experts} experts"
    expert = (experts_Mk if keep_Mk is None else torch.where(keep_Mk, experts_Mk, n_experts)).flatten()
    # of two bytes, since a sort takes its time byte by byte
    ordered, choice = expert.to(torch.int16).sort(stable=True)
    ends = torch.searchsorted(ordered, torch.arange(n_experts, dtype=torch.int16, device=expert.device), right=True)
    place = torch.empty_like(choice).scatter(0, choice, torch.arange(choice.shape[0], device=choice.device))
    return Rows(choice, place.view_as(experts_Mk), ends.to(torch.int32), unpermute, whole=keep_Mk is None)


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else torch.where(mask.view(*mask.shape, *(1,) * (x.dim() - mask.dim())), x, 0)


def _to_rows(x_MD: Tensor, rows: Rows) -> Tensor:
    return _masked(x_MD[rows.choice // rows.place.shape[1]], rows.filled)


def _to_tokens(y_RD: Tensor, rows: Rows) -> Tensor:
    if y_RD.shape[0] == 0:
        return y_RD.new_zeros(rows.place.shape[0], y_RD.shape[1])
    return rows.kernel(y_RD, rows.place, rows.kept)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_MD, rows):
        ctx.rows = rows
        return _to_rows(x_MD, rows)

    @staticmethod
    def backward(ctx, grad_RD):
        return _to_tokens(grad_RD, ctx.rows), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_RD, rows):
        ctx.rows = rows
        return _to_tokens(y_RD, rows)

    @staticmethod
    def backward(ctx, grad_MD):
        return _to_rows(grad_MD, ctx.rows), None


class _Pick(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights_Mk, rows):
        ctx.rows = rows
        return _masked(weights_Mk.flatten()[rows.choice], rows.filled)

    @staticmethod
    def backward(ctx, grad_R):
        rows = ctx.rows
        if grad_R.shape[0] == 0:
            return grad_R.new_zeros(rows.place.shape), None
        return _masked(grad_R[rows.place], rows.kept), None


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, order, inverse):
        ctx.inverse = inverse
        return x[order]

    @staticmethod
    def backward(ctx, grad):
        return grad[ctx.inverse], None, None


def reorder(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """x[order], whose gradient goes back by the inverse permutation."""
    return _Reorder.apply(x, order, inverse)
