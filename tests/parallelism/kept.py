"""How many bytes a forward pass leaves behind, counted by the storages that are still alive."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Storages(TorchDispatchMode):
    """Remembers every storage that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                one = StorageWeakRef(storage)
                self.seen[one.cdata] = one, storage.nbytes()
        return out


def kept_bytes(run: Callable[[], Tensor], *, without: Iterable[Tensor] = ()) -> int:
    """Bytes that `run` made and that live as long as its result, those of `without` and of the result left out."""
    with _Storages() as storages:
        y = run()
    left_out = {StorageWeakRef(x.untyped_storage()).cdata for x in (*without, y)}
    alive = {cdata: size for cdata, (one, size) in storages.seen.items() if not one.expired()}
    return sum(size for cdata, size in alive.items() if cdata not in left_out)
