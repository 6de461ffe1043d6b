"""Tensor parallelism with sequence parallelism (Shoeybi et al. 2019; Korthikanti et al. 2022).

Reads a model's placement rows and puts a parallel twin in the place of each module that they name.
"""

# B sequences, T tokens, I inputs, O outputs, V vocabulary

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaspec.core import counted
from megaspec.core.layout import Layout, Piece, whole
from megaspec.core.placement import Row
from megaspec.nn.attention.module import Attention, CausalCore, MeanSquares
from megaspec.nn.by_position import ByPosition
from megaspec.nn.embedding.module import Embedding, padded
from megaspec.nn.fp8 import Fp8Input, Fp8Slots
from megaspec.nn.head.module import OutputHead
from megaspec.nn.linear import Fp8SlotsLinearOp, Linear, bias_gradient, carrier_and_given, weight_gradient
from megaspec.nn.moe.module import GroupedLinear
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
from megaspec.parallelism.fp8_linear import Fp8ColumnLinearOp, Fp8SlotsColumnLinearOp, fp8_scatter_forward
from megaspec.parallelism.mesh import Mesh
from megaspec_kernels.cross_entropy.reference import VocabShard
from megaspec_kernels.registry import LinearKernel

# Twins are made without memory: the parameters that they hold then are put in by the strategy.
_META = torch.device("meta")


class ColumnLinearOp(torch.autograd.Function):
    """y = gather(x) Wᵀ + b with this rank's rows of W.

    Backward: the input gradient's reduction runs beside the weight gradient. With sequence parallel only this rank's
    part of x is kept, and gathered again beside the input gradient. Without `overlap` each of them runs alone.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, main_grad, products, group, sequence, overlap):
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.main_grad = main_grad
        ctx.products = products
        ctx.group = group
        ctx.sequence = sequence
        ctx.overlap = overlap
        if sequence:
            x = wait_sequence(gather_sequence(x, group))
        return products.forward(x, weight, bias)

    @staticmethod
    def backward(ctx, grad_out):
        x, weight = ctx.saved_tensors
        products = ctx.products
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        gathers = needs_weight and ctx.sequence
        # started before the input gradient's product, so that it runs beside it
        gathering = gather_sequence(x, ctx.group) if gathers else None
        if gathers and not ctx.overlap:
            gathering = wait(gathering)
        reducing = None
        if needs_x:
            # started before the weight gradient's product: the layer below waits for it, nobody for the weight gradient
            reduce = reduce_scatter_sequence if ctx.sequence else all_reduce
            reducing = reduce(products.input_gradient(grad_out, weight), ctx.group)
            if not ctx.overlap:
                reducing = wait(reducing)
        if gathers:
            x = wait_sequence(gathering)
        grad_weight = weight_gradient(ctx.main_grad, grad_out, x, products) if needs_weight else None
        grad_bias = bias_gradient(grad_out) if needs_bias else None
        grad_x = None
        if needs_x:
            grad_x = wait_sequence(reducing) if ctx.sequence else wait(reducing)
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


class ColumnParallelLinear(Linear):
    """A Linear whose outputs are split: each rank holds rows of W. `parts` are this rank's."""

    def __init__(
        self,
        n_in: int,
        *parts: int,
        bias: bool,
        residual: bool,
        group: dist.ProcessGroup,
        sequence: bool,
        overlap: bool,
    ):
        super().__init__(n_in, *parts, bias=bias, residual=residual)
        self.group = group
        self.sequence = sequence
        self.overlap = overlap

    def forward(self, x: Tensor | Fp8Input) -> Tensor:
        if self.fp8 is not None:
            carrier, given = carrier_and_given(x)
            return Fp8ColumnLinearOp.apply(
                carrier,
                self.weight,
                self.bias,
                self.main_grad,
                self.fp8,
                self.group,
                self.sequence,
                self.overlap,
                given,
            )
        return ColumnLinearOp.apply(
            x, self.weight, self.bias, self.main_grad, self.products, self.group, self.sequence, self.overlap
        )

    def with_slots(self, x: Tensor | Fp8Input) -> tuple[Tensor, Fp8Slots]:
        assert self.fp8 is not None, "the layer has products in another precision"
        assert self.bias is None, "the bias's gradient needs the output's, in more than fp8"
        carrier, given = carrier_and_given(x)
        y, *slots = Fp8SlotsColumnLinearOp.apply(
            carrier, self.weight, None, self.main_grad, self.fp8, self.group, self.sequence, self.overlap, given
        )
        return y, Fp8Slots(*slots)


