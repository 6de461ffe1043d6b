"""Whether the kernel kills processes here because memory runs out. Linux counts it; a SIGKILL alone says nothing."""

from pathlib import Path

from megaspec.launcher.control_groups import GROUPS, OF_THIS_PROCESS, lines_of, memory_groups

# The file that counts it, by version of control groups.
_COUNTERS = {1: "memory.oom_control", 2: "memory.events"}


def memory_kills(groups: Path = GROUPS, of_this_process: Path = OF_THIS_PROCESS) -> int | None:
    """How many processes of this one's control group have been killed because its memory, or all memory, ran out.

    None where the kernel does not say. Only differences mean something: the group may be older than the job.
    """
    for version, folder in memory_groups(groups, of_this_process):
        for line in lines_of(folder / _COUNTERS[version]):
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdecimal():
                return int(count)
    return None
