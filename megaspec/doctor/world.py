"""The probe of ranks that torchrun, or anything with its variables, has started: on several hosts."""

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megaspec.core.bounded_json import parse_json
from megaspec.doctor.probe import Probe, probe_world
from megaspec.runtime.rank import RankInfo, exit_code_of
from megaspec_launchers.environment import RankPlace


def probed_in_world(
    place: RankPlace,
    *,
    local_ranks: int,
    on_gpu: bool,
    measures_all: bool,
    timeout_seconds: float,
    mine: Sequence[dict[str, Any]],
) -> tuple[int, dict[str, Any] | None, list[dict[str, Any]]]:
    """`mine`: what this rank has found on its host, as JSON says it.

    -> the exit code of this rank's probe; on rank 0 what the probe found out, and what all hosts have found.
    """
    me = RankInfo(place.rank, place.world_size, place.local_rank, place.attempt, place.store, timeout_seconds)
    results: list[Probe] = []
    said: list[dict[str, Any]] = []

    def exchange(found: Probe) -> None:
        store = dist.PrefixStore("doctor", dist.distributed_c10d._get_default_store())
        store.set_timeout(timedelta(seconds=timeout_seconds))
        if place.local_rank == 0:
            store.set(str(place.rank), json.dumps(list(mine)))
        if place.rank == 0:
            for first in range(0, place.world_size, local_ranks):
                said.extend(parse_json(store.get(str(first))))
        dist.barrier()
        results.append(found)

    def probe() -> None:
        probe_world(me, local_ranks=local_ranks, on_gpu=on_gpu, measures_all=measures_all, ends=exchange)

    code = exit_code_of(me, probe)
    content = None
    if results:
        # as JSON says it, as of a probe that wrote a file
        content = json.loads(json.dumps(results[0].as_plain()))
    return code, content, said
