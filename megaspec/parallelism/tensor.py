"""Tensor parallelism with sequence parallelism (Shoeybi et al. 2019; Korthikanti et al. 2022).

Reads a model's placement rows and turns each module that they name into its parallel twin.
"""

# B sequences, T tokens, I inputs, O outputs, V vocabulary

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megaspec.core.layout import Layout, Piece, whole
from megaspec.core.placement import Row
from megaspec.nn.attention import Attention
from megaspec.nn.embedding import Embedding, padded
from megaspec.nn.linear import Linear, LinearOp, input_gradient, weight_gradient
from megaspec.nn.loss import OutputHead
from megaspec.nn.moe import GroupedLinear
from megaspec.parallelism.collectives import (
    all_reduce,
    all_reduce_max,
    gather_forward,
    gather_sequence,
    reduce_backward,
    reduce_forward,
    reduce_scatter_sequence,
    scatter_forward,
    wait,
    wait_sequence,
)
from megaspec.parallelism.mesh import Mesh
from megaspec_kernels.cross_entropy.reference import VocabShard


class ColumnLinearOp(torch.autograd.Function):
    """y = gather(x) Wᵀ + b with this rank's rows of W.

    Backward: the input gradient's reduction runs beside the weight gradient. With sequence parallel only this rank's
    part of x is kept, and gathered again beside the input gradient. Without `overlap` each of them runs alone.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, main_grad, group, sequence, overlap):
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.main_grad = bias is not None, main_grad
        ctx.group, ctx.sequence, ctx.overlap = group, sequence, overlap
        return F.linear(wait_sequence(gather_sequence(x, group)) if sequence else x, weight, bias)

    @staticmethod
    def backward(ctx, grad_out):
        x, weight = ctx.saved_tensors
        gathering = gather_sequence(x, ctx.group) if ctx.sequence else None
        if ctx.sequence and not ctx.overlap:
            gathering = wait(gathering)
        grad_x = input_gradient(grad_out, weight)
        reduce = reduce_scatter_sequence if ctx.sequence else all_reduce
        reducing = reduce(grad_x, ctx.group)
        if not ctx.overlap:
            reducing = wait(reducing)
        if ctx.sequence:
            x = wait_sequence(gathering)
        grad_weight = weight_gradient(ctx.main_grad, grad_out, x)
        grad_bias = grad_out.flatten(0, -2).sum(0) if ctx.has_bias else None
        grad_x = wait_sequence(reducing) if ctx.sequence else wait(reducing)
        return grad_x, grad_weight, grad_bias, None, None, None, None


class ColumnParallelLinear(Linear):
    """A Linear whose outputs are split: each rank holds rows of W. `parts` are this rank's."""

    group: dist.ProcessGroup
    sequence: bool
    overlap: bool

    def forward(self, x: Tensor) -> Tensor:
        return ColumnLinearOp.apply(x, self.weight, self.bias, self.main_grad, self.group, self.sequence, self.overlap)


class RowParallelLinear(Linear):
    """A Linear whose inputs are split: each rank holds columns of W; outputs are summed, then the bias is added."""

    group: dist.ProcessGroup
    sequence: bool

    def forward(self, x: Tensor) -> Tensor:
        partial = LinearOp.apply(x, self.weight, None, self.main_grad)
        y = scatter_forward(partial, self.group) if self.sequence else reduce_forward(partial, self.group)
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(Embedding):
    """An Embedding whose rows are split; rows of other ranks count zero and the results are summed."""

    group: dist.ProcessGroup
    sequence: bool
    first: int

    def forward(self, tokens_BT: Tensor) -> Tensor:
        local = tokens_BT - self.first
        here = (local >= 0) & (local < self.weight.shape[0])
        partial = F.embedding(torch.where(here, local, 0), self.weight) * here[..., None]
        return scatter_forward(partial, self.group) if self.sequence else reduce_forward(partial, self.group)


