"""What a kind of GPU really reaches: seconds of the pieces of a training step, from measured tables. Torch-free.

`megaspec bench throughput` measures a table; those in measured/ are shipped.
"""

from functools import cache, cached_property
from itertools import product
from math import ceil, log2, prod
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, ValidationError, model_validator

from megaspec.core.errors import COMMAND_LINE, Problem, RecipeError
from megaspec.core.frozen import Frozen, PositiveInt
from megaspec.core.problems import one_of
from megaspec.estimate.attention_rates import AttentionRate, one_order_as_on
from megaspec.estimate.curves import Curve, Seconds
from megaspec.estimate.hardware import HARDWARE, MEASURED_BY, Hardware
from megaspec.estimate.topology import CollectiveKind

ProductKind = Literal["forward", "dgrad", "wgrad"]

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


class MeasuredNetwork(Frozen):
    """What the network cards between nodes were measured to carry (`megaspec doctor --out` on several nodes)."""

    bandwidth: Annotated[float, Field(gt=0, le=1e15)]
    """Bytes per second of one GPU in one direction, while all GPUs of its node send."""
    latency: Seconds
    """Seconds of a short message."""


class ThroughputTable(Frozen):
    """What `megaspec bench throughput` writes. JSON both ways."""

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
    attention_rates: tuple[AttentionRate, ...] = ()
    """Of every implementation that ran where they were measured; earlier tables have none."""
    attention_source: str = ""
    """On what these were measured, where they were measured alone; empty: with the rest."""
    memory: Curve
    """Element-wise work, by bytes read and written."""
    update_share: Annotated[float, Field(gt=0, le=1)]
    """The part of that rate that the optimizer's update reaches."""
    collectives: tuple[CollectiveCurve, ...] = ()
    """Every kind, or none on a machine of one GPU."""
    network: MeasuredNetwork | None = Field(None, exclude_if=lambda network: network is None)
    """Between nodes; null: as the data sheet says."""
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


