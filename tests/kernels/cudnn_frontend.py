"""What kernels/megaspec_kernels/attention/cudnn.py asks of NVIDIA's package nvidia-cudnn-frontend, on a CPU.

A graph keeps what it is told and does it by the equation, from the addresses that it is given: so sizes, strides, where
sequences begin, and which operand is which are held to the truth without a GPU. It computes in fp64 and writes what the
plan's types say, and memory that it is not told to write stays as it was.
"""

import ctypes
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megaspec_kernels.attention import cudnn

data_type = SimpleNamespace(
    BFLOAT16=torch.bfloat16, HALF=torch.float16, FLOAT=torch.float32, INT32=torch.int32, INT64=torch.int64
)
heur_mode = SimpleNamespace(A="a")


@dataclass
class Operand:
    """A tensor of a graph."""

    dim: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    data_type: Any = None
    uid: int = -1
    ragged: "Operand | None" = None
    is_output: bool = False

    def set_dim(self, dim: tuple[int, ...]) -> "Operand":
        self.dim = dim
        return self

    def set_stride(self, stride: tuple[int, ...]) -> "Operand":
        self.stride = stride
        return self

    def set_data_type(self, data_type: Any) -> "Operand":
        self.data_type = data_type
        return self

    def set_uid(self, uid: int) -> "Operand":
        self.uid = uid
        return self

    def set_output(self, is_output: bool) -> "Operand":
        self.is_output = is_output
        return self

    def set_ragged_offset(self, ragged: "Operand") -> "Operand":
        self.ragged = ragged
        return self


@dataclass
class Graph:
    """One attention, forward or backward."""

    told: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[Operand, ...] = ()
    steps: list[str] = field(default_factory=list)

    def tensor(self, *, dim: tuple, stride: tuple, data_type: Any, name: str, uid: int) -> Operand:
        return Operand(dim, stride, data_type, uid)

    def sdpa(self, *, generate_stats: bool, **told: Any) -> tuple[Operand, ...]:
        assert generate_stats
        self.told = told
        self.outputs = (Operand(), Operand())
        return self.outputs

    def sdpa_backward(self, *, max_total_seq_len_q: int, max_total_seq_len_kv: int, **told: Any) -> tuple[Operand, ...]:
        assert max_total_seq_len_q == max_total_seq_len_kv
        self.told = told
        self.outputs = (Operand(), Operand(), Operand())
        return self.outputs

    def validate(self) -> None:
        operands = [one for one in self.told.values() if isinstance(one, Operand)] + list(self.outputs)
        uids = [one.uid for one in operands]
        assert -1 not in uids
        # lengths serve as those of queries and of keys
        assert len(set(uids)) == len(uids) - 1
        assert all(one.is_output for one in self.outputs)
        self.steps.append("validate")

    def build_operation_graph(self) -> None:
        self.steps.append("graph")

    def create_execution_plans(self, modes: list[str]) -> None:
        assert modes == [heur_mode.A]
        self.steps.append("plans")

    def check_support(self) -> None:
        self.steps.append("support")

    def build_plans(self) -> None:
        self.steps.append("build")

    def get_workspace_size(self) -> int:
        assert self.steps == ["validate", "graph", "plans", "support", "build"]
        return 0

    def execute(self, addresses: dict[int, int], workspace: int, *, handle: Any) -> None:
        """Sequence by sequence."""
        assert workspace
        assert handle == "handle"
        lengths = read(addresses, self.told["seq_len_q"])
        for number, length in enumerate(lengths.flatten().tolist()):
            assert length <= self.told["q"].dim[2], "longer than the plan's bound"
            if "dO" in self.told:
                self._backward(addresses, number, length)
            else:
                self._forward(addresses, number, length)

    def _weights(self, addresses: dict[int, int], number: int, length: int) -> tuple[Tensor, ...]:
        """q [N, t, H], k and v [K, t, H], scores [N, t, t] in fp64."""
        q, k, v = (sequence(addresses, self.told[name], number, length).to(torch.float64) for name in ("q", "k", "v"))
        groups = q.shape[0] // k.shape[0]
        scores = q @ k.repeat_interleave(groups, dim=0).mT * self.told["attn_scale"]
        behind = torch.arange(length)[:, None] - torch.arange(length)
        is_seen = behind >= 0
        if not self.told.get("use_causal_mask"):
            assert self.told["diagonal_band_right_bound"] == 0
            is_seen &= behind < self.told["diagonal_band_left_bound"]
        return q, k, v, scores.masked_fill(~is_seen, float("-inf"))

    def _forward(self, addresses: dict[int, int], number: int, length: int) -> None:
        _, k, v, scores = self._weights(addresses, number, length)
        groups = scores.shape[0] // k.shape[0]
        out, lse = self.outputs
        sequence(addresses, out, number, length).copy_(scores.softmax(dim=-1) @ v.repeat_interleave(groups, dim=0))
        sequence(addresses, lse, number, length).copy_(scores.logsumexp(dim=-1, keepdim=True))

    def _backward(self, addresses: dict[int, int], number: int, length: int) -> None:
        q, k, v, scores = self._weights(addresses, number, length)
        K = k.shape[0]
        out, grad, lse = (
            sequence(addresses, self.told[name], number, length).to(torch.float64) for name in ("o", "dO", "stats")
        )
        groups = q.shape[0] // K
        weights = (scores - lse).exp()
        delta = (out * grad).sum(dim=-1, keepdim=True)
        d_scores = weights * (grad @ v.repeat_interleave(groups, dim=0).mT - delta) * self.told["attn_scale"]
        d_q, d_k, d_v = (sequence(addresses, one, number, length) for one in self.outputs)
        d_q.copy_(d_scores @ k.repeat_interleave(groups, dim=0))
        d_k.copy_((d_scores.mT @ q).unflatten(0, (K, groups)).sum(dim=1))
        d_v.copy_((weights.mT @ grad).unflatten(0, (K, groups)).sum(dim=1))


def pygraph(*, io_data_type: Any, intermediate_data_type: Any, compute_data_type: Any, handle: Any) -> Graph:
    return Graph()


def at(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """What lies at an address."""
    if count == 0:
        return torch.empty(0, dtype=dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


def read(addresses: dict[int, int], operand: Operand) -> Tensor:
    """Of an operand without sequences."""
    return at(addresses[operand.uid], operand.dim[0], operand.data_type).view(operand.dim)


def sequence(addresses: dict[int, int], operand: Operand, number: int, length: int) -> Tensor:
    """[heads, tokens, size] of a sequence, in the operand's memory."""
    begins = read(addresses, operand.ragged).flatten().tolist()
    _, heads, _, size = operand.dim
    _, of_head, of_token, of_element = operand.stride
    memory = at(addresses[operand.uid], begins[-1], operand.data_type)
    assert begins[number + 1] - begins[number] == length * of_token
    return memory.as_strided((heads, length, size), (of_head, of_token, of_element), begins[number])


def put_in_place(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """In the place of the package. -> graphs that are made."""
    made: list[Graph] = []

    def telling(**told: Any) -> Graph:
        made.append(pygraph(**told))
        return made[-1]

    frontend = SimpleNamespace(data_type=data_type, heur_mode=heur_mode, pygraph=telling)
    monkeypatch.setattr(cudnn, "require", lambda module: frontend)
    monkeypatch.setattr(cudnn, "_handle", lambda device: "handle")
    monkeypatch.setattr(cudnn, "_takes", lambda q, **options: True)
    monkeypatch.setattr(cudnn, "_PLANS", {})
    return made
