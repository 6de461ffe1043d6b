"""A world that somebody else started, such as torchrun: rank 0 prepares the run, every rank joins it."""

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megaspec.core.errors import HangError, MegaspecError
from megaspec.launcher.rendezvous import TcpRendezvous
from megaspec.runtime.rank import RankInfo, main, read_spec, tcp_store, tell

JOIN_SECONDS = 600.0
# Between two looks at the store.
_SHORTEST_PAUSE = 0.02
_LONGEST_PAUSE = 0.5
_FAILED = "failed with exit code "


def join(
    prepare: Callable[[], str],
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    attempt: int,
    store: TcpRendezvous,
    entry: Callable[..., int] = main,
    prepare_again: Callable[[str], object] | None = None,
) -> int:
    """Trains as one rank of it, or does what another `entry` of ranks does. -> exit code.

    `prepare` makes or finds the run's folder and returns its path; only rank 0 calls it, once for all attempts of the
    world. What it raises ends every rank with the same exit code. `prepare_again`, where there is one, makes that
    folder ready for a world of another size, since hosts may go and come between two attempts; only rank 0 calls it.
    """
    me = RankInfo(rank, world_size, local_rank, attempt, store, JOIN_SECONDS)
    try:
        meeting = tcp_store(store, me, timedelta(seconds=JOIN_SECONDS))
        answer = _agree(meeting, me, prepare, prepare_again)
    except dist.DistError as error:
        tell(me, f"the ranks did not meet at {store.host}:{store.port}: {error}")
        return HangError.exit_code
    if answer.startswith(_FAILED):
        return int(answer.removeprefix(_FAILED))
    return entry(
        answer,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        attempt=attempt,
        # where rank 0 had to open the store, `meeting` keeps it open
        store=replace(store, is_open=True),
        timeout_seconds=read_spec(Path(answer)).launcher.timeout_seconds,
    )


def _agree(
    meeting: dist.Store, me: RankInfo, prepare: Callable[[], str], prepare_again: Callable[[str], object] | None
) -> str:
    """The run's folder, or how rank 0 failed, told to every rank."""
    if me.rank == 0:
        try:
            answer = _first_answer(meeting, me, prepare, prepare_again)
        except MegaspecError as error:
            tell(me, error)
            answer = f"{_FAILED}{error.exit_code}"
        meeting.set("run", answer)
    else:
        _wait(meeting, "run")
        answer = meeting.get("run").decode()
    # nobody leaves before all have read it: the store may be rank 0's own
    if meeting.add("read", 1) == me.world_size:
        meeting.set("all-read", "")
    _wait(meeting, "all-read")
    return answer


def _wait(meeting: dist.Store, key: str) -> None:
    """Until a key is set; not in C++, where a request to stop would not be heard. Raises DistError."""
    give_up = time.monotonic() + JOIN_SECONDS
    pause = _SHORTEST_PAUSE
    while not meeting.check([key]):
        if time.monotonic() > give_up:
            raise dist.DistStoreError(f"{key} was not set within {JOIN_SECONDS:g} s")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _first_answer(
    meeting: dist.PrefixStore,
    me: RankInfo,
    prepare: Callable[[], str],
    prepare_again: Callable[[str], object] | None = None,
) -> str:
    """What the first attempt prepared, kept in the store that outlives attempts; the first attempt prepares it, and one
    of another world size prepares it anew."""
    # the store without the prefix of this attempt
    shared = meeting.underlying_store
    run_prefix, _, _ = me.store.prefix.rpartition("/")
    key = f"{run_prefix}/run"
    of_world = f"{run_prefix}/world-size"
    world = str(me.world_size)
    if me.attempt == 0 or not shared.check([key]):
        shared.set(key, prepare())
        shared.set(of_world, world)
    elif prepare_again is not None and shared.get(of_world).decode() != world:
        prepare_again(shared.get(key).decode())
        shared.set(of_world, world)
    return shared.get(key).decode()
