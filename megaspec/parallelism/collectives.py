"""Collectives named by what they do in both directions. `group` None means one rank: nothing to do.

The sequence is dimension 1 of [B, T, D].
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megaspec.core import counted
from megaspec.core.collective_word import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER

# The operators under torch's functional collectives: traceable by torch.compile, the same in torch 2.11 to 2.13.
# On the CPU there is nothing to gain from overlap, and gloo has been seen to crash inside these operators, once in
# about ten thousand steps: there the collectives block.
_ops = torch.ops._c10d_functional


def wait(x: Tensor) -> Tensor:
    """The result of a collective that was started."""
    return x if x.device.type == "cpu" else _ops.wait_tensor(x)


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the group. Starts it: `wait` before use."""
    if x.device.type == "cpu":
        return _blocking_all_reduce(x, dist.ReduceOp.SUM, group)
    counted.issued(ALL_REDUCE, group)
    return _ops.all_reduce(x.contiguous(), "sum", group.group_name)


def all_reduce_max(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The maximum over the group. Starts it: `wait` before use."""
    if x.device.type == "cpu":
        return _blocking_all_reduce(x, dist.ReduceOp.MAX, group)
    counted.issued(ALL_REDUCE, group)
    return _ops.all_reduce(x.contiguous(), "max", group.group_name)


def _blocking_all_reduce(x: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    counted.all_reduce(out, op, group=group)
    return out


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[n, ...] of each rank -> [ranks · n, ...], in their order. Starts it: `wait` before use."""
    if x.device.type == "cpu":
        whole = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
        counted.all_gather(list(whole.chunk(group.size())), x.contiguous(), group=group)
        return whole
    counted.issued(ALL_GATHER, group)
    return _ops.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name)


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks · n, ...] of each rank -> this rank's [n, ...] of the sum. Starts it: `wait` before use."""
    if x.device.type == "cpu":
        return _blocking_all_reduce(x, dist.ReduceOp.SUM, group).chunk(group.size())[group.rank()]
    counted.issued(REDUCE_SCATTER, group)
    return _ops.reduce_scatter_tensor(x.contiguous(), "sum", group.size(), group.group_name)


def all_to_all(x: Tensor, receive: Sequence[int], send: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The first `send[0]` rows go to the first rank and so on; what comes lies in the order of ranks, `receive[r]` rows
    from rank r. Starts it: `wait` before use."""
    if x.device.type == "cpu":
        out = x.new_empty(sum(receive), *x.shape[1:])
        counted.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=group)
        return out
    counted.issued(ALL_TO_ALL, group)
    return _ops.all_to_all_single(x.contiguous(), list(receive), list(send), group.group_name)


def gather_sequence(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, T/tp, D] -> the whole sequence, laid out [T, B, D]. Starts it: `wait` before use."""
    return all_gather(x_BTD.transpose(0, 1), group)


def reduce_scatter_sequence(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, T, D] -> this rank's [B, T/tp, D] of the sum, laid out [T/tp, B, D]. Starts it: `wait` before use."""
    return reduce_scatter(x_BTD.transpose(0, 1), group)


def wait_sequence(x_TBD: Tensor) -> Tensor:
    """Waits for a gather or reduce-scatter of the sequence and turns its result back to [B, T, D]."""
    return wait(x_TBD).transpose(0, 1)


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return wait(all_reduce(x, group))

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return wait(all_reduce(grad, ctx.group)), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return wait_sequence(reduce_scatter_sequence(x, group))

    @staticmethod
    def backward(ctx, grad):
        return wait_sequence(gather_sequence(grad, ctx.group)), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return wait_sequence(gather_sequence(x, group))

    @staticmethod
    def backward(ctx, grad):
        return wait_sequence(reduce_scatter_sequence(grad, ctx.group)), None


def reduce_forward(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Forward: sum over the group. Backward: nothing (Megatron's g)."""
    return x if group is None else _Reduce.apply(x, group)


def reduce_backward(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Forward: nothing. Backward: sum over the group (Megatron's f)."""
    return x if group is None else _Copy.apply(x, group)


def scatter_forward(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Forward: sum, each rank keeps its part of the sequence. Backward: gather the sequence (Megatron's g bar)."""
    return x if group is None else _ReduceScatter.apply(x, group)


def gather_forward(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Forward: gather the sequence. Backward: sum, each rank keeps its part of the sequence (Megatron's f bar)."""
    return x if group is None else _Gather.apply(x, group)
