"""What the ranks of a probe run: an all-reduce and a message to the next rank, timed, and looked at for wrong numbers.

FOLDER/probe.json is what rank 0 has found out. With `measures_all` every collective is measured as
`megaspec bench throughput` does, so that a plan can read the links.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaspec.core.errors import HardwareError
from megaspec.estimate.throughput import CollectiveCurve, MeasuredNetwork
from megaspec.launcher.rendezvous import Rendezvous
from megaspec.runtime.rank import RankInfo, exit_code_of, join_world, leave_world
from megaspec.verify.measured_throughput import Stopwatch, measure_collectives

PROBE = "probe.json"
# Bytes of the messages: what starting one takes, and what a link carries.
SHORT = 2**10
LONG_GPU = 2**28
LONG_CPU = 2**22
# Of a long message, whose times differ more.
REPEATS = 10
# Numbers of an all-reduce are whole and below this: their sums over any number of ranks are exact in fp64.
_LARGEST = 16


@dataclass(frozen=True)
class Probe:
    """Rates and times between ranks. Rates are bytes per second of one rank in one direction."""

    ranks: int
    nodes: int
    backend: str
    all_reduce_seconds: float
    """Of SHORT bytes."""
    all_reduce_rate: float
    """What each rank sends of a long one in a ring."""
    send_seconds: float
    """Of SHORT bytes to the next rank, the slowest pair."""
    send_rates: tuple[float, ...]
    """Of rank r to rank r + 1, all at once."""
    between_nodes: tuple[int, ...] = ()
    """The ranks r whose next one is on another node."""
    network: dict[str, float] | None = None
    """MeasuredNetwork of several nodes, where all was measured."""
    collectives: tuple[dict[str, Any], ...] = ()
    """CollectiveCurves, where all was measured."""

    def as_plain(self) -> dict[str, Any]:
        """As JSON can say it."""
        return asdict(self)


def main(
    run_dir: str,
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    attempt: int,
    store: Rendezvous,
    timeout_seconds: float,
    local_ranks: int,
    on_gpu: bool,
    measures_all: bool,
) -> int:
    """One rank of a probe. `local_ranks`: ranks of a node. -> exit code; 77 where numbers came out wrong."""
    me = RankInfo(rank, world_size, local_rank, attempt, store, timeout_seconds)

    def probe() -> None:
        found = probe_world(me, local_ranks=local_ranks, on_gpu=on_gpu, measures_all=measures_all)
        if rank == 0:
            Path(run_dir, PROBE).write_text(json.dumps(found.as_plain()))

    return exit_code_of(me, probe)


def probe_world(
    me: RankInfo, *, local_ranks: int, on_gpu: bool, measures_all: bool, ends: Callable[[Probe], None] | None = None
) -> Probe:
    """Joins the ranks, times them, and looks at what they got. HardwareError: numbers are wrong.

    `ends` is called before the ranks part.
    """
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", me.local_rank)
        torch.cuda.set_device(device)
    join_world(me, device)
    try:
        found = _probed(me, device, local_ranks, measures_all)
        if ends is not None:
            ends(found)
    except BaseException as error:
        leave_world(type(error), error, None)
        raise
    leave_world(None, None, None)
    return found


def _probed(me: RankInfo, device: torch.device, local_ranks: int, measures_all: bool) -> Probe:
    long = LONG_GPU if device.type == "cuda" else LONG_CPU
    ranks = me.world_size
    check_products(me, device)
    if ranks == 1:
        return Probe(1, 1, dist.get_backend(), 0.0, 0.0, 0.0, ())
    check_sums(me, device)
    check_sent(me, device)
    short_sum = _seconds(lambda: dist.all_reduce(_zeros(SHORT, device)), device, repeats=50)
    data = _zeros(long, device)
    long_sum = _seconds(lambda: dist.all_reduce(data), device)
    short_send = _seconds(lambda: _shift(me, _zeros(SHORT, device)), device, repeats=50)
    long_send = _seconds(lambda: _shift(me, data), device)
    sent = 2 * (ranks - 1) / ranks * long
    nodes = max(1, ranks // local_ranks)
    network = None
    collectives: list[CollectiveCurve] = []
    if measures_all:
        watch = Stopwatch(device)
        if local_ranks > 1:
            collectives = list(measure_collectives(watch, device, local_ranks))
        if nodes > 1:
            network = _network(me, device, local_ranks).model_dump()
    return Probe(
        ranks=ranks,
        nodes=nodes,
        backend=dist.get_backend(),
        all_reduce_seconds=max(_of_all(short_sum, device)),
        all_reduce_rate=sent / max(_of_all(long_sum, device)),
        send_seconds=max(_of_all(short_send, device)),
        send_rates=tuple(long / seconds for seconds in _of_all(long_send, device)),
        between_nodes=tuple(r for r in range(ranks) if nodes > 1 and (r + 1) % local_ranks == 0),
        network=network,
        collectives=tuple(one.model_dump(mode="json") for one in collectives),
    )


def check_products(me: RankInfo, device: torch.device, *, spoil: Callable[[torch.Tensor], None] | None = None) -> None:
    """Products of matrices of small whole numbers are exact. HardwareError: one was not."""
    side = 1024 if device.type == "cuda" else 128
    rows = torch.arange(side * side).reshape(side, side)
    a = (rows % 5).to(torch.float32)
    b = (rows % 7).to(torch.float32)
    expected = (a.double() @ b.double()).to(device, torch.float32)
    for _ in range(20):
        product = a.to(device) @ b.to(device)
        if spoil is not None:
            spoil(product)
        wrong = int((product != expected).sum())
        if wrong:
            raise HardwareError(f"rank {me.rank}: {wrong} of {side * side} numbers of a product of matrices are wrong")


def check_sums(me: RankInfo, device: torch.device, *, spoil: Callable[[torch.Tensor], None] | None = None) -> None:
    """An all-reduce of whole numbers is exact. HardwareError: it was not. `spoil`: for a test, what goes wrong."""
    numbers = torch.arange(2**16, device=device, dtype=torch.float64) % _LARGEST
    mine = numbers * (me.rank + 1)
    dist.all_reduce(mine)
    if spoil is not None:
        spoil(mine)
    expected = numbers * (me.world_size * (me.world_size + 1) // 2)
    wrong = int((mine != expected).sum())
    if wrong:
        raise HardwareError(f"rank {me.rank}: {wrong} of {len(mine)} sums of an all-reduce are wrong")


def check_sent(me: RankInfo, device: torch.device) -> None:
    """What the rank before sent arrives as it was. HardwareError: it did not."""
    mine = torch.arange(2**16, device=device) * (me.rank + 1)
    got = _shift(me, mine)
    before = (me.rank - 1) % me.world_size
    expected = torch.arange(2**16, device=device) * (before + 1)
    wrong = int((got != expected).sum())
    if wrong:
        raise HardwareError(f"rank {me.rank}: {wrong} of {len(mine)} numbers from rank {before} arrived changed")


def _shift(me: RankInfo, mine: torch.Tensor) -> torch.Tensor:
    """Sends to the next rank of the ring, and returns what the one before sent."""
    got = torch.empty_like(mine)
    moves = [
        dist.P2POp(dist.isend, mine, (me.rank + 1) % me.world_size),
        dist.P2POp(dist.irecv, got, (me.rank - 1) % me.world_size),
    ]
    for transfer in dist.batch_isend_irecv(moves):
        transfer.wait()
    return got


def _network(me: RankInfo, device: torch.device, local_ranks: int) -> MeasuredNetwork:
    """Each rank sends to the rank in its place on the next node, all at once: each then has its own network card."""
    peers = [(me.rank + local_ranks) % me.world_size, (me.rank - local_ranks) % me.world_size]
    times = []
    for size, repeats in ((SHORT, 50), (LONG_GPU, REPEATS)):
        mine = _zeros(size, device)
        other = torch.empty_like(mine)

        def swap(mine: torch.Tensor = mine, other: torch.Tensor = other) -> None:
            moves = [dist.P2POp(dist.isend, mine, peers[0]), dist.P2POp(dist.irecv, other, peers[1])]
            for transfer in dist.batch_isend_irecv(moves):
                transfer.wait()

        times.append(max(_of_all(_seconds(swap, device, repeats=repeats), device)))
    latency, whole = times
    return MeasuredNetwork(bandwidth=LONG_GPU / max(1e-9, whole - latency), latency=latency)


def _zeros(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size // 4, device=device, dtype=torch.float32)


def _seconds(work: Callable[[], object], device: torch.device, *, repeats: int = REPEATS) -> float:
    """Of one call, after two that set up what it needs."""
    for _ in range(2):
        work()
    dist.barrier()
    _wait_for(device)
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    _wait_for(device)
    return (time.perf_counter() - began) / repeats


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _of_all(seconds: float, device: torch.device) -> list[float]:
    """Every rank's."""
    mine = torch.tensor([seconds], device=device, dtype=torch.float64)
    everybodys = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, mine)
    return [float(one) for one in everybodys]
