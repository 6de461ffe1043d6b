"""A world that somebody else started, such as torchrun: rank 0 prepares the run, every rank joins it.

What ranks read from the store is input, not an order: whoever reaches its port may write there. The run's folder and
the digest of its spec.json are signed with the job's secret (launcher/run_secret.py).
"""

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megaspec.core.errors import HangError, MegaspecError, RecipeError
from megaspec.data.fetch import bring_here
from megaspec.launcher import exit_file
from megaspec.launcher.rendezvous import TcpRendezvous
from megaspec.launcher.run_secret import RunSecret, UntrustedError
from megaspec.runtime.rank import RankInfo, main, read_file, read_spec, tcp_store, tell
from megaspec.spec import Spec

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
    secret: RunSecret,
    entry: Callable[..., int] = main,
    prepare_again: Callable[[str], object] | None = None,
) -> int:
    """Trains as one rank of it, or does what another `entry` of ranks does. -> exit code.

    `prepare` makes or finds the run's folder and returns its path; only rank 0 calls it, once for all attempts of the
    world. What it raises ends every rank with the same exit code. `prepare_again`, where there is one, makes that
    folder ready for a world of another size, since hosts may go and come between two attempts; only rank 0 calls it.
    UntrustedError: what this rank should do was not said by a rank that has the `secret`, or spec.json is not what was
    prepared.
    """
    job, _, _ = store.prefix.rpartition("/")
    # nobody can guess where this job's keys are, its ranks' addresses among them
    store = replace(store, prefix=f"{store.prefix}/{secret.token(store.prefix)}")
    me = RankInfo(rank, world_size, local_rank, attempt, store, JOIN_SECONDS)
    try:
        meeting = tcp_store(store, me, timedelta(seconds=JOIN_SECONDS))
        answer = _agree(meeting, me, prepare, prepare_again, secret, job)
    except dist.DistError as error:
        text = f"the ranks did not meet at {store.host}:{store.port}: {error}"
        tell(me, f"{text}; ranks that have different secrets don't find each other either")
        return HangError.exit_code
    except UntrustedError as error:
        tell(me, error)
        return error.exit_code
    if answer.startswith(_FAILED):
        return int(answer.removeprefix(_FAILED))
    folder, digest = _prepared(answer)
    try:
        _check_spec(Path(folder), digest)
        spec = read_spec(Path(folder))
        code = _bring_data(meeting, me, spec, secret)
    except dist.DistError as error:
        tell(me, f"a rank went away while data were fetched: {error}")
        return HangError.exit_code
    except RecipeError as error:
        tell(me, error)
        return error.exit_code
    if code:
        begun = exit_file.read_exit(Path(folder))
        if rank == 0 and begun is not None and begun.code is None:
            # rank 0 has said that this start is under way
            exit_file.end(Path(folder), code, step=begun.step)
        return code
    return entry(
        folder,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        attempt=attempt,
        # where rank 0 had to open the store, `meeting` keeps it open
        store=replace(store, is_open=True),
        timeout_seconds=spec.launcher.timeout_seconds,
    )


def _bring_data(meeting: dist.Store, me: RankInfo, spec: Spec, secret: RunSecret) -> int:
    """The first rank of each host fetches what the run reads from URLs; no rank goes on before all hosts have it,
    however long that takes. -> 0, or the exit code of a host that has not got it. UntrustedError: as `join`."""
    if not spec.remote:
        return 0
    code = 0
    if me.local_rank == 0:
        try:
            bring_here(spec.data, spec.remote)
        except MegaspecError as error:
            tell(me, error)
            code = error.exit_code
    place = {"attempt": str(me.attempt)}
    meeting.set(f"data-{me.rank}", secret.sign("data", str(code), sequence=me.rank, **place))
    codes = []
    for rank in range(me.world_size):
        _wait(meeting, f"data-{rank}", math.inf)
        said = secret.open("data", meeting.get(f"data-{rank}"), sequence=rank, **place)
        codes.append(int(said))
    # nobody leaves before all have read it: the store may be rank 0's own
    if meeting.add("data-read", 1) == me.world_size:
        meeting.set("data-all-read", "")
    _wait(meeting, "data-all-read", JOIN_SECONDS)
    return max(codes)


def _prepared(answer: str) -> tuple[str, str]:
    """The run's folder, and the digest of its spec.json."""
    digest, _, folder = answer.partition(" ")
    return folder, digest


def _digest(folder: Path) -> str:
    """SHA-256 of the run's spec.json. RecipeError: it can't be read."""
    return hashlib.sha256(read_file(folder, "spec.json")).hexdigest()


def _check_spec(folder: Path, digest: str) -> None:
    """UntrustedError: spec.json is not what rank 0 has prepared."""
    found = _digest(folder)
    if found != digest:
        raise UntrustedError(
            f"{folder / 'spec.json'} has the SHA-256 {found}, rank 0 prepared one with {digest}: somebody changed it, "
            "or this rank sees another folder; put the run where all ranks see the same files, and start again"
        )


def _agree(
    meeting: dist.Store,
    me: RankInfo,
    prepare: Callable[[], str],
    prepare_again: Callable[[str], object] | None,
    secret: RunSecret,
    job: str,
) -> str:
    """`DIGEST FOLDER` of the run, or how rank 0 failed, told to every rank."""
    place = {"attempt": str(me.attempt), "sequence": 1}
    if me.rank == 0:
        try:
            answer = _first_answer(meeting, me, prepare, prepare_again, secret, job)
        except MegaspecError as error:
            tell(me, error)
            answer = f"{_FAILED}{error.exit_code}"
        meeting.set("run", secret.sign("run", answer, **place))
    else:
        _wait(meeting, "run", JOIN_SECONDS)
        answer = secret.open("run", meeting.get("run"), **place)
    # nobody leaves before all have read it: the store may be rank 0's own
    if meeting.add("read", 1) == me.world_size:
        meeting.set("all-read", "")
    _wait(meeting, "all-read", JOIN_SECONDS)
    return answer


def _wait(meeting: dist.Store, key: str, seconds: float) -> None:
    """Until a key is set; not in C++, where a request to stop would not be heard. Raises DistError."""
    give_up = time.monotonic() + seconds
    pause = _SHORTEST_PAUSE
    while not meeting.check([key]):
        if time.monotonic() > give_up:
            raise dist.DistStoreError(f"{key} was not set within {seconds:g} s")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _first_answer(
    meeting: dist.PrefixStore,
    me: RankInfo,
    prepare: Callable[[], str],
    prepare_again: Callable[[str], object] | None,
    secret: RunSecret,
    job: str,
) -> str:
    """What the first attempt prepared, kept in the store that outlives attempts; the first attempt prepares it, and one
    of another world size prepares it anew. What is kept is signed, and the world size with it."""
    # the store without the prefix of this attempt
    shared = meeting.underlying_store
    key = f"{job}/{secret.token(job)}/run"
    place = {"attempt": "every", "sequence": 1}
    world = str(me.world_size)
    if me.attempt == 0 or not shared.check([key]):
        folder = prepare()
        kept = f"{world} {_digest(Path(folder))} {folder}"
        shared.set(key, secret.sign(key, kept, **place))
    else:
        of_world, _, answer = secret.open(key, shared.get(key), **place).partition(" ")
        if prepare_again is not None and of_world != world:
            folder, _ = _prepared(answer)
            prepare_again(folder)
            kept = f"{world} {_digest(Path(folder))} {folder}"
            shared.set(key, secret.sign(key, kept, **place))
    _, _, answer = secret.open(key, shared.get(key), **place).partition(" ")
    return answer
