"""Measures what the GPUs at hand reach: the table that estimate/ceilings.py reads."""

import json
from collections.abc import Callable, Iterable
from itertools import cycle, pairwise, product
from math import ceil
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from megaspec.data.batch import Batch
from megaspec.estimate.ceilings import AttentionCurves, CeilingTable, CollectiveCurve, ProductCurves
from megaspec.estimate.curves import Curve, never_faster
from megaspec.estimate.hardware import Hardware
from megaspec.estimate.target import Target
from megaspec.parallelism.mesh import Mesh
from megaspec.precision.scaler import build_scaler
from megaspec.recipe import Recipe
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec.runtime.build import DTYPES, build, initialise
from megaspec.runtime.step import train_step
from megaspec_kernels.attention.sdpa import attention
from megaspec_kernels.product import add_product_

# Tokens, and sides of weights; powers of two, between which times are interpolated.
ROWS = (512, 1024, 2048, 4096, 8192, 16384)
SIDES = (256, 512, 1024, 2048, 4096, 8192, 16384)
FEW_ROWS, FEW_SIDES = (1024, 4096, 16384), (512, 2048, 8192)
GROUPS, GROUP_ROWS = 64, (64, 256, 1024, 4096)
HEAD_SIZES, HEAD_ROWS = (64, 128), tuple(2**p for p in range(15, 21))
LENGTHS = (512, 1024, 2048, 4096, 8192)
MOVED = tuple(2**p for p in range(18, 33, 2))
MESSAGES = (2**12, *(2**p for p in range(16, 29, 2)), 2**29)


class Stopwatch:
    """Times work on a GPU that is as busy and as hot as in a training step.

    Products run before what is timed and after it: they hold the clocks where heavy work holds them, and while they
    run the host queues what is timed, so that none of it waits for the host.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.bfloat16):
        self._a, self._b = (torch.randn(4096, 4096, device=device, dtype=dtype) for _ in range(2))
        self._c = torch.empty_like(self._a)
        self._ahead = 1
        self._ahead = max(1, ceil(0.01 / self.seconds(self._product, calls=5)))

    def _product(self) -> None:
        torch.mm(self._a, self._b, out=self._c)

    def _keep_busy(self) -> None:
        for _ in range(self._ahead):
            self._product()

    def seconds(self, work: Callable[[], object], *, calls: int | None = None) -> float:
        """The median of three runs of `calls` calls each, for one call; None: as many as take about 2 ms."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        work()
        events[0].record()
        work()
        events[1].record()
        events[1].synchronize()
        if calls is None:
            calls = max(2, min(20, int(2.0 / events[0].elapsed_time(events[1]))))
        self._keep_busy()
        events[0].record()
        for event in events[1:]:
            for _ in range(calls):
                work()
            event.record()
        self._keep_busy()
        events[-1].synchronize()
        runs = [start.elapsed_time(end) for start, end in pairwise(events)]
        return max(1e-9, median(runs) / calls / 1e3)


