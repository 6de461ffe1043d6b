"""Ranks that somebody else started (torchrun, or anything that sets the same variables). Never imports torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megaspec.core.errors import RecipeError
from megaspec.launcher.rendezvous import TcpRendezvous


@dataclass(frozen=True)
class RankPlace:
    """A rank's place in its world: the keyword arguments of a rank's entry."""

    rank: int
    world_size: int
    local_rank: int
    attempt: int
    """0, then one more each time that the ranks are started again."""
    store: TcpRendezvous


def rank_from_environment(environ: Mapping[str, str]) -> RankPlace | None:
    """The place of this process in a world that exists already; None where RANK is not set.

    RecipeError: a variable that is missing, not a number or out of range.
    """
    if "RANK" not in environ:
        return None
    world_size = _number(environ, "WORLD_SIZE", least=1)
    rank = _number(environ, "RANK", least=0)
    if rank >= world_size:
        raise RecipeError(f"RANK={rank} must be less than WORLD_SIZE={world_size}; start ranks 0 to {world_size - 1}")
    local_rank = _number(environ, "LOCAL_RANK", least=0)
    attempt = _number(environ, "TORCHELASTIC_RESTART_COUNT", least=0, default=0)
    host = environ.get("MASTER_ADDR", "")
    if not host:
        raise RecipeError("MASTER_ADDR is not set; it names the host of rank 0, as torchrun does")
    port = _number(environ, "MASTER_PORT", least=1)
    job = re.sub(r"[^A-Za-z0-9._-]", "-", environ.get("TORCHELASTIC_RUN_ID", "none"))
    store = TcpRendezvous(
        host=host,
        port=port,
        prefix=f"megaspec/{job}/{attempt}",
        is_open=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
    return RankPlace(rank, world_size, local_rank, attempt, store)


def _number(environ: Mapping[str, str], name: str, *, least: int, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise RecipeError(f"{name} is not set but RANK is; start ranks with torchrun, or unset RANK to start them here")
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
        raise RecipeError(f"{name}={text} must be a whole number of at least {least}; torchrun sets it")
    return int(text)
