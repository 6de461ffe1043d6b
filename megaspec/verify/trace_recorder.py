"""Tensors without numbers go through a step, and what it does is written down.

Note "Meta tensors". They have shapes, storages and gradients, and no numbers. Unlike fake CPU tensors they take a GPU's
way wherever the code asks for the device, collectives included; unlike fake CUDA tensors they have a backward pass on a
machine without CUDA. What reads a number fails: so every trace shows that a step reads none.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megaspec.nn.fp8 import layer_of
from megaspec.nn.linear import sum_of
from megaspec.verify.trace_memory import (
    ACTIVATIONS,
    COMMUNICATION,
    INSIDE,
    LOGITS,
    OPTIMIZER,
    WEIGHTS,
    Memory,
    storage_of,
)

# Operations under torch's collectives: their kind, and where the tensor lies whose size counts.
_IN_PLACE = {
    "allreduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("p2p", 0),
}
_FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
_SEND_NOTHING = ("recv_", "wait_tensor")


@dataclass(frozen=True)
class Call:
    """A collective. `bytes`: as estimate/communication.py counts them; `ranks`: of its group."""

    kind: str
    ranks: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class TracePoint:
    """Where in a step the rank is."""

    phase: str
    micro: int | None = None
    unit: str = ""

    def __str__(self) -> str:
        if not self.unit:
            return self.phase
        return f"{self.phase} of micro batch {self.micro}, {self.unit}"


class Recorder:
    """While `watching`: every storage goes into `memory`, every collective into `calls`, by micro batch."""

    def __init__(self) -> None:
        self.place = TracePoint("build")
        self.memory = Memory(lambda: str(self.place))
        self.calls: Counter[tuple[Call, int | None]] = Counter()
        self.unit: object | None = None
        """What stands for all that the running unit makes; None: it is counted tensor by tensor."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        with _answers(self.memory), _Operations(self):
            yield

    @property
    def kind(self) -> str:
        """What a new tensor is for."""
        if self.unit is not None:
            return INSIDE
        if self.place.phase == "build":
            return OPTIMIZER
        if self.place.unit == "head":
            return LOGITS
        return ACTIVATIONS


@contextmanager
def _answers(memory: Memory) -> Iterator[None]:
    """Addresses and sizes of what has no memory, and the choice among attention's operations, which no mode sees in a
    backward pass: in place of torch's own while the context lasts."""

    def untyped_storage(x: Tensor) -> _Storage:
        return _Storage(storage_of(x), memory)

    def data_ptr(x: Tensor) -> int:
        return memory.address(storage_of(x)) + x.storage_offset() * x.itemsize

    with ExitStack() as stack:
        for name, function in (("untyped_storage", untyped_storage), ("data_ptr", data_ptr)):
            setattr(Tensor, name, function)
            stack.callback(delattr, Tensor, name)
        stack.callback(setattr, F, "scaled_dot_product_attention", F.scaled_dot_product_attention)
        F.scaled_dot_product_attention = _attention
        yield


class _Storage:
    """A storage with an address of its own, whose size the memory keeps an eye on."""

    def __init__(self, storage: torch.UntypedStorage, memory: Memory):
        self._storage = storage
        self._memory = memory

    def data_ptr(self) -> int:
        return self._memory.address(self._storage)

    def nbytes(self) -> int:
        return self._storage.nbytes()

    def resize_(self, size: int) -> None:
        self._storage.resize_(size)
        self._memory.resized(self._storage)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """The fused operation of today's GPUs, with what it keeps for the backward pass."""
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
    return cudnn(q, k, v, attn_mask, True, 0.0, is_causal, scale=scale)[0]


@dataclass(frozen=True)
class _MadeTensor:
    """All that a new tensor without numbers is made from."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> "_MadeTensor":
        return cls(tuple(x.shape), x.stride(), x.dtype, x.device)

    def again(self) -> Tensor:
        """Another tensor like it."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


