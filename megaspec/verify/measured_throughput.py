"""Measures what the GPUs at hand reach: the table that estimate/throughput.py reads."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle, pairwise, product
from math import ceil
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaspec.data.batch import Batch
from megaspec.estimate.attention_rates import (
    HEAD_SIZES,
    HEADS,
    KV_HEADS,
    AttentionKind,
    AttentionRate,
    is_plain,
)
from megaspec.estimate.curves import Curve, never_faster
from megaspec.estimate.hardware import Hardware
from megaspec.estimate.target import Target
from megaspec.estimate.throughput import AttentionCurves, CollectiveCurve, ProductCurves, ThroughputTable
from megaspec.parallelism.mesh import Mesh
from megaspec.precision.scaler import build_scaler
from megaspec.recipe import Recipe
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec.runtime.build import DTYPES, build, initialise
from megaspec.runtime.step import train_step
from megaspec_kernels.attention.bench import packed_documents
from megaspec_kernels.attention.sdpa import attention
from megaspec_kernels.catalog import CATALOG, Use, runs_on, unmet
from megaspec_kernels.product import add_product_
from megaspec_kernels.registry import REGISTRY, AttentionKernel

# m tokens, n outputs, k inputs of a linear layer: forward [m, k] [k, n], dgrad [m, n] [n, k], wgrad [n, m] [m, k]

# Where curves are measured; between these sizes, most of them powers of two, times are interpolated.
# Tokens and sides of weights, in bf16.
ROWS = (512, 1024, 2048, 4096, 8192, 16384)
SIDES = (256, 512, 1024, 2048, 4096, 8192, 16384)
# The same in other formats and in grouped products.
FEW_ROWS = (1024, 4096, 16384)
FEW_SIDES = (512, 2048, 8192)
# Experts of a grouped product, and rows of each.
GROUPS = 64
GROUP_ROWS = (64, 256, 1024, 4096)
# Attention: rows (tokens times heads), lengths of a sequence.
HEAD_ROWS = tuple(2**p for p in range(15, 21))
LENGTHS = (512, 1024, 2048, 4096, 8192)
# Every implementation of attention over a row of so many tokens: what each query sees, by kind.
RATE_TOKENS = 8192
SEEN: dict[AttentionKind, tuple[int, ...]] = {
    "causal": (RATE_TOKENS,),
    "window": (128, 1024),
    "documents": (256, 1024, 4096),
}
# Seconds that products run before what is timed, and what the host may take for a call over what it took for one.
AHEAD = 0.01
QUEUED_LATER = 1.25
# Bytes that element-wise work reads and writes.
MOVED = tuple(2**p for p in range(18, 33, 2))
# Bytes of a collective.
MESSAGES = (2**12, *(2**p for p in range(16, 29, 2)), 2**29)


class Stopwatch:
    """Times work on a GPU that is as busy and as hot as in a training step.

    Products run before what is timed and after it: they hold the clocks where heavy work holds them, and while they
    run the host queues what is timed, so that none of it waits for the host. Where that takes the host longer than the
    products run, as it does for work of many small kernels, the GPU waits behind them for the rest.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.bfloat16):
        self._a = torch.randn(4096, 4096, device=device, dtype=dtype)
        self._b = torch.randn(4096, 4096, device=device, dtype=dtype)
        self._c = torch.empty_like(self._a)
        # a GPU that did nothing is at a fraction of its clock
        for _ in range(100):
            self._product()
        self._cycles = _cycles_per_second()
        # products that run before what is timed: one to find out how many make 10 ms
        self._ahead = 1
        self._ahead = max(1, ceil(AHEAD / self.seconds(self._product, calls=5)))

    def _product(self) -> None:
        torch.mm(self._a, self._b, out=self._c)

    def _keep_busy(self) -> None:
        for _ in range(self._ahead):
            self._product()

    def _wait(self, seconds: float) -> None:
        """Keeps the GPU waiting, not the host."""
        if seconds > 0:
            torch.cuda._sleep(ceil(seconds * self._cycles))

    def seconds(self, work: Callable[[], object], *, calls: int | None = None) -> float:
        """The median of three runs of `calls` calls each, for one call; None: as many as take about 2 ms.

        The median for all that is measured: no run waits for a host that is as fast as it was before, and one that
        something else delayed, or that a collective spent waiting for a rank whose GPU waited longer, is left out. What
        a plan adds up is what work takes as a rule, not at best, which the minimum would be; and its constants were set
        on tables of medians.
        """
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        # the first call may compile; the second one is as those that are timed
        work()
        events[0].record()
        started = perf_counter()
        work()
        queued = perf_counter() - started
        events[1].record()
        events[1].synchronize()
        if calls is None:
            # events count milliseconds
            calls = max(2, min(20, int(2.0 / events[0].elapsed_time(events[1]))))
        self._keep_busy()
        self._wait(QUEUED_LATER * 3 * calls * queued - AHEAD)
        events[0].record()
        for event in events[1:]:
            for _ in range(calls):
                work()
            event.record()
        self._keep_busy()
        events[-1].synchronize()
        runs = [start.elapsed_time(end) for start, end in pairwise(events)]
        return max(1e-9, median(runs) / calls / 1e3)


