"""One cuDNN in a process: that which torch has loaded.

cuDNN is a library of that name in front and several behind it, `libcudnn_graph.so.9` among them, which are loaded when
they are first needed. Where a machine holds two versions, beside torch and in the system's folders, each package that
uses cuDNN looks in its own order, and a process ends up with libraries of both. Then one misses a symbol of the other
(an import error), or finds it and reads memory that is laid out otherwise (an illegal access, seen in the backward pass
of attention). So a package that uses cuDNN is imported where it finds torch's and no other.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_MAPS = Path("/proc/self/maps")


@contextmanager
def cudnn_of_torch(variable: str) -> Iterator[None]:
    """While a package is imported that uses cuDNN: all libraries of torch's cuDNN are loaded, and the environment's
    `variable`, which names the folder that the package looks into first, names theirs. Where torch has no cuDNN, or
    holds it in itself, the package has the choice.

    OSError: one of the libraries can't be loaded.
    """
    folder = _load_all_of_torch()
    if folder is None:
        yield
        return
    before = os.environ.get(variable)
    os.environ[variable] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def _load_all_of_torch() -> Path | None:
    """Loads every library of torch's cuDNN. -> their folder; None: there is none.

    Those behind the front are asked for by their names, and a library that is loaded already is what its name gives.
    """
    # finds and loads the one in front
    if torch.backends.cudnn.version() is None:
        return None
    front = loaded_cudnn(_MAPS.read_text())
    if front is None:
        return None
    for file in sorted(front.parent.glob("libcudnn_*" + front.name.removeprefix("libcudnn"))):
        ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    return front.parent


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
