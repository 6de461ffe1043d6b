"""Rows of tokens, sorted by the expert that takes them: there, back, and the gradients of both."""

# M tokens, k choices of a token, C = M·k choices, R rows, E experts, D features

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

    @property
    def token(self) -> Tensor:
        """int32 [R]: the token of each row; -1: the row is empty."""
        token_R = (self.choice // self.place.shape[1]).to(torch.int32)
        if self.filled is None:
            return token_R
        return torch.where(self.filled, token_R, -1)

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
        kept_Mk = self.place < count
        # what has no row any more points to row 0, which `kept` says not to read
        place_Mk = torch.where(kept_Mk, self.place, 0)
        return replace(self, choice=self.choice[:count], place=place_Mk, kept=kept_Mk, whole=True)

    def padded(self, count: int) -> "Rows":
        """`count` rows for each expert, which has so many at most."""
        E = self.ends.shape[0]
        M, k = self.place.shape
        device = self.ends.device
        n_rows = E * count
        # where each sorted row goes: those past the last end belong to no expert, and go to one row more, the last
        ends_E = self.ends.to(torch.int64)
        row_C = torch.arange(M * k, device=device)
        expert_C = torch.searchsorted(ends_E, row_C, right=True)
        starts = torch.cat((ends_E.new_zeros(1), ends_E))
        within_C = row_C - starts[expert_C]
        slot_C = torch.where(expert_C < E, expert_C * count + within_C, n_rows)
        # by row, with that one more; rows that nothing goes to hold choice 0, and `filled` says not to read them
        choice = torch.zeros(n_rows + 1, dtype=torch.int64, device=device).scatter(0, slot_C, self.choice)
        filled = torch.zeros(n_rows + 1, dtype=torch.bool, device=device).scatter(0, slot_C, True)
        moved_Mk = slot_C[self.place.flatten()].view(M, k)
        kept_Mk = moved_Mk < n_rows
        return Rows(
            choice=choice[:-1],
            place=torch.where(kept_Mk, moved_Mk, 0),
            ends=torch.arange(1, E + 1, device=device, dtype=torch.int32) * count,
            kernel=self.kernel,
            filled=filled[:-1],
            kept=kept_Mk,
        )


def sorted_rows(experts_Mk: Tensor, keep_Mk: Tensor | None, n_experts: int, *, unpermute: UnpermuteKernel) -> Rows:
    """Choices by expert, the earlier token first, and last those that are not kept.

    `experts_Mk`: int64 in [0, n_experts).
    """
    assert n_experts < 2**15, f"{n_experts} experts"
    # what is not kept goes behind the last expert, as if to one more
    if keep_Mk is not None:
        experts_Mk = torch.where(keep_Mk, experts_Mk, n_experts)
    expert_C = experts_Mk.flatten()
    # of two bytes, since a sort takes its time byte by byte; stable, for the earlier token
    ordered_R, choice_R = expert_C.to(torch.int16).sort(stable=True)
    numbers_E = torch.arange(n_experts, dtype=torch.int16, device=expert_C.device)
    ends_E = torch.searchsorted(ordered_R, numbers_E, right=True, out_int32=True)
    # the inverse permutation
    row_R = torch.arange(choice_R.shape[0], device=choice_R.device)
    place_C = torch.empty_like(choice_R).scatter(0, choice_R, row_R)
    return Rows(
        choice=choice_R,
        place=place_C.view_as(experts_Mk),
        ends=ends_E,
        kernel=unpermute,
        whole=keep_Mk is None,
    )


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """x where the mask is True, else zero; the mask has x's first dimensions."""
    if mask is None:
        return x
    others = (1,) * (x.dim() - mask.dim())
    return torch.where(mask.view(*mask.shape, *others), x, 0)


def _to_rows(x_MD: Tensor, rows: Rows) -> Tensor:
    """[M, D] -> [R, D]; choice m·k + j is of token m."""
    k = rows.place.shape[1]
    return _masked(x_MD[rows.choice // k], rows.filled)


def to_tokens(y_RD: Tensor, rows: Rows) -> Tensor:
    """The sum of each token's rows, [R, D] -> [M, D]."""
    # a rank that no token came to has no row that `place` could point to
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
        return to_tokens(grad_RD, ctx.rows), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_RD, rows):
        ctx.rows = rows
        return to_tokens(y_RD, rows)

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
        # as in to_tokens
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