class MeasuredThroughput:
    """Seconds of pieces of work on one kind of GPU, where nothing else runs beside them.

    For another kind than the table's own, matrix products are scaled by what others measured of both kinds, see
    `_sustained`, and all else by the data sheets: what one GPU reaches of its bandwidths, or of its peak in attention,
    is taken for what the other reaches.
    """

    def __init__(self, table: ThroughputTable, hardware: Hardware):
        measured = HARDWARE[table.hardware]
        # a machine of one GPU measures no collectives
        links = table
        if not table.collectives:
            links = _shipped(_DEFAULT)
        self.table = table
        self.hardware = hardware
        self.source = _source(table, hardware, links)
        self.launch_seconds = table.launch_seconds
        self.layer_seconds = table.layer_seconds
        # seconds here over seconds on the measured GPU: of arithmetic and of matrix products by format, of memory and
        # of links
        self._compute: dict[str, float] = {}
        self._matmul: dict[str, float] = {}
        for name, peak in hardware.peak.items():
            if name in measured.peak:
                self._compute[name] = measured.peak[name] / peak
                self._matmul[name] = _sustained(measured, name) / _sustained(hardware, name)
        self._memory = measured.memory_bandwidth / hardware.memory_bandwidth
        self._link = HARDWARE[links.hardware].link_bandwidth / hardware.link_bandwidth
        # by kind and number of ranks
        self._collectives: dict[str, dict[int, Curve]] = {}
        for one in links.collectives:
            self._collectives.setdefault(one.kind, {})[one.ranks] = one.curve
        # between nodes: bytes per second of a rank, and seconds of a short message
        self._network_rate = hardware.network_bandwidth * _NETWORK_SHARE
        self._network_latency = hardware.network_latency
        if table.network is not None and table.hardware == hardware.name:
            self._network_rate = table.network.bandwidth
            self._network_latency = table.network.latency
        self._products: dict[tuple[float | str, ...], float] = {}

    @cached_property
    def attention_rates(self) -> tuple[AttentionRate, ...]:
        """Of this kind of GPU, without any where it was not measured: on another, another implementation may be the
        fastest. Those in one order of sums may be reckoned, see `one_order_measured_on`."""
        if self.table.hardware != self.hardware.name:
            return ()
        rates = self.table.attention_rates
        if self.one_order_measured_on != self.hardware.name:
            rates += tuple(one_order_as_on(_shipped(_DEFAULT).attention_rates, rates))
        return rates

    @property
    def one_order_measured_on(self) -> str:
        """The kind of GPU on which attention in one order of sums was measured: where a table has none of it, one of
        the same architecture whose table ships."""
        has_rates = self.table.hardware == self.hardware.name and self.table.attention_rates
        is_measured = any(rate.deterministic for rate in self.table.attention_rates)
        if has_rates and not is_measured and self.hardware.sm == HARDWARE[_DEFAULT].sm:
            return _DEFAULT
        return self.hardware.name

    def matmul_seconds(self, m: float, n: float, k: float, *, precision: str, kind: ProductKind) -> float:
        """One product of a linear layer of k inputs and n outputs over m tokens: its forward, the gradient of its
        input or of its weight. RecipeError: a format that the GPU does not have."""
        key = (m, n, k, precision, kind)
        if key not in self._products:
            self._products[key] = self._product_seconds(m, n, k, precision, kind)
        return self._products[key]

    def _product_seconds(self, m: float, n: float, k: float, precision: str, kind: ProductKind) -> float:
        curve: Curve = getattr(self._curves(precision), kind)
        if min(m, n, k) <= 0:
            return 0.0
        return curve.at(m, n, k) * self._matmul[precision]

    def grouped_matmul_seconds(
        self, groups: float, m: float, n: float, k: float, *, precision: str, kind: ProductKind
    ) -> float:
        """The same for `groups` experts with weights of their own, over m tokens in all. Measured in bf16; another
        format takes as much more or less as one dense product does."""
        if min(groups, m) <= 0:
            return 0.0
        dense = self.matmul_seconds(m, n, k, precision=precision, kind=kind)
        against_bf16 = dense / self.matmul_seconds(m, n, k, precision="bf16", kind=kind)
        per_group = getattr(self.table.grouped, kind).at(m / groups, n, k) / self.table.groups
        return max(dense, per_group * groups * against_bf16 * self._matmul["bf16"])

    @property
    def shortest_attention(self) -> float:
        """Tokens of the shortest sequences that attention was measured of."""
        return self.table.attention.forward.sizes[2][0]

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
        seconds = curve.at(head_size, tokens * heads, seq_len) * self._compute["bf16"]
        if not causal:
            # both halves of the scores
            seconds *= 2
        if precision in ("fp32", "fp64"):
            seconds *= self.hardware.peak["bf16"] / self.hardware.peak[precision]
        # bytes of queries, results, keys and values, 2 a number; in the backward pass with their gradients
        moved = 2 * 2 * tokens * (heads + kv_heads) * head_size
        if direction == "backward":
            moved *= 2
        return max(seconds, self.memory_seconds(moved))

    def memory_seconds(self, moved: float) -> float:
        """Element-wise work that reads and writes `moved` bytes in all."""
        if moved <= 0:
            return 0.0
        return self.table.memory.at(moved) * self._memory

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
        inside = self._inside_node(kind, size, ranks)
        if within_node:
            return inside
        # bytes per second of a rank
        rate = self._network_rate
        if kind == "p2p":
            outside = size / rate
        elif kind == "all_to_all":
            # what is for ranks of other nodes
            outside = size * (ranks - ranks_per_node) / ranks / rate
        else:
            outside = size * _sent_share(kind, ranks) / (rate * ranks_per_node)
        start = min(curve.seconds[0] for curve in self._collectives[kind].values())
        latency = _hops(kind, max(2, ceil(ranks / ranks_per_node))) * self._network_latency
        # both links carry at once; the slower one counts
        return max(inside, start + outside) + latency

    def _inside_node(self, kind: CollectiveKind, size: float, ranks: int) -> float:
        """Seconds over NVLink: what a short message takes, which grows with the logarithm of the ranks, and what the
        bytes add, from the measured number of ranks that is nearest."""
        curves = self._collectives[kind]
        measured = sorted(curves)
        nearest = max((n for n in measured if n <= ranks), default=measured[0])
        curve = curves[nearest]
        start = curve.seconds[0]
        # what twice the ranks add to a short message
        fewest = measured[0]
        most = measured[-1]
        slope = max(0.0, curves[most].seconds[0] - curves[fewest].seconds[0]) / max(1.0, log2(most / fewest))
        # a rank sends as much as one of the nearest number of ranks does of a tensor of this size
        alike = size * _sent_share(kind, ranks) / _sent_share(kind, nearest)
        busy = max(0.0, curve.at(alike) - start)
        return start + slope * max(0.0, log2(ranks / nearest)) + busy * self._link

    def _curves(self, precision: str) -> ProductCurves:
        curves = self.table.products.get(precision) or self.table.products.get(_ALIKE.get(precision, ""))
        if curves is None or precision not in self._matmul:
            offered = [name for name in self._matmul if name in self.table.products or name in _ALIKE]
            options = one_of(offered)
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
    if not hardware.throttles:
        return burst
    return burst * _kept_when_busy(_ALIKE.get(precision, precision))


