"""What a kind of GPU really reaches: seconds of the pieces of a training step, from measured tables. Torch-free.

`megaspec bench ceilings` measures a table; those in measured/ are shipped.
"""

from functools import cache
from itertools import product
from math import ceil, log2, prod
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, ValidationError, model_validator

from megaspec.core.errors import COMMAND_LINE, Problem, RecipeError
from megaspec.core.frozen import Frozen, PositiveInt
from megaspec.core.problems import one_of
from megaspec.estimate.curves import Curve, Seconds
from megaspec.estimate.hardware import HARDWARE, MEASURED_BY, Hardware

ProductKind = Literal["forward", "dgrad", "wgrad"]
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"]

_MEASURED = Path(__file__).parent / "measured"
_DEFAULT = "H200"
_MAX_FILE_BYTES = 4 * 2**20
# The tensor cores run both at one rate.
_ALIKE = {"fp16": "bf16"}
# Of a network card's rate, what large messages reach.
_NETWORK_SHARE = 0.9


class ProductCurves(Frozen):
    """Times of y = x Wᵀ and of its two gradients; sizes: rows (tokens), outputs, inputs."""

    forward: Curve
    """[M, I] x [I, O]"""
    dgrad: Curve
    """[M, O] x [O, I]"""
    wgrad: Curve
    """[O, M] x [M, I], added to a sum in at least fp32."""

    def best(self) -> float:
        """FLOP/s of the product that was fastest for its size."""
        rates = []
        for kind in get_args(ProductKind):
            curve: Curve = getattr(self, kind)
            for sizes, seconds in zip(product(*curve.sizes), curve.seconds, strict=True):
                rates.append(2 * prod(sizes) / seconds)
        return max(rates)


class AttentionCurves(Frozen):
    """Times of causal attention; sizes: size of a head, rows (tokens times query heads), length of the sequences."""

    forward: Curve
    backward: Curve


class CollectiveCurve(Frozen):
    """Times of one collective inside a node, by the bytes of the whole tensor."""

    kind: CollectiveKind
    ranks: PositiveInt
    curve: Curve


class CeilingTable(Frozen):
    """What `megaspec bench ceilings` writes. JSON both ways."""

    hardware: str
    """A name of the hardware table."""
    source: str
    """On what it was measured, and with which versions."""
    products: dict[str, ProductCurves]
    """By format of the factors."""
    grouped: ProductCurves
    """bf16; sizes: rows of one group, outputs, inputs."""
    groups: PositiveInt
    """Groups of the products of `grouped`."""
    attention: AttentionCurves
    """bf16."""
    memory: Curve
    """Element-wise work, by bytes read and written."""
    update_share: Annotated[float, Field(gt=0, le=1)]
    """The part of that rate that the optimizer's update reaches."""
    collectives: tuple[CollectiveCurve, ...] = ()
    """Every kind, or none on a machine of one GPU."""
    launch_seconds: Seconds
    """What a step takes on the host before and after its layers."""
    layer_seconds: Seconds
    """What the host needs to start the forward and backward pass of a layer."""

    @model_validator(mode="after")
    def _has_all_kinds(self) -> Self:
        lacking = set(get_args(CollectiveKind)) - {one.kind for one in self.collectives}
        if self.collectives and lacking:
            raise ValueError(f"no collective of kind {one_of(sorted(lacking))}")
        return self