class RowParallelLinear(Linear):
    """A Linear whose inputs are split: each rank holds columns of W; outputs are summed, then the bias is added.

    `n_in` are this rank's inputs.
    """

    def __init__(self, n_in: int, *parts: int, bias: bool, residual: bool, group: dist.ProcessGroup, sequence: bool):
        super().__init__(n_in, *parts, bias=bias, residual=residual)
        self.group = group
        self.sequence = sequence

    def forward(self, x: Tensor | Fp8Input) -> Tensor:
        y = self._sum(x)
        if self.bias is None:
            return y
        # once, behind the sum: every rank has the whole bias
        return y + self.bias

    def _sum(self, x: Tensor | Fp8Input) -> Tensor:
        """Of all ranks' products."""
        if self.fp8 is not None and self.sequence and self.fp8.gathers_bytes:
            # the bias is added behind the sum, and has its gradient from there
            carrier, given = carrier_and_given(x)
            y, *slots = Fp8SlotsLinearOp.apply(carrier, self.weight, self.main_grad, self.fp8, given)
            trains = self.weight.requires_grad
            return fp8_scatter_forward(y, Fp8Slots(*slots), fp8=self.fp8, group=self.group, trains=trains)
        partial = self.product(x, None)
        if self.sequence:
            return scatter_forward(partial, self.group)
        return reduce_forward(partial, self.group)


# Layers whose products are those of kernels.linear. A router's are in fp32, and experts have an operation of their own.
_OF_PRODUCTS = (Linear, ColumnParallelLinear, RowParallelLinear)


def use_products(model: nn.Module, products: LinearKernel) -> None:
    """Has the linear layers of a model, split or not, compute by an implementation of their products."""
    for module in model.modules():
        if type(module) in _OF_PRODUCTS:
            module.products = products


@dataclass(frozen=True)
class VocabRows:
    """The rows of a table over the vocabulary that one rank holds."""

    first: int
    """The token of the first one."""
    count: int
    """With those of padding."""


class VocabParallelEmbedding(Embedding):
    """An Embedding whose rows are split; rows of other ranks count zero and the results are summed."""

    def __init__(self, whole: Embedding, *, rows: VocabRows, group: dist.ProcessGroup, sequence: bool):
        """`whole`: the embedding on one device that this is a rank's part of."""
        d = whole.weight.shape[1]
        super().__init__(whole.vocab_size, d, pad_to=whole.pad_to, scale=whole.scale)
        self.weight = nn.Parameter(torch.empty(rows.count, d))
        self.first = rows.first
        self.group = group
        self.sequence = sequence

    def forward(self, tokens_BT: Tensor) -> Tensor:
        local = tokens_BT - self.first
        rows = self.weight.shape[0]
        here = (local >= 0) & (local < rows)
        # other ranks' tokens take any rows, each another: their gradients of zero are summed row by row
        any_rows = torch.arange(local.numel(), device=local.device).view(local.shape) % rows
        partial = self.scaled(self.rows(torch.where(here, local, any_rows)) * here[..., None])
        return scatter_forward(partial, self.group) if self.sequence else reduce_forward(partial, self.group)


class VocabParallelHead(OutputHead):
    """An output head whose rows are split: logits stay split, the loss sums over ranks what it needs."""

    def __init__(self, whole: OutputHead, *, rows: VocabRows, group: dist.ProcessGroup, sequence: bool):
        """`whole`: the head on one device that this is a rank's part of."""
        d = whole.weight.shape[1]
        has_bias = whole.bias is not None
        super().__init__(whole.vocab_size, d, whole.kernel, pad_to=whole.pad_to, bias=has_bias, form=whole.form)
        self.weight = nn.Parameter(torch.empty(rows.count, d))
        if has_bias:
            self.bias = nn.Parameter(torch.empty(rows.count))
        self.first = rows.first
        self.group = group
        self.sequence = sequence

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

    def whole_logits(self, x_BTD: Tensor) -> Tensor:
        local = self.logits(x_BTD)
        # the functional gather joins on the sequence's dimension: the vocabulary takes its place for once
        whole_BTV = wait_sequence(gather_sequence(local.transpose(1, 2), self.group)).transpose(1, 2)
        return whole_BTV[..., : self.vocab_size]