@cache
def _kept_when_busy(precision: str) -> float:
    """Of the rate of an H200's products in a burst, what the shipped table reaches: 0.90 in bf16, 0.93 in fp8."""
    return _shipped(_DEFAULT).products[precision].best() / HARDWARE[_DEFAULT].best_products[precision]


def _source(table: ThroughputTable, hardware: Hardware, links: ThroughputTable) -> str:
    """Where the speeds are from."""
    if table.hardware != hardware.name:
        text = f"{hardware.name}'s data sheet: of its matrix products as much as others measured ({MEASURED_BY}), of"
        return f"{text} all else as much as the {table.hardware} reaches of its own (measured on {table.source})"
    if links is not table:
        text = f"; links: {hardware.name}'s data sheet, of which as much as the {links.hardware} reaches"
        return f"measured on {table.source}{text} ({links.source})"
    return f"measured on {table.source}"


def _sent_share(kind: CollectiveKind, ranks: int) -> float:
    """The part of the whole tensor that each rank sends in a ring: see Collective.sent."""
    if kind == "p2p":
        return 1.0
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks


def _hops(kind: CollectiveKind, nodes: int) -> int:
    """Messages between nodes that wait for each other: the depth of a tree, up and down in an all-reduce."""
    if kind == "p2p":
        return 1
    depth = ceil(log2(nodes))
    if kind == "all_reduce":
        return 2 * depth
    return depth


def throughput_of(hardware: Hardware) -> MeasuredThroughput:
    """From the shipped table of this kind of GPU; where there is none, from another one's and the data sheets."""
    table = shipped_table(hardware.name) or _shipped(_DEFAULT)
    return MeasuredThroughput(table, hardware)


def read_throughput(path: Path, hardware: Hardware | None = None) -> MeasuredThroughput:
    """From a file that `megaspec bench throughput` wrote, for another kind of GPU if `hardware` is one.

    RecipeError: not such a file.
    """
    table = _read(path)
    if hardware is None:
        hardware = HARDWARE[table.hardware]
    return MeasuredThroughput(table, hardware)


@cache
def _shipped(name: str) -> ThroughputTable:
    return _read(_MEASURED / f"{name.lower()}.json")


def shipped_table(name: str) -> ThroughputTable | None:
    """The table of a kind of GPU that ships; None where none does."""
    if not (_MEASURED / f"{name.lower()}.json").is_file():
        return None
    return _shipped(name)


def read_table(path: Path) -> ThroughputTable:
    """Of a file that `megaspec bench throughput` or `megaspec doctor --out` wrote. RecipeError: not such a file."""
    return _read(path)


def _read(path: Path) -> ThroughputTable:
    way_out = "megaspec bench throughput writes such a file"
    try:
        if not path.is_file():
            raise _refused(path, f"is no file; {way_out}")
        size = path.stat().st_size
        if size > _MAX_FILE_BYTES:
            raise _refused(path, f"has {size:,} bytes, more than {_MAX_FILE_BYTES:,}; {way_out}")
        table = ThroughputTable.model_validate_json(path.read_bytes())
    except OSError as error:
        raise _refused(path, f"can't be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "its content"
        raise _refused(path, f"is no table of measured throughput: {where}: {first['msg']}; {way_out}") from error
    if table.hardware not in HARDWARE:
        raise _refused(path, f"is of hardware={table.hardware}, which is not known; known are {one_of(list(HARDWARE))}")
    return table


def _refused(path: Path, what: str) -> RecipeError:
    return RecipeError([Problem("throughput", f"throughput={path} {what}", COMMAND_LINE)])