class VocabParallelHead(OutputHead):
    """An output head whose rows are split: logits stay split, the loss sums over ranks what it needs."""

    group: dist.ProcessGroup
    sequence: bool
    first: int

    @property
    def shard(self) -> VocabShard:
        valid = min(max(self.vocab_size - self.first, 0), self.weight.shape[0])
        return VocabShard(
            self.first,
            valid,
            sum=lambda x: reduce_forward(x, self.group),
            max=lambda x: wait(all_reduce_max(x, self.group)),
        )

    def gather(self, x_BTD: Tensor) -> Tensor:
        return gather_forward(x_BTD, self.group) if self.sequence else reduce_backward(x_BTD, self.group)

    def forward(self, x_BTD: Tensor) -> Tensor:
        local = self.gather(x_BTD) @ self.weight.t()
        whole_BTV = wait_sequence(gather_sequence(local.transpose(1, 2), self.group)).transpose(1, 2)
        return whole_BTV[..., : self.vocab_size]


_TWINS = {"columns": ColumnParallelLinear, "rows": RowParallelLinear}
_VOCAB_TWINS = {Embedding: VocabParallelEmbedding, OutputHead: VocabParallelHead}


@dataclass(frozen=True)
class GradientSum:
    """A part of a parameter's gradient that ranks of `group` have to add up after the backward pass."""

    name: str
    rows: slice | None
    """Of the parameter on this rank; None: all."""
    group: dist.ProcessGroup