def _cycles_per_second() -> float:
    """Of the clock that torch.cuda._sleep counts."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    cycles = 20_000_000
    # the first one loads the kernel
    torch.cuda._sleep(1)
    events[0].record()
    torch.cuda._sleep(cycles)
    events[1].record()
    events[1].synchronize()
    # events count milliseconds
    return cycles / (events[0].elapsed_time(events[1]) / 1e3)


def measure(
    hardware: Hardware, *, device: torch.device, target: Target, tell: Callable[[str], None]
) -> ThroughputTable:
    """The table of this GPU, and of the links of the world's GPUs where there are several; every rank calls it.

    `tell` hears what is measured next. About three minutes; more where FlashAttention-4 is installed, which compiles.
    """
    products = {}
    for name in ("bf16", "fp8", "fp32", "fp64"):
        if name in hardware.peak:
            tell(f"{name} products")
            products[name] = measure_products(name, device)
    tell("grouped products")
    watch = Stopwatch(device)
    grouped = measure_grouped(watch, device)
    tell("attention and element-wise work")
    heads = measure_attention(watch, device)
    rates = tuple(measure_attention_rates(watch, device, target, tell=tell))
    moved = measure_memory(watch, device)
    tell("collectives")
    world = 1
    ranks_of_node = 1
    if dist.is_initialized():
        world = dist.get_world_size()
        ranks_of_node = target.local_ranks or 1
    collectives = tuple(measure_collectives(watch, device, ranks_of_node))
    tell("what the host needs")
    launch, layer = measure_host(device, target.model_copy(update={"world_size": None, "gpus": 1}))
    return ThroughputTable(
        hardware=hardware.name,
        source=source_of(device, world),
        products=products,
        grouped=grouped,
        groups=GROUPS,
        attention=heads,
        attention_rates=rates,
        memory=moved,
        update_share=min(1.0, _rounded(measure_update(watch, device, moved))),
        collectives=collectives,
        launch_seconds=_rounded(launch),
        layer_seconds=_rounded(layer),
    )


def with_attention(
    table: ThroughputTable,
    *,
    device: torch.device,
    target: Target,
    tell: Callable[[str], None],
    seconds: float | None = None,
) -> ThroughputTable:
    """The table with what every implementation of attention takes here; all else stays. `seconds`: see
    measure_attention_rates."""
    rates = tuple(measure_attention_rates(Stopwatch(device), device, target, tell=tell, seconds=seconds))
    return table.model_copy(update={"attention_rates": rates, "attention_source": source_of(device, 1)})


def source_of(device: torch.device, world: int) -> str:
    """On what is measured."""
    return f"{world} x {torch.cuda.get_device_name(device)}, torch {torch.__version__}"


def table_text(table: ThroughputTable) -> str:
    """The table as JSON, one line for each of its parts."""
    lines = []
    for name, part in table.model_dump(mode="json").items():
        lines.append(f"{json.dumps(name)}: {json.dumps(part)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def measure_products(name: str, device: torch.device) -> ProductCurves:
    """Forward, input gradient and weight gradient of linear layers with factors in one format."""
    sizes = (ROWS, SIDES, SIDES) if name == "bf16" else (FEW_ROWS, FEW_SIDES, FEW_SIDES)
    works = fp8_products if name == "fp8" else plain_products
    dtype = DTYPES.get(name, torch.bfloat16)
    watch = Stopwatch(device, dtype)
    # numbers enough for the largest of each, of which every size takes the first
    most_m, most_n, most_k = map(max, sizes)
    x_pool = torch.randn(most_m * most_k, device=device, dtype=dtype)
    weight_pool = torch.randn(most_n * most_k, device=device, dtype=dtype)
    y_pool = torch.randn(most_m * most_n, device=device, dtype=dtype)
    times: dict[str, list[float]] = {"forward": [], "dgrad": [], "wgrad": []}
    for m, n, k in product(*sizes):
        x = x_pool[: m * k].view(m, k)
        weight = weight_pool[: n * k].view(n, k)
        y = y_pool[: m * n].view(m, n)
        for kind, work in works(x, weight, y).items():
            times[kind].append(watch.seconds(work))
    return _product_curves(sizes, times)


def plain_products(x: Tensor, weight: Tensor, y: Tensor) -> dict[str, Callable[[], object]]:
    """[M, I], [O, I], [M, O]; the weight gradient is added to a sum in at least fp32."""
    out = torch.empty_like(y)
    grad_x = torch.empty_like(x)
    total = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    return {
        "forward": lambda: torch.mm(x, weight.t(), out=out),
        "dgrad": lambda: torch.mm(y, weight, out=grad_x),
        "wgrad": lambda: add_product_(total, y.t(), x),
    }


def fp8_products(x: Tensor, weight: Tensor, y: Tensor) -> dict[str, Callable[[], object]]:
    """The same in e4m3 with a scale for each tensor, both factors laid out along the sum; fast sums in forward only."""
    one = torch.ones((), device=x.device)

    def times(a: Tensor, b: Tensor, *, fast: bool, dtype: torch.dtype = torch.bfloat16) -> Callable[[], object]:
        a8 = a.contiguous().to(torch.float8_e4m3fn)
        b8 = b.contiguous().to(torch.float8_e4m3fn)
        return lambda: torch._scaled_mm(a8, b8.t(), one, one, out_dtype=dtype, use_fast_accum=fast)

    return {
        "forward": times(x, weight, fast=True),
        "dgrad": times(y, weight.t(), fast=False),
        "wgrad": times(y.t(), x.t(), fast=False, dtype=torch.float32),
    }


def measure_grouped(watch: Stopwatch, device: torch.device) -> ProductCurves:
    """Products of several experts in one kernel, in bf16."""
    sizes = (GROUP_ROWS, FEW_SIDES, FEW_SIDES)
    times: dict[str, list[float]] = {"forward": [], "dgrad": [], "wgrad": []}
    for rows, n, k in product(*sizes):
        m = GROUPS * rows
        ends = torch.arange(1, GROUPS + 1, device=device, dtype=torch.int32) * rows
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        y = torch.randn(m, n, device=device, dtype=torch.bfloat16)
        weight = torch.randn(GROUPS, n, k, device=device, dtype=torch.bfloat16)
        factors = {"forward": (x, weight.transpose(1, 2)), "dgrad": (y, weight), "wgrad": (y.t(), x)}
        for kind, (a, b) in factors.items():
            times[kind].append(watch.seconds(partial(torch._grouped_mm, a, b, offs=ends)))
    return _product_curves(sizes, times)


def measure_attention(watch: Stopwatch, device: torch.device) -> AttentionCurves:
    """Causal attention with four query heads to a key and value head."""
    sizes = (HEAD_SIZES, HEAD_ROWS, LENGTHS)
    forward: list[float] = []
    backward: list[float] = []
    for head_size, rows, length in product(*sizes):
        # rows are tokens times heads: up to 32 heads of one sequence, the rest further sequences
        heads = min(32, rows // length)
        sequences = rows // length // heads
        inputs = (
            _heads(sequences, length, heads, head_size, device),
            _heads(sequences, length, heads // 4, head_size, device),
            _heads(sequences, length, heads // 4, head_size, device),
        )
        out = attention(*inputs)
        grad = torch.randn_like(out)
        forward.append(watch.seconds(partial(attention, *inputs)))
        backward.append(watch.seconds(partial(torch.autograd.grad, out, inputs, grad, retain_graph=True)))
    return AttentionCurves(forward=_curve(sizes, forward), backward=_curve(sizes, backward))


def measure_attention_rates(
    watch: Stopwatch,
    device: torch.device,
    target: Target,
    *,
    tell: Callable[[str], None],
    seconds: float | None = None,
) -> Iterator[AttentionRate]:
    """Forward and backward pass through every implementation that runs here, but for the reference: in any order of
    sums, and where the catalog says that it can in one order, too. One that fails somewhere has no figure there, which
    `tell` hears. `seconds`: once so many have gone, no further implementation begins; None: all do."""
    started = perf_counter()
    # what implementations that go through it take where nothing is hidden
    of_sdpa: list[AttentionRate] = []
    for name in _implementations(target):
        if seconds is not None and perf_counter() - started > seconds:
            tell(f"no attention through {name}: {seconds:g} s are over")
            continue
        tell(f"attention through {name}")
        for head_size in HEAD_SIZES:
            use = Use(head_size=head_size, precision="bf16")
            if name not in runs_on("attention", device="cuda", sm=target.sm, use=use, packages=target.versions):
                continue
            for deterministic in (False, True):
                # flex compiles for each use, and torch compiles a function eight times at most
                torch.compiler.reset()
                points = _points_of(name, head_size, target, deterministic=deterministic)
                if not deterministic and CATALOG["attention"].implementations[name].plain_through_sdpa != "never":
                    # two times of one kernel would differ by noise
                    points = [point for point in points if point[0] != "causal"]
                    for rate in of_sdpa:
                        if rate.head_size == head_size:
                            yield rate.model_copy(update={"implementation": name})
                for rate in _rates_of(name, head_size, points, watch, device, tell, deterministic=deterministic):
                    if is_plain(rate):
                        of_sdpa.append(rate)
                    yield rate


def _implementations(target: Target) -> list[str]:
    """Those that run here for heads of some size; flex, which compiles for each use, last."""
    names: dict[str, None] = {}
    for head_size in HEAD_SIZES:
        use = Use(head_size=head_size, precision="bf16")
        names |= dict.fromkeys(runs_on("attention", device="cuda", sm=target.sm, use=use, packages=target.versions))
    names.pop("reference", None)
    return sorted(names, key=lambda name: name == "flex")


def _points_of(name: str, head_size: int, target: Target, *, deterministic: bool) -> list[tuple[AttentionKind, int]]:
    """What an implementation is measured at: kinds, and what queries see. In one order what the catalog says that it
    can add so."""
    points = []
    for kind, several in SEEN.items():
        use = Use(
            head_size=head_size,
            precision="bf16",
            documents=kind == "documents",
            window=kind == "window",
            deterministic=deterministic,
        )
        if unmet("attention", name, device="cuda", sm=target.sm, use=use, packages=target.versions) is None:
            points += [(kind, seen) for seen in several]
    return points


def _rates_of(
    name: str,
    head_size: int,
    points: Iterable[tuple[AttentionKind, int]],
    watch: Stopwatch,
    device: torch.device,
    tell: Callable[[str], None],
    *,
    deterministic: bool,
) -> Iterator[AttentionRate]:
    """Of one implementation, at all that queries see."""
    inputs = [_heads(1, RATE_TOKENS, heads, head_size, device) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    grad = torch.randn_like(inputs[0])
    kernel = REGISTRY["attention"][name]
    for kind, seen in points:
        options = _options(kind, seen, device)
        work = partial(_attend, kernel, inputs, grad, options, deterministic=deterministic)
        try:
            taken = watch.seconds(work)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            if device.type == "cuda":
                # what has broken the GPU is no lack of the implementation: it comes up again here
                torch.cuda.synchronize(device)
            order = ", in one order" if deterministic else ""
            tell(f"no figure of {name}, heads of {head_size}, {kind} of {seen}{order}: {reason}")
            continue
        yield AttentionRate(
            implementation=name,
            kind=kind,
            head_size=head_size,
            tokens=RATE_TOKENS,
            seen=seen,
            seconds=_rounded(taken),
            deterministic=deterministic,
        )


def _options(kind: AttentionKind, seen: int, device: torch.device) -> dict[str, Any]:
    if kind == "window":
        return {"window": seen}
    if kind == "documents":
        return {"documents": packed_documents(RATE_TOKENS, seen, device)}
    return {}


def _attend(
    kernel: AttentionKernel, inputs: list[Tensor], grad: Tensor, options: dict[str, Any], *, deterministic: bool
) -> None:
    # around each call, and not around the stopwatch: its products have to be cuBLAS's as ever
    with _order_of_sums(deterministic=deterministic):
        torch.autograd.grad(kernel.attend(*inputs, **options), inputs, grad)


@contextmanager
def _order_of_sums(*, deterministic: bool) -> Iterator[None]:
    """Sums in one order, as train.deterministic=true asks for it (`_set_determinism` in runtime/build.py), or in any;
    behind it as before."""
    was_asked_for = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_asked_for, warn_only=only_warned)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def _heads(sequences: int, length: int, heads: int, head_size: int, device: torch.device) -> Tensor:
    return torch.randn(sequences, length, heads, head_size, device=device, dtype=torch.bfloat16, requires_grad=True)


def measure_memory(watch: Stopwatch, device: torch.device) -> Curve:
    """An element-wise sum over data that the cache does not hold."""
    # two are read and one written, of 2 bytes an element
    bytes_per_element = 3 * 2
    x = torch.randn(max(MOVED) // bytes_per_element, device=device, dtype=torch.bfloat16)
    y = torch.randn_like(x)
    out = torch.empty_like(x)
    seconds = []
    for moved in MOVED:
        size = moved // bytes_per_element // 64 * 64
        # each call takes the next part, so that what it reads is no longer in the cache
        starts = cycle(range(0, min(len(x) - size, 4096 * size) + 1, size))
        seconds.append(watch.seconds(partial(_add_next, x, y, out, starts, size)))
    return _curve((MOVED,), seconds)


def _add_next(x: Tensor, y: Tensor, out: Tensor, starts: Iterator[int], size: int) -> None:
    start = next(starts)
    torch.add(x[start : start + size], y[start : start + size], out=out[start : start + size])


def measure_update(watch: Stopwatch, device: torch.device, moved: Curve) -> float:
    """The part of the rate of element-wise work that the fused AdamW reaches."""
    count = 16
    elements = 2**24  # of each
    parameters = [torch.randn(elements, device=device) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    # weight, gradient and two averages are read, all but the gradient written, in fp32
    moved_bytes = (4 + 3) * 4 * elements * count
    return moved.at(moved_bytes) / watch.seconds(optimizer.step)


def measure_collectives(watch: Stopwatch, device: torch.device, node: int) -> Iterable[CollectiveCurve]:
    """Every kind over 2, 4, 8, ... of the `node` ranks of a node, such groups side by side; all ranks take part."""
    for power in range(1, 11):
        ranks = 2**power
        if ranks > node or node % ranks:
            continue
        # every rank makes all groups, which torch asks for
        world = dist.get_world_size()
        groups = [dist.new_group(list(range(first, first + ranks))) for first in range(0, world, ranks)]
        group = groups[dist.get_rank() // ranks]
        times: dict[str, list[float]] = {}
        for size in MESSAGES:
            for kind, work in collectives(size, group, device).items():
                # the same number on all ranks, and no rank late
                dist.barrier()
                times.setdefault(kind, []).append(watch.seconds(work, calls=20 if size <= 2**22 else 5))
        for kind, seconds in times.items():
            yield CollectiveCurve(kind=kind, ranks=ranks, curve=_curve((MESSAGES,), seconds))


def collectives(size: int, group: dist.ProcessGroup, device: torch.device) -> dict[str, Callable[[], object]]:
    """One call of each kind on a tensor of `size` bytes; p2p sends it to the next rank of a ring."""
    ranks = group.size()
    whole = torch.zeros(size // 2, device=device, dtype=torch.bfloat16)
    part = torch.zeros(size // 2 // ranks, device=device, dtype=torch.bfloat16)
    other = torch.empty_like(whole)
    after = dist.get_global_rank(group, (group.rank() + 1) % ranks)
    before = dist.get_global_rank(group, (group.rank() - 1) % ranks)

    def shift() -> None:
        moves = [
            dist.P2POp(dist.isend, whole, after, group=group),
            dist.P2POp(dist.irecv, other, before, group=group),
        ]
        for transfer in dist.batch_isend_irecv(moves):
            transfer.wait()

    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "p2p": shift,
    }


def measure_host(device: torch.device, target: Target) -> tuple[float, float]:
    """Seconds of the host for a step without its layers, and for one layer of a micro batch.

    From a model that is too small for the GPU to be busy: with one and with three micro batches.
    """
    layers = 8
    length = 256
    vocabulary = 1024
    shape = {"n_layers": layers, "d_model": 256, "n_heads": 4, "n_kv_heads": 4, "d_ffn": 512}
    recipe = {
        "name": "host",
        "model": shape | {"kind": "decoder", "vocab_size": vocabulary},
        "precision": {"kind": "bf16"},
        "data": {"kind": "random", "vocab_size": vocabulary, "seq_len": length},
        "optim": {"kind": "adamw", "lr": 1e-4, "schedule": {"kind": "constant"}},
        "train": {"steps": 1, "global_batch": 1},
        "launcher": {"ranks": 1},
    }
    spec = resolve(Recipe.model_validate_json(json.dumps(recipe)), target, Facts(run_dir="-"))
    built = build(spec, mesh=Mesh({"tp": 1, "dp_replicate": 1}, rank=0, device=device))
    initialise(built)
    scaler = build_scaler(spec.precision, device=device)
    tokens = torch.randint(0, vocabulary, (1, length + 1), device=device)
    mask = torch.ones(1, length, dtype=torch.bool, device=device)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask, torch.arange(1, device=device))
    times: dict[int, list[float]] = {1: [], 3: []}
    for _ in range(20):
        for count, runs in times.items():
            torch.cuda.synchronize()
            start = perf_counter()
            train_step(built, [batch] * count, lr=1e-4, weight_decay=0.1, scaler=scaler)
            torch.cuda.synchronize()
            runs.append(perf_counter() - start)
    # the first steps compile
    one = median(times[1][5:])
    three = median(times[3][5:])
    micro_batch = (three - one) / 2
    return max(1e-6, one - micro_batch), max(1e-6, micro_batch / layers)


def _product_curves(sizes: tuple[tuple[int, ...], ...], times: dict[str, list[float]]) -> ProductCurves:
    return ProductCurves(
        forward=_curve(sizes, times["forward"]),
        dgrad=_curve(sizes, times["dgrad"]),
        wgrad=_curve(sizes, times["wgrad"]),
    )


def _curve(sizes: tuple[tuple[int, ...], ...], seconds: list[float]) -> Curve:
    return Curve(sizes=sizes, seconds=tuple(_rounded(s) for s in never_faster(sizes, seconds)))


def _rounded(seconds: float) -> float:
    """To four digits, which is more than a measurement is good for."""
    return float(f"{seconds:.4g}")