class Ceilings:
    """Seconds of pieces of work on one kind of GPU, where nothing else runs beside them.

    For another kind than the table's own, matrix products are scaled by what others measured of both kinds, see
    `_sustained`, and all else by the data sheets: what one GPU reaches of its bandwidths, or of its peak in attention,
    is taken for what the other reaches.
    """

    def __init__(self, table: CeilingTable, hardware: Hardware):
        own = HARDWARE[table.hardware]
        # a machine of one GPU measures no collectives
        links = table if table.collectives else _shipped(_DEFAULT)
        self.table, self.hardware = table, hardware
        self.source = _source(table, hardware, links)
        self.launch_seconds, self.layer_seconds = table.launch_seconds, table.layer_seconds
        formats = [name for name in hardware.peak if name in own.peak]
        self._compute = {name: own.peak[name] / hardware.peak[name] for name in formats}
        self._matmul = {name: _sustained(own, name) / _sustained(hardware, name) for name in formats}
        self._memory = own.memory_bandwidth / hardware.memory_bandwidth
        self._link = HARDWARE[links.hardware].link_bandwidth / hardware.link_bandwidth
        self._collectives: dict[str, dict[int, Curve]] = {}
        for one in links.collectives:
            self._collectives.setdefault(one.kind, {})[one.ranks] = one.curve
        self._products: dict[tuple[float | str, ...], float] = {}

    def matmul_seconds(self, m: float, n: float, k: float, *, precision: str, kind: ProductKind) -> float:
        """One product of a linear layer of k inputs and n outputs over m tokens: its forward, the gradient of its
        input or of its weight. RecipeError: a format that the GPU does not have."""
        key = (m, n, k, precision, kind)
        if key not in self._products:
            curves = self._curves(precision)
            empty = min(m, n, k) <= 0
            self._products[key] = 0.0 if empty else getattr(curves, kind).at(m, n, k) * self._matmul[precision]
        return self._products[key]

    def grouped_matmul_seconds(
        self, groups: float, m: float, n: float, k: float, *, precision: str, kind: ProductKind
    ) -> float:
        """The same for `groups` experts with weights of their own, over m tokens in all."""
        if min(groups, m) <= 0:
            return 0.0
        dense = self.matmul_seconds(m, n, k, precision=precision, kind=kind)
        share = dense / self.matmul_seconds(m, n, k, precision="bf16", kind=kind)
        per_group = getattr(self.table.grouped, kind).at(m / groups, n, k) / self.table.groups
        return max(dense, per_group * groups * share * self._matmul["bf16"])

    def attention_seconds(
        self,
        *,
        tokens: float,
        seq_len: float,
        heads: float,
        kv_heads: float,
        head_size: float,
        direction: Literal["forward", "backward"],
        causal: bool = True,
        precision: str = "bf16",
    ) -> float:
        """Attention of `tokens` queries, each with `heads` heads, in sequences of `seq_len` keys."""
        if min(tokens, heads) <= 0:
            return 0.0
        curve: Curve = getattr(self.table.attention, direction)
        seconds = curve.at(head_size, tokens * heads, seq_len) * self._compute["bf16"] * (1 if causal else 2)
        if precision in ("fp32", "fp64"):
            seconds *= self.hardware.peak["bf16"] / self.hardware.peak[precision]
        # queries, results, keys and values, in the backward pass with their gradients
        moved = 2 * 2 * tokens * (heads + kv_heads) * head_size * (1 if direction == "forward" else 2)
        return max(seconds, self.memory_seconds(moved))

    def memory_seconds(self, moved: float) -> float:
        """Element-wise work that reads and writes `moved` bytes in all."""
        return self.table.memory.at(moved) * self._memory if moved > 0 else 0.0

    def update_seconds(self, moved: float) -> float:
        """The optimizer's update, which reads and writes `moved` bytes in all."""
        return self.memory_seconds(moved) / self.table.update_share

    def collective_seconds(
        self, kind: CollectiveKind, size: float, ranks: int, *, within_node: bool, ranks_per_node: int = 1
    ) -> float:
        """One collective over `ranks` GPUs. `size`: bytes of the whole tensor; of all_to_all what one rank has, of p2p
        the message.

        A group across nodes has `ranks_per_node` ranks in each: a ring uses all their network cards.
        """
        if ranks < 2 or size <= 0:
            return 0.0
        inside = self._inside(kind, size, ranks)
        if within_node:
            return inside
        nodes = max(2, ceil(ranks / ranks_per_node))
        rate = self.hardware.network_bandwidth * _NETWORK_SHARE
        if kind in ("p2p", "all_to_all"):
            leaving = size if kind == "p2p" else size * (ranks - ranks_per_node) / ranks
            outside = leaving / rate
        else:
            outside = size * _carried(kind, ranks) / (rate * ranks_per_node)
        hops = 1 if kind == "p2p" else ceil(log2(nodes)) * (2 if kind == "all_reduce" else 1)
        start = min(curve.seconds[0] for curve in self._collectives[kind].values())
        return max(inside, start + outside) + hops * self.hardware.network_latency

    def _inside(self, kind: CollectiveKind, size: float, ranks: int) -> float:
        curves = self._collectives[kind]
        measured = sorted(curves)
        nearest = max((n for n in measured if n <= ranks), default=measured[0])
        curve = curves[nearest]
        start = curve.seconds[0]
        # what twice the ranks add to a short message
        few, many = measured[0], measured[-1]
        slope = max(0.0, curves[many].seconds[0] - curves[few].seconds[0]) / max(1.0, log2(many / few))
        busy = max(0.0, curve.at(size * _carried(kind, ranks) / _carried(kind, nearest)) - start)
        return start + slope * max(0.0, log2(ranks / nearest)) + busy * self._link

    def _curves(self, precision: str) -> ProductCurves:
        curves = self.table.products.get(precision) or self.table.products.get(_ALIKE.get(precision, ""))
        if curves is None or precision not in self._matmul:
            options = one_of([name for name in self._matmul if name in self.table.products or name in _ALIKE])
            text = f"precision={precision}: {self.hardware.name} has no such matrix products; try {options}"
            raise RecipeError([Problem("precision.kind", text)])
        return curves