@dataclass
class TensorParallel:
    """The strategy. `split_model` fills `layouts`, one for each parameter, by global name."""

    mesh: Mesh
    sequence_parallel: bool
    overlap: bool = True
    """Reduce a layer's input gradient, and gather its input again, beside its other gradient."""
    layouts: dict[str, Layout] = field(default_factory=dict)
    sums: list[GradientSum] = field(default_factory=list)
    experts: set[str] = field(default_factory=set)
    """Parameters whose copies lie along the expert grid's edp."""

    def __post_init__(self) -> None:
        self.sequence_parallel = self.sequence_parallel and self.mesh.size("tp") > 1

    def split_model(self, model: nn.Module, rows: tuple[Row, ...]) -> None:
        """Splits every module that a row names, on the meta device.

        Refuses a row that matches nothing, a module named twice and a parameter that no row covers.
        """
        covered: dict[str, Row] = {}
        modules = dict(model.named_modules())
        for row in rows:
            pattern = re.compile(re.escape(row.pattern).replace(r"\*", r"[^.]+"))
            names = [name for name in modules if pattern.fullmatch(name)]
            assert names, f"placement row {row.pattern!r} matches no module"
            for name in names:
                assert name not in covered, f"{name} is named by {covered[name].pattern!r} and {row.pattern!r}"
                covered[name] = row
        parameters = dict(model.named_parameters())
        for name in parameters:
            assert name.rpartition(".")[0] in covered, f"no placement row covers the parameter {name}"
        for name, row in covered.items():
            self._split(name, modules[name], row)
        if self.mesh.size("tp") > 1:
            self._split_attention(model)
        self.layouts = {name: self.layouts[name] for name in parameters}
        self.sums = [s for s in self.sums if s.name in parameters]

    def finish_grads(self, gradients: Mapping[str, Tensor], rows: Callable[[str], slice]) -> None:
        """Adds up the gradients that ranks hold in part: tokens were split, or a key/value head is held twice.

        `rows(name)`: the rows of the parameter that `gradients[name]` holds, the same on all ranks of a group.
        """
        by_group: dict[dist.ProcessGroup, list[Tensor]] = {}
        for one in self.sums:
            if one.name not in gradients:
                continue
            held = rows(one.name)
            first, last = (held.start, held.stop) if one.rows is None else (one.rows.start, one.rows.stop)
            part = slice(max(first, held.start) - held.start, min(last, held.stop) - held.start)
            if part.start < part.stop:
                by_group.setdefault(one.group, []).append(gradients[one.name][part])
        for group, parts in by_group.items():
            flat = torch.cat([p.reshape(-1) for p in parts])
            dist.all_reduce(flat, group=group)
            for part, summed in zip(parts, flat.split([p.numel() for p in parts]), strict=True):
                part.copy_(summed.view_as(part))

    def _split(self, name: str, module: nn.Module, row: Row) -> None:
        split = {
            "columns": self._columns,
            "rows": self._rows,
            "vocab": self._vocab,
            "sequence": self._sequence,
            "heads": self._heads,
            "expert_columns": self._expert_columns,
            "expert_rows": self._expert_rows,
        }
        split[row.kind](name, module, row)

    def _columns(self, name: str, module: Linear, row: Row) -> None:
        tp, rank = self.mesh.size("tp"), self.mesh.index("tp")
        total, global_first, local_first, pieces, local_parts = sum(module.parts), 0, 0, [], []
        for part, heads in zip(module.parts, row.heads_per_part or (None,) * len(module.parts), strict=True):
            fits = heads is None or heads % tp == 0
            assert fits or tp % heads == 0, f"{name}: {part} outputs ({heads} heads) don't split over tp={tp}"
            copies = 1 if fits else tp // heads
            share = part * copies // tp
            assert share * tp == part * copies, f"{name}: {part} outputs ({heads} heads) don't split over tp={tp}"
            pieces.append((global_first + rank // copies * share, local_first, share, rank % copies, copies))
            if copies > 1:
                held = slice(local_first, local_first + share)
                group = self.mesh.neighbours("tp", copies)
                self.sums += [GradientSum(f"{name}.{p}", held, group) for p in ("weight", "bias")]
            local_parts.append(share)
            global_first, local_first = global_first + part, local_first + share
        n_in = module.n_in
        self.layouts[f"{name}.weight"] = Layout(
            f"{name}.weight",
            (total, n_in),
            (local_first, n_in),
            tuple(Piece((g, 0), (at, 0), (n, n_in), *copy) for g, at, n, *copy in pieces),
        )
        self.layouts[f"{name}.bias"] = Layout(
            f"{name}.bias",
            (total,),
            (local_first,),
            tuple(Piece((g,), (at,), (n,), *copy) for g, at, n, *copy in pieces),
        )
        if tp > 1:
            module.parts = tuple(local_parts)
            self._become(module, ColumnParallelLinear, name)

    def _rows(self, name: str, module: Linear, row: Row) -> None:
        tp, rank = self.mesh.size("tp"), self.mesh.index("tp")
        n_out, share = sum(module.parts), module.n_in // tp
        assert share * tp == module.n_in, f"{name}: {module.n_in} inputs don't split over tp={tp}"
        piece = Piece((0, rank * share), (0, 0), (n_out, share))
        self.layouts[f"{name}.weight"] = Layout(f"{name}.weight", (n_out, module.n_in), (n_out, share), (piece,))
        self._replicated(f"{name}.bias", (n_out,))
        if tp > 1:
            module.n_in = share
            self._become(module, RowParallelLinear, name)

    def _vocab(self, name: str, module: Embedding | OutputHead, row: Row) -> None:
        tp, rank = self.mesh.size("tp"), self.mesh.index("tp")
        d = module.weight.shape[1]
        share = padded(module.vocab_size, module.pad_to * tp) // tp
        first = rank * share
        valid = min(max(module.vocab_size - first, 0), share)
        pieces = (Piece((first, 0), (0, 0), (valid, d)),) if valid else ()
        self.layouts[f"{name}.weight"] = Layout(f"{name}.weight", (module.vocab_size, d), (share, d), pieces)
        if tp > 1:
            module.first = first
            self._become(module, _VOCAB_TWINS[type(module)], name)

    def _sequence(self, name: str, module: nn.Module, row: Row) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            self._replicated(f"{name}.{key}", tuple(parameter.shape))
        if self.sequence_parallel and hasattr(module, "part"):
            module.part = (self.mesh.index("tp"), self.mesh.size("tp"))

    def _heads(self, name: str, module: nn.Module, row: Row) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            self._replicated(f"{name}.{key}", tuple(parameter.shape), in_part=self.mesh.size("tp") > 1)

    def _expert_columns(self, name: str, module: GroupedLinear, row: Row) -> None:
        etp, rank, E, first = self._expert_place(name, module)
        parts, n_in = module.parts[: len(module.parts) // module.n_experts], module.n_in
        pieces, local_first = [], 0
        for expert in range(first, first + E):
            global_first = expert * sum(parts)
            for part in parts:
                share = part // etp
                assert share * etp == part, f"{name}: {part} outputs of an expert don't split over etp={etp}"
                pieces.append(Piece((global_first + rank * share, 0), (local_first, 0), (share, n_in)))
                global_first, local_first = global_first + part, local_first + share
        total = sum(module.parts)
        if etp == 1:
            pieces = [Piece((first * sum(parts), 0), (0, 0), (local_first, n_in))]
        module.parts = tuple(part // etp for part in parts) * E
        self._expert_layout(name, module, Layout(f"{name}.weight", (total, n_in), (local_first, n_in), tuple(pieces)))

    def _expert_rows(self, name: str, module: GroupedLinear, row: Row) -> None:
        etp, rank, E, first = self._expert_place(name, module)
        n_out, share = sum(module.parts) // module.n_experts, module.n_in // etp
        assert share * etp == module.n_in, f"{name}: {module.n_in} inputs of an expert don't split over etp={etp}"
        shape = (E * n_out, share)
        piece = Piece((first * n_out, rank * share), (0, 0), shape)
        layout = Layout(f"{name}.weight", (sum(module.parts), module.n_in), shape, (piece,))
        module.parts, module.n_in = module.parts[: len(module.parts) // module.n_experts * E], share
        self._expert_layout(name, module, layout)

    def _expert_place(self, name: str, module: GroupedLinear) -> tuple[int, int, int, int]:
        """-> etp, this rank's index in it, experts that lie here, the number of the first one"""
        ep, E = self.mesh.size("ep"), module.n_experts // self.mesh.size("ep")
        assert E * ep == module.n_experts, f"{name}: {module.n_experts} experts don't split over ep={ep}"
        return self.mesh.size("etp"), self.mesh.index("etp"), E, self.mesh.index("ep") * E

    def _expert_layout(self, name: str, module: GroupedLinear, layout: Layout) -> None:
        self.layouts[layout.name] = layout
        self.experts.add(layout.name)
        module.n_experts //= self.mesh.size("ep")
        self._resize(module, name)

    def _replicated(self, name: str, shape: tuple[int, ...], *, in_part: bool | None = None) -> None:
        """`in_part`: each rank has a part of the gradient; None: under sequence parallel."""
        self.layouts[name] = whole(name, shape, replica=self.mesh.index("tp"), copies=self.mesh.size("tp"))
        if self.sequence_parallel if in_part is None else in_part:
            self.sums.append(GradientSum(name, None, self.mesh.group("tp")))

    def _become(self, module: nn.Module, twin: type[nn.Module], name: str) -> None:
        """Turns a module into its parallel twin in place: same names, this rank's shapes."""
        module.__class__ = twin
        module.group, module.sequence = self.mesh.group("tp"), self.sequence_parallel
        module.overlap = self.overlap
        self._resize(module, name)

    def _resize(self, module: nn.Module, name: str) -> None:
        """Gives a module's parameters this rank's shapes."""
        for key, parameter in list(module.named_parameters(recurse=False)):
            local = parameter.new_empty(self.layouts[f"{name}.{key}"].local_shape)
            if local.shape != parameter.shape:
                tied = getattr(parameter, "local_twin", None)
                parameter.local_twin = nn.Parameter(local) if tied is None else tied
                setattr(module, key, parameter.local_twin)

    def _split_attention(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, Attention) and hasattr(module.core, "first_head"):
                module.core.first_head = self.mesh.index("tp") * module.wqkv.parts[0] // module.d_head