class ParallelMeanSquares(MeanSquares):
    """MeanSquares of heads that lie on several ranks: their sums in one message, forward and backward.

    `queries`, `keys`: features of all heads of a token, each counted once; `copies`: ranks that hold the same keys.
    """

    def __init__(self, *, queries: int, keys: int, copies: int, group: dist.ProcessGroup):
        super().__init__()
        self.queries = queries
        self.keys = keys
        self.copies = copies
        self.group = group

    def forward(self, q_BTI: Tensor, k_BTI: Tensor) -> tuple[Tensor, Tensor]:
        q_sum = q_BTI.square().sum(dim=-1)
        # each copy of a key counts for its share
        k_sum = k_BTI.square().sum(dim=-1) / self.copies
        # every rank norms its own heads by the sum, so that the gradient of the sum is one over the ranks too
        sums = reduce_forward(torch.stack((q_sum, k_sum), dim=-1), self.group)
        q_sum, k_sum = reduce_backward(sums, self.group).split(1, dim=-1)
        return q_sum / self.queries, k_sum / self.keys


@dataclass(frozen=True)
class GradientSum:
    """A part of a parameter's gradient that ranks of `group` have to add up after the backward pass."""

    name: str
    rows: slice | None
    """Of the parameter on this rank; None: all."""
    group: dist.ProcessGroup


@dataclass(frozen=True)
class _ExpertGrid:
    """Which experts of a GroupedLinear lie on this rank, and which part of each expert's matrix."""

    etp: int
    etp_index: int
    count: int
    """Experts of this rank."""
    first: int
    """The number of its first one."""


