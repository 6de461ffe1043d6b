"""One cuDNN in a process: that which torch has loaded.

cuDNN is a library of that name and several below it, `libcudnn_graph.so.9` among them, which are loaded when they are
needed first. Where a machine holds two versions, beside torch and in the system's folders, each package that uses cuDNN
looks for those below in its own order, and a process ends up with libraries of both: then one misses a symbol of the
other, or, worse, finds it. What is loaded already is taken by its name, so all of torch's are loaded before another
package looks.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch

_MAPS = Path("/proc/self/maps")


@cache
def load_all_of_torch() -> tuple[Path, ...]:
    """Loads every library of torch's cuDNN; none where torch has no cuDNN. -> their files.

    OSError: one can't be loaded.
    """
    # finds and loads the one that the others lie beside
    if torch.backends.cudnn.version() is None:
        return ()
    found = loaded_cudnn(_MAPS.read_text())
    if found is None:
        # built into torch: another package can't take it for its own
        return ()
    files = tuple(sorted(found.parent.glob("libcudnn_*" + found.name.removeprefix("libcudnn"))))
    for file in files:
        ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    return files


def loaded_cudnn(maps: str) -> Path | None:
    """The file of cuDNN that a process has loaded first, from the text of its /proc/self/maps; None: it has none."""
    for line in maps.splitlines():
        # address, permissions, offset, device, inode, path
        fields = line.split(maxsplit=5)
        if len(fields) < 6:
            continue
        file = Path(fields[5])
        if file.name.startswith("libcudnn.so"):
            return file
    return None
