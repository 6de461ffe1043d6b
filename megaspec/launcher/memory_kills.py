"""Whether the kernel kills processes here because memory runs out. Linux counts it; a SIGKILL alone says nothing."""

from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OF_THIS_PROCESS = Path("/proc/self/cgroup")


def memory_kills(groups: Path = GROUPS, of_this_process: Path = OF_THIS_PROCESS) -> int | None:
    """How many processes of this one's control group have been killed because its memory, or all memory, ran out.

    None where the kernel does not say. Only differences mean something: the group may be older than the job.
    """
    for counters in _counters(groups, of_this_process):
        for line in _lines(counters):
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdecimal():
                return int(count)
    return None


def _counters(groups: Path, of_this_process: Path) -> Iterator[Path]:
    """Files that may count it, the most exact first: version 1's, then version 2's, from the own group upwards.

    Where memory is not controlled for a group, or a container does not see its own path, a group above counts.
    """
    by_version: list[tuple[Path, str, str]] = []
    for line in _lines(of_this_process):
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            by_version.insert(0, (groups / "memory", path, "memory.oom_control"))
        elif not controllers:
            by_version.append((groups, path, "memory.events"))
    for root, path, name in by_version:
        inside = Path(path.lstrip("/"))
        for group in (inside, *inside.parents):
            yield root / group / name


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