@dataclass
class TensorParallel:
    """The strategy. `split_model` fills `layouts`, one for each parameter, by global name."""

    mesh: Mesh
    sequence_parallel: bool
    overlap: bool = True
    """Reduce a layer's input gradient, and gather its input again, beside its other gradient."""
    layouts: dict[str, Layout] = field(default_factory=dict)
    sums: list[GradientSum] = field(default_factory=list)
    _modules: dict[str, nn.Module] = field(default_factory=dict, init=False)
    """The model's, by name, as they were before the split; while it lasts."""
    _local: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict, init=False)
    """This rank's part of each whole parameter that was cut: one for all modules that share it, so that what is tied
    stays tied. While the split lasts."""

    def __post_init__(self) -> None:
        self.sequence_parallel = self.sequence_parallel and self.mesh.size("tp") > 1

    def split_model(self, model: nn.Module, rows: tuple[Row, ...]) -> None:
        """Splits every module that a row names, on the meta device.

        Refuses a row that matches nothing, a module named twice and a parameter that no row covers.
        """
        self._modules = dict(model.named_modules())
        row_of = self._rows_by_module(rows)
        names = [name for name, _ in model.named_parameters()]
        for name in names:
            assert name.rpartition(".")[0] in row_of, f"no placement row covers the parameter {name}"
        self._check_positions(row_of)
        for name, row in row_of.items():
            self._split(name, self._modules[name], row)
        if self.mesh.size("tp") > 1:
            self._number_heads(model)
        # rows speak of biases that a model may not have, and of tied weights under both of their names
        self.layouts = {name: self.layouts[name] for name in names}
        self.sums = [one for one in self.sums if one.name in self.layouts]
        self._modules = {}
        self._local = {}

    @property
    def summed_later(self) -> frozenset[str]:
        """The parameters whose gradients `finish_grads` adds up."""
        return frozenset(one.name for one in self.sums)

    def finish_grads(self, gradients: Mapping[str, Tensor], rows: Callable[[str], slice]) -> None:
        """Adds up the gradients that ranks hold in part: tokens were split, or a key/value head is held twice.

        `rows(name)`: the rows of the parameter that `gradients[name]` holds, the same on all ranks of a group.
        """
        parts_of: dict[dist.ProcessGroup, list[Tensor]] = {}
        for one in self.sums:
            if one.name not in gradients:
                continue
            held = rows(one.name)
            wanted = held if one.rows is None else one.rows
            # of the wanted rows those that lie here, counted from the first one that does
            first = max(wanted.start, held.start) - held.start
            last = min(wanted.stop, held.stop) - held.start
            if first < last:
                parts_of.setdefault(one.group, []).append(gradients[one.name][first:last])
        for group, parts in parts_of.items():
            # many small gradients: one message
            flat = torch.cat([part.reshape(-1) for part in parts])
            counted.all_reduce(flat, group=group)
            sizes = [part.numel() for part in parts]
            for part, summed in zip(parts, flat.split(sizes), strict=True):
                part.copy_(summed.view_as(part))

    def _rows_by_module(self, rows: tuple[Row, ...]) -> dict[str, Row]:
        """The row of each module that one names."""
        row_of: dict[str, Row] = {}
        for row in rows:
            pattern = re.compile(re.escape(row.pattern).replace(r"\*", r"[^.]+"))
            names = [name for name in self._modules if pattern.fullmatch(name)]
            assert names, f"placement row {row.pattern!r} matches no module"
            for name in names:
                assert name not in row_of, f"{name} is named by {row_of[name].pattern!r} and {row.pattern!r}"
                row_of[name] = row
        return row_of

    def _check_positions(self, row_of: Mapping[str, Row]) -> None:
        """Every module that asks for the places of its tokens is told which of them are here: one that was passed over
        would take the first ranks' places for its own, without a word."""
        for name, module in self._modules.items():
            if isinstance(module, ByPosition):
                kind = row_of[name].kind if name in row_of else None
                text = f"{name} ({type(module).__name__}) acts by its tokens' places"
                assert kind == "sequence", f"{text}, which needs a placement row sequence, found {kind}"

    def _split(self, name: str, module: nn.Module, row: Row) -> None:
        split = {
            "columns": self._columns,
            "rows": self._rows,
            "vocab": self._vocab,
            "sequence": self._sequence,
            "heads": self._heads,
            "head_vector": self._head_vector,
            "heads_whole": self._heads_whole,
            "expert_columns": self._expert_columns,
            "expert_rows": self._expert_rows,
        }
        split[row.kind](name, module, row)

    def _columns(self, name: str, module: Linear, row: Row) -> None:
        tp = self.mesh.size("tp")
        rank = self.mesh.index("tp")
        weight = f"{name}.weight"
        bias = f"{name}.bias"
        weight_pieces: list[Piece] = []
        bias_pieces: list[Piece] = []
        local_parts: list[int] = []
        global_first = 0
        for part, heads in zip(module.parts, row.heads_per_part or (None,) * len(module.parts), strict=True):
            copies = self._copies(name, part, heads)
            share = part * copies // tp
            # outputs of the whole layer, and rows of this rank's weight, that the share begins with
            start = global_first + rank // copies * share
            local_first = sum(local_parts)
            replica = rank % copies
            weight_pieces.append(Piece((start, 0), (local_first, 0), (share, module.n_in), replica, copies))
            bias_pieces.append(Piece((start,), (local_first,), (share,), replica, copies))
            if copies > 1:
                held = slice(local_first, local_first + share)
                group = self.mesh.neighbours("tp", copies)
                self.sums += [GradientSum(weight, held, group), GradientSum(bias, held, group)]
            local_parts.append(share)
            global_first += part
        n_out = sum(module.parts)
        n_here = sum(local_parts)
        self.layouts[weight] = Layout(weight, (n_out, module.n_in), (n_here, module.n_in), tuple(weight_pieces))
        self.layouts[bias] = Layout(bias, (n_out,), (n_here,), tuple(bias_pieces))
        if tp > 1:
            with _META:
                twin = ColumnParallelLinear(
                    module.n_in,
                    *local_parts,
                    bias=module.bias is not None,
                    residual=module.residual,
                    group=self.mesh.group("tp"),
                    sequence=self.sequence_parallel,
                    overlap=self.overlap,
                )
            self._put(name, module, twin)

    def _copies(self, name: str, part: int, heads: int | None) -> int:
        """Ranks that hold the same outputs of a part: more than one where there are fewer heads than ranks."""
        tp = self.mesh.size("tp")
        fits = heads is None or heads % tp == 0
        refusal = f"{name}: {part} outputs ({heads} heads) don't split over tp={tp}"
        assert fits or tp % heads == 0, refusal
        copies = 1 if fits else tp // heads
        assert part * copies % tp == 0, refusal
        return copies

    def _rows(self, name: str, module: Linear, row: Row) -> None:
        tp = self.mesh.size("tp")
        rank = self.mesh.index("tp")
        n_out = sum(module.parts)
        share = module.n_in // tp
        assert share * tp == module.n_in, f"{name}: {module.n_in} inputs don't split over tp={tp}"
        piece = Piece((0, rank * share), (0, 0), (n_out, share))
        self.layouts[f"{name}.weight"] = Layout(f"{name}.weight", (n_out, module.n_in), (n_out, share), (piece,))
        self._replicated(f"{name}.bias", (n_out,), in_part=self.sequence_parallel)
        if tp > 1:
            with _META:
                twin = RowParallelLinear(
                    share,
                    *module.parts,
                    bias=module.bias is not None,
                    residual=module.residual,
                    group=self.mesh.group("tp"),
                    sequence=self.sequence_parallel,
                )
            self._put(name, module, twin)

    def _vocab(self, name: str, module: Embedding | OutputHead, row: Row) -> None:
        tp, rank = self.mesh.size("tp"), self.mesh.index("tp")
        d = module.weight.shape[1]
        # every rank has as many rows, so the table is padded to a multiple of all of them
        count = padded(module.vocab_size, module.pad_to * tp) // tp
        first = rank * count
        valid = min(max(module.vocab_size - first, 0), count)
        pieces = (Piece((first, 0), (0, 0), (valid, d)),) if valid else ()
        self.layouts[f"{name}.weight"] = Layout(f"{name}.weight", (module.vocab_size, d), (count, d), pieces)
        bias_pieces = (Piece((first,), (0,), (valid,)),) if valid else ()
        self.layouts[f"{name}.bias"] = Layout(f"{name}.bias", (module.vocab_size,), (count,), bias_pieces)
        if tp > 1:
            self._put(name, module, self._vocab_twin(module, VocabRows(first, count)))

    def _vocab_twin(
        self, module: Embedding | OutputHead, rows: VocabRows
    ) -> VocabParallelEmbedding | VocabParallelHead:
        twin = VocabParallelEmbedding if isinstance(module, Embedding) else VocabParallelHead
        with _META:
            return twin(module, rows=rows, group=self.mesh.group("tp"), sequence=self.sequence_parallel)

    def _sequence(self, name: str, module: nn.Module, row: Row) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            self._replicated(f"{name}.{key}", tuple(parameter.shape), in_part=self.sequence_parallel)
        if self.sequence_parallel and isinstance(module, ByPosition):
            module.part = (self.mesh.index("tp"), self.mesh.size("tp"))

    def _heads(self, name: str, module: nn.Module, row: Row) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            self._replicated(f"{name}.{key}", tuple(parameter.shape), in_part=self.mesh.size("tp") > 1)

    def _head_vector(self, name: str, module: nn.Module, row: Row) -> None:
        tp = self.mesh.size("tp")
        rank = self.mesh.index("tp")
        (heads,) = row.heads_per_part
        for key, parameter in module.named_parameters(recurse=False):
            path = f"{name}.{key}"
            (size,) = parameter.shape
            copies = self._copies(path, size, heads)
            share = size * copies // tp
            piece = Piece((rank // copies * share,), (0,), (share,), rank % copies, copies)
            self.layouts[path] = Layout(path, (size,), (share,), (piece,))
            if copies > 1:
                self.sums.append(GradientSum(path, None, self.mesh.neighbours("tp", copies)))
        self._cut(name, module, module)

    def _heads_whole(self, name: str, module: MeanSquares, row: Row) -> None:
        tp = self.mesh.size("tp")
        if tp == 1:
            return
        parent, _, _ = name.rpartition(".")
        attention = self._modules[parent]
        queries, keys = (heads * attention.d_head for heads in row.heads_per_part)
        copies = self._copies(name, keys, row.heads_per_part[1])
        twin = ParallelMeanSquares(queries=queries, keys=keys, copies=copies, group=self.mesh.group("tp"))
        self._put(name, module, twin)

    def _expert_columns(self, name: str, module: GroupedLinear, row: Row) -> None:
        grid = self._expert_grid(name, module)
        # of one expert
        parts = module.parts[: len(module.parts) // module.n_experts]
        n_in = module.n_in
        pieces: list[Piece] = []
        bias_pieces: list[Piece] = []
        local_first = 0
        for expert in range(grid.first, grid.first + grid.count):
            global_first = expert * sum(parts)
            for part in parts:
                share = part // grid.etp
                refusal = f"{name}: {part} outputs of an expert don't split over etp={grid.etp}"
                assert share * grid.etp == part, refusal
                start = global_first + grid.etp_index * share
                pieces.append(Piece((start, 0), (local_first, 0), (share, n_in)))
                bias_pieces.append(Piece((start,), (local_first,), (share,)))
                global_first += part
                local_first += share
        if grid.etp == 1:
            # whole experts, one below the other: one rectangle
            pieces = [Piece((grid.first * sum(parts), 0), (0, 0), (local_first, n_in))]
            bias_pieces = [Piece((grid.first * sum(parts),), (0,), (local_first,))]
        weight = f"{name}.weight"
        bias = f"{name}.bias"
        n_out = sum(module.parts)
        self.layouts[weight] = Layout(weight, (n_out, n_in), (local_first, n_in), tuple(pieces))
        self.layouts[bias] = Layout(bias, (n_out,), (local_first,), tuple(bias_pieces))
        module.parts = tuple(part // grid.etp for part in parts) * grid.count
        module.n_experts = grid.count
        if grid.etp > 1:
            module.split = "outputs"
        self._cut(name, module, module)

    def _expert_rows(self, name: str, module: GroupedLinear, row: Row) -> None:
        grid = self._expert_grid(name, module)
        n_out = sum(module.parts) // module.n_experts
        share = module.n_in // grid.etp
        refusal = f"{name}: {module.n_in} inputs of an expert don't split over etp={grid.etp}"
        assert share * grid.etp == module.n_in, refusal
        shape = (grid.count * n_out, share)
        piece = Piece((grid.first * n_out, grid.etp_index * share), (0, 0), shape)
        weight = f"{name}.weight"
        self.layouts[weight] = Layout(weight, (sum(module.parts), module.n_in), shape, (piece,))
        self._expert_row_bias(name, module, grid)
        parts_of_expert = len(module.parts) // module.n_experts
        module.parts = module.parts[: parts_of_expert * grid.count]
        module.n_in = share
        module.n_experts = grid.count
        if grid.etp > 1:
            module.split = "inputs"
        self._cut(name, module, module)

    def _expert_row_bias(self, name: str, module: GroupedLinear, grid: _ExpertGrid) -> None:
        """Whole on all ranks that hold a part of an expert, of which the first one adds it: so it has the gradient."""
        bias = f"{name}.bias"
        n_out = sum(module.parts) // module.n_experts
        rows = grid.count * n_out
        piece = Piece((grid.first * n_out,), (0,), (rows,), grid.etp_index, grid.etp)
        self.layouts[bias] = Layout(bias, (sum(module.parts),), (rows,), (piece,))
        module.adds_bias = grid.etp_index == 0
        if grid.etp > 1:
            self.sums.append(GradientSum(bias, None, self.mesh.group("etp")))

    def _expert_grid(self, name: str, module: GroupedLinear) -> _ExpertGrid:
        ep = self.mesh.size("ep")
        count = module.n_experts // ep
        assert count * ep == module.n_experts, f"{name}: {module.n_experts} experts don't split over ep={ep}"
        first = self.mesh.index("ep") * count
        return _ExpertGrid(self.mesh.size("etp"), self.mesh.index("etp"), count, first)

    def _replicated(self, name: str, shape: tuple[int, ...], *, in_part: bool) -> None:
        """Every rank has the whole parameter; with `in_part` a part of its gradient."""
        self.layouts[name] = whole(name, shape, replica=self.mesh.index("tp"), copies=self.mesh.size("tp"))
        if in_part:
            self.sums.append(GradientSum(name, None, self.mesh.group("tp")))

    def _put(self, name: str, module: nn.Module, twin: nn.Module) -> None:
        """Puts a parallel twin into the place of a module, under the same name."""
        self._cut(name, module, twin)
        parent, _, key = name.rpartition(".")
        setattr(self._modules[parent], key, twin)

    def _cut(self, name: str, module: nn.Module, twin: nn.Module) -> None:
        """Gives the twin, which may be the module itself, this rank's part of each of the module's parameters."""
        for key, parameter in list(module.named_parameters(recurse=False)):
            local_shape = self.layouts[f"{name}.{key}"].local_shape
            if tuple(parameter.shape) == local_shape:
                setattr(twin, key, parameter)
                continue
            if parameter not in self._local:
                self._local[parameter] = nn.Parameter(parameter.new_empty(local_shape))
            setattr(twin, key, self._local[parameter])

    def _number_heads(self, model: nn.Module) -> None:
        """Tells attention which heads are here: dropout masks go by their numbers in the whole model."""
        unnumbered = {name for name, module in model.named_modules() if isinstance(module, CausalCore)}
        for name, module in model.named_modules():
            if isinstance(module, Attention):
                text = f"{name}.core is a {type(module.core).__name__}, which can't be told which heads are here"
                assert isinstance(module.core, CausalCore), f"{text}; derive it from CausalCore"
                module.core.first_head = self.mesh.index("tp") * module.local_heads
                unnumbered.discard(f"{name}.core")
        assert not unnumbered, f"{sorted(unnumbered)} are no Attention's core: nobody counts their heads"
