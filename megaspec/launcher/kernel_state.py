"""What the kernel says of a process that may answer nothing itself. Linux; elsewhere nothing is known. Torch-free."""

from contextlib import suppress
from pathlib import Path


def kernel_of(pid: int) -> dict[str, str]:
    """Its `state` (T: stopped, Z: dead), its `threads`, its memory, and `wchan`, the function of the kernel that it
    sleeps in; empty if it is gone."""
    found = {}
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("State", "Threads", "VmRSS"):
                found[name.lower()] = value.strip()
        wchan = Path(f"/proc/{pid}/wchan").read_text().strip()
        if wchan not in ("", "0"):
            found["wchan"] = wchan
    return found
