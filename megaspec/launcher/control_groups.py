"""The files of the control groups that this process is in, of version 1 and 2. Linux; elsewhere there are none."""

from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OF_THIS_PROCESS = Path("/proc/self/cgroup")


def memory_groups(groups: Path = GROUPS, of_this_process: Path = OF_THIS_PROCESS) -> Iterator[tuple[int, Path]]:
    """(version, folder) of what may count or limit this process's memory, the most exact first: version 1's, then
    version 2's, from the own group upwards.

    Where memory is not controlled for a group, or a container does not see its own path, a group above does; a folder
    may not be there.
    """
    by_version: list[tuple[int, Path, str]] = []
    for line in lines_of(of_this_process):
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            by_version.insert(0, (1, groups / "memory", path))
        elif not controllers:
            by_version.append((2, groups, path))
    for version, root, path in by_version:
        inside = Path(path.lstrip("/"))
        for group in (inside, *inside.parents):
            yield version, root / group


def lines_of(path: Path) -> list[str]:
    """No lines where it can't be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