def _sustained(hardware: Hardware, precision: str) -> float:
    """FLOP/s of the best-shaped products of a GPU that is kept busy, up to a factor that all kinds of GPU share.

    Others measured all kinds with one program, in bursts (hardware.py). A table here is measured on a GPU that is as
    busy and as hot as in a training step. What of a burst's rate is left then is known of the H200; it is taken to be
    the same of every GPU whose power is limited, and all of it where power is not. Formats that were not measured go by
    the data sheets.
    """
    burst = hardware.best_products.get(precision)
    if burst is None:
        return hardware.peak[precision]
    return burst * _kept_when_busy(_ALIKE.get(precision, precision)) if hardware.throttles else burst


@cache
def _kept_when_busy(precision: str) -> float:
    """Of the rate of an H200's products in a burst, what the shipped table reaches: 0.90 in bf16, 0.93 in fp8."""
    return _shipped(_DEFAULT).products[precision].best() / HARDWARE[_DEFAULT].best_products[precision]


def _source(table: CeilingTable, hardware: Hardware, links: CeilingTable) -> str:
    """Where the speeds are from."""
    if table.hardware != hardware.name:
        text = f"{hardware.name}'s data sheet: of its matrix products as much as others measured ({MEASURED_BY}), of"
        return f"{text} all else as much as the {table.hardware} reaches of its own (measured on {table.source})"
    if links is not table:
        text = f"; links: {hardware.name}'s data sheet, of which as much as the {links.hardware} reaches"
        return f"measured on {table.source}{text} ({links.source})"
    return f"measured on {table.source}"


def _carried(kind: CollectiveKind, ranks: int) -> float:
    """The part of the whole tensor that each rank sends in a ring."""
    if kind == "p2p":
        return 1.0
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks


def ceilings_of(hardware: Hardware) -> Ceilings:
    """From the shipped table of this kind of GPU; where there is none, from another one's and the data sheets."""
    name = hardware.name if (_MEASURED / f"{hardware.name.lower()}.json").is_file() else _DEFAULT
    return Ceilings(_shipped(name), hardware)


def read_ceilings(path: Path, hardware: Hardware | None = None) -> Ceilings:
    """From a file that `megaspec bench ceilings` wrote, for another kind of GPU if `hardware` is one.

    RecipeError: not such a file.
    """
    table = _read(path)
    return Ceilings(table, HARDWARE[table.hardware] if hardware is None else hardware)


@cache
def _shipped(name: str) -> CeilingTable:
    return _read(_MEASURED / f"{name.lower()}.json")


def _read(path: Path) -> CeilingTable:
    way_out = "megaspec bench ceilings writes such a file"
    try:
        size = path.stat().st_size if path.is_file() else -1
        if size < 0:
            raise _refused(path, f"is no file; {way_out}")
        if size > _MAX_FILE_BYTES:
            raise _refused(path, f"has {size:,} bytes, more than {_MAX_FILE_BYTES:,}; {way_out}")
        table = CeilingTable.model_validate_json(path.read_bytes())
    except OSError as error:
        raise _refused(path, f"can't be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "its content"
        raise _refused(path, f"is no table of ceilings: {where}: {first['msg']}; {way_out}") from error
    if table.hardware not in HARDWARE:
        raise _refused(path, f"is of hardware={table.hardware}, which is not known; known are {one_of(list(HARDWARE))}")
    return table


def _refused(path: Path, what: str) -> RecipeError:
    return RecipeError([Problem("ceilings", f"ceilings={path} {what}", COMMAND_LINE)])