def measure(hardware: Hardware, *, device: torch.device, target: Target, tell: Callable[[str], None]) -> CeilingTable:
    """The table of this GPU, and of the links of the world's GPUs where there are several; every rank calls it.

    `tell` hears what is measured next. About a minute.
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
    heads, moved = measure_attention(watch, device), measure_memory(watch, device)
    tell("collectives")
    together = target.local_ranks or 1 if dist.is_initialized() else 1
    collectives = tuple(measure_collectives(watch, device, together))
    tell("what the host needs")
    launch, layer = measure_host(device, target.model_copy(update={"world_size": None, "gpus": 1}))
    world = dist.get_world_size() if dist.is_initialized() else 1
    return CeilingTable(
        hardware=hardware.name,
        source=f"{world} x {torch.cuda.get_device_name(device)}, torch {torch.__version__}",
        products=products,
        grouped=grouped,
        groups=GROUPS,
        attention=heads,
        memory=moved,
        update_share=min(1.0, _rounded(measure_update(watch, device, moved))),
        collectives=collectives,
        launch_seconds=_rounded(launch),
        layer_seconds=_rounded(layer),
    )


def table_text(table: CeilingTable) -> str:
    """The table as JSON, one line for each of its parts."""
    parts = table.model_dump(mode="json").items()
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(part)}" for name, part in parts) + "\n}\n"


def measure_products(name: str, device: torch.device) -> ProductCurves:
    """Forward, input gradient and weight gradient of linear layers with factors in one format."""
    sizes = (ROWS, SIDES, SIDES) if name == "bf16" else (FEW_ROWS, FEW_SIDES, FEW_SIDES)
    works = fp8_products if name == "fp8" else plain_products
    dtype = DTYPES.get(name, torch.bfloat16)
    watch = Stopwatch(device, dtype)
    m, n, k = (max(axis) for axis in sizes)
    pools = [torch.randn(area, device=device, dtype=dtype) for area in (m * k, n * k, m * n)]
    times: dict[str, list[float]] = {"forward": [], "dgrad": [], "wgrad": []}
    for m, n, k in product(*sizes):
        x, weight, y = (pool[: a * b].view(a, b) for pool, (a, b) in zip(pools, ((m, k), (n, k), (m, n)), strict=True))
        for kind, work in works(x, weight, y).items():
            times[kind].append(watch.seconds(work))
    return ProductCurves(**{kind: _curve(sizes, seconds) for kind, seconds in times.items()})


def plain_products(x: Tensor, weight: Tensor, y: Tensor) -> dict[str, Callable[[], object]]:
    """[M, I], [O, I], [M, O]; the weight gradient is added to a sum in at least fp32."""
    out, grad_x = torch.empty_like(y), torch.empty_like(x)
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
        a8, b8 = (f.contiguous().to(torch.float8_e4m3fn) for f in (a, b))
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
        x, y = (torch.randn(m, side, device=device, dtype=torch.bfloat16) for side in (k, n))
        weight = torch.randn(GROUPS, n, k, device=device, dtype=torch.bfloat16)
        for kind, a, b in (
            ("forward", x, weight.transpose(1, 2)),
            ("dgrad", y, weight),
            ("wgrad", y.t(), x),
        ):
            times[kind].append(watch.seconds(lambda a=a, b=b, ends=ends: torch._grouped_mm(a, b, offs=ends)))
    return ProductCurves(**{kind: _curve(sizes, seconds) for kind, seconds in times.items()})


def measure_attention(watch: Stopwatch, device: torch.device) -> AttentionCurves:
    """Causal attention with four query heads to a key and value head."""
    sizes = (HEAD_SIZES, HEAD_ROWS, LENGTHS)
    forward, backward = [], []
    for head_size, rows, length in product(*sizes):
        heads = min(32, rows // length)
        shape = rows // length // heads, length
        q = torch.randn(*shape, heads, head_size, device=device, dtype=torch.bfloat16, requires_grad=True)
        k, v = (
            torch.randn(*shape, heads // 4, head_size, device=device, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(2)
        )
        out = attention(q, k, v)
        grad = torch.randn_like(out)
        forward.append(watch.seconds(lambda q=q, k=k, v=v: attention(q, k, v)))
        backward.append(
            watch.seconds(
                lambda out=out, inputs=(q, k, v), grad=grad: torch.autograd.grad(out, inputs, grad, retain_graph=True)
            )
        )
    return AttentionCurves(forward=_curve(sizes, forward), backward=_curve(sizes, backward))


def measure_memory(watch: Stopwatch, device: torch.device) -> Curve:
    """An element-wise sum over data that the cache does not hold."""
    x, y, out = (torch.randn(max(MOVED) // 6, device=device, dtype=torch.bfloat16) for _ in range(3))
    seconds = []
    for moved in MOVED:
        part = moved // 6 // 64 * 64
        starts = cycle(range(0, min(len(x) - part, 4096 * part) + 1, part))
        seconds.append(watch.seconds(lambda starts=starts, part=part: _add(x, y, out, next(starts), part)))
    return _curve((MOVED,), seconds)


def _add(x: Tensor, y: Tensor, out: Tensor, start: int, size: int) -> None:
    torch.add(x[start : start + size], y[start : start + size], out=out[start : start + size])


def measure_update(watch: Stopwatch, device: torch.device, moved: Curve) -> float:
    """The part of the rate of element-wise work that the fused AdamW reaches."""
    parameters = [torch.randn(2**24, device=device) for _ in range(16)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    # weight, gradient and two averages are read, all but the gradient written, in fp32
    return moved.at(7 * 4 * 2**24 * 16) / watch.seconds(optimizer.step)


def measure_collectives(watch: Stopwatch, device: torch.device, node: int) -> Iterable[CollectiveCurve]:
    """Every kind over 2, 4, 8, ... of the `node` ranks of a node, such groups side by side; all ranks take part."""
    for ranks in (n for n in (2**p for p in range(1, 11)) if n <= node and node % n == 0):
        world, rank = dist.get_world_size(), dist.get_rank()
        groups = [dist.new_group(list(range(first, first + ranks))) for first in range(0, world, ranks)]
        group = groups[rank // ranks]
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
    ranks, me = group.size(), group.rank()
    whole = torch.zeros(size // 2, device=device, dtype=torch.bfloat16)
    part, other = torch.zeros(size // 2 // ranks, device=device, dtype=torch.bfloat16), torch.empty_like(whole)
    after, before = (dist.get_global_rank(group, (me + step) % ranks) for step in (1, -1))

    def shift() -> None:
        moves = [
            dist.P2POp(dist.isend, whole, after, group=group),
            dist.P2POp(dist.irecv, other, before, group=group),
        ]
        for one in dist.batch_isend_irecv(moves):
            one.wait()

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
    layers, length, vocabulary = 8, 256, 1024
    shape = {"n_layers": layers, "d_model": 256, "n_heads": 4, "n_kv_heads": 4, "d_ffn": 512}
    recipe = {
        "name": "host",
        "model": shape | {"kind": "llama", "vocab_size": vocabulary},
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
    one, three = (median(times[count][5:]) for count in (1, 3))
    micro_batch = (three - one) / 2
    return max(1e-6, one - micro_batch), max(1e-6, micro_batch / layers)


def _curve(sizes: tuple[tuple[int, ...], ...], seconds: list[float]) -> Curve:
    return Curve(sizes=sizes, seconds=tuple(_rounded(s) for s in never_faster(sizes, seconds)))


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")