class _Shapes:
    """Results of operations that make new tensors, of the same shapes for arguments of the same shapes: layers repeat
    each other, and to find a shape out takes torch ten times as long as to make a tensor of it."""

    def __init__(self) -> None:
        # None in a result: an operator gives nothing for a gradient that nobody asked for
        self._known: dict[Hashable, list[_MadeTensor | None]] = {}
        self._plain: dict[torch._ops.OpOverload, bool] = {}

    def __call__(self, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func not in self._plain:
            self._plain[func] = _makes_new(func)
        if not self._plain[func]:
            return func(*args, **kwargs)
        key = (func, _form(args), _form(tuple(kwargs.items())))
        if key in self._known:
            made = tuple(None if known is None else known.again() for known in self._known[key])
            if len(func._schema.returns) == 1:
                return made[0]
            return made
        out = func(*args, **kwargs)
        made = out if isinstance(out, tuple) else (out,)
        self._known[key] = [None if x is None else _MadeTensor.of(x) for x in made]
        return out


def _makes_new(func: torch._ops.OpOverload) -> bool:
    """Whether an operation does nothing but make new tensors."""
    schema = func._schema
    if func is torch.ops.aten._unsafe_view.default:
        # what a matrix product of sequences ends with: it shares memory and does not say so
        return False
    if func.namespace != "aten" or not schema.returns:
        return False
    if any(str(value.type) != "Tensor" for value in schema.returns):
        return False
    # what shares memory with an argument, or is written in place, carries this
    return not any(value.alias_info for value in (*schema.arguments, *schema.returns))


def _form(value: Any) -> Hashable:
    """All that the shape of a result can depend on."""
    if isinstance(value, Tensor):
        return Tensor, tuple(value.shape), value.stride(), value.dtype, value.device
    if isinstance(value, tuple | list):
        return tuple(map(_form, value))
    return type(value), value


class _Operations(TorchDispatchMode):
    """Every operation on tensors, those of the backward pass included."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self._recorder = recorder
        self._shapes = _Shapes()
        self._ranks: dict[str, tuple[int, ...]] = {}  # of a group, by its name

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.megaspec.add_weight_gradient.default:
            # without numbers torch would leave its inside out: who waits for the gradient has to be told
            _, ticket, *factors = args
            with self:  # it is off inside of what it handles
                sum_of(ticket).add(_Product(*factors, self._recorder.unit))
            return None
        if func is torch.ops.megaspec.add_fp8_weight_gradient.default:
            _, ticket, _, *factors = args
            with self:
                sum_of(ticket).add(_Product(*factors, self._recorder.unit))
            return None
        if func.namespace == "megaspec":
            self._quantise_weight(func, args)
        out = self._shapes(func, args, kwargs or {})
        if func.namespace in ("c10d", "_c10d_functional"):
            self._collective(func, args, out)
        recorder = self._recorder
        results = out if isinstance(out, tuple | list) else (out,)
        for x in results:
            # what is on the CPU has numbers, and is no part of what a GPU holds
            if isinstance(x, Tensor) and x.is_meta:
                recorder.memory.see(x, recorder.kind)
        return out

    def _quantise_weight(self, func: torch._ops.OpOverload, args: Sequence[Any]) -> None:
        """An operation that takes a layer's weight in fp8 has it quantised where it was not, which stays; without
        numbers torch leaves its inside out."""
        names = [argument.name for argument in func._schema.arguments]
        if not func._opname.startswith("fp8_") or "weight" not in names:
            return
        layer = layer_of(args[names.index("ticket")])
        # what it works with, and asks other ranks, is the operation's inside
        pair = layer.weight(args[names.index("weight")])
        for part in (pair.rows, pair.columns):
            self._recorder.memory.name(part.values, WEIGHTS)
            self._recorder.memory.name(part.scale, WEIGHTS)

    def _collective(self, func: torch._ops.OpOverload, args: Sequence[Any], out: Any) -> None:
        name = func._opname
        recorder = self._recorder
        if name == "recv_":
            for x in args[0]:
                recorder.memory.name(x, COMMUNICATION)
        if name in _SEND_NOTHING:
            return
        if name in _FUNCTIONAL and func.namespace == "_c10d_functional":
            kind = _FUNCTIONAL[name]
            group = args[-1]
            x = out if name == "all_gather_into_tensor" else args[0]
        else:
            kind, where = _IN_PLACE[name]
            x = args[where]
            if isinstance(x, list):
                x = x[0]
            group_object = next(argument for argument in args if isinstance(argument, torch.ScriptObject))
            group = dist.ProcessGroup.unbox(group_object).group_name
        recorder.calls[Call(kind, self._ranks_of(group), x.nbytes), recorder.place.micro] += 1

    def _ranks_of(self, group: str) -> tuple[int, ...]:
        if group not in self._ranks:
            found = dist.distributed_c10d._resolve_process_group(group)
            self._ranks[group] = tuple(dist.get_process_group_ranks(found))
        return self._ranks[group]


class _Product:
    """A product that does nothing but keep its factors, which one that is deferred keeps, too."""

    def __init__(self, *kept: object):
        self._kept = kept

    def __call__(self, total: Tensor, overwrite: bool) -> None:
        pass
