"""Packed documents and windows through cuDNN's kernels for sequences of different lengths.

They are about twice as fast as FlashAttention-2 on Hopper. torch reaches them, too, but makes their plan anew at every
call (varlen.py). Here they are reached through NVIDIA's package nvidia-cudnn-frontend, and a plan is made once for each
shape and bound: 0.5 s, in which cuDNN compiles the kernel. The batch's documents are data: where they begin and how
long they are lies on the GPU, and the host reads nothing from there.

Documents of no token are sequences of no query and no key. cuDNN before 9.25 gives NaN for queries that have no key,
which no document of a causal block has: only causal blocks go this way. Its gradients are added in no order: in a fixed
one it wants memory for all documents as if each were the longest. What hides nothing goes through sdpa.py, whose
kernels are cuDNN's, too, and so do blocks that are not causal.
"""

# B sequences, T tokens, N query heads, K key and value heads, H head size; P = B · T packed, S documents, L the longest

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megaspec_kernels.attention import one_order, sdpa, sdpa_block
from megaspec_kernels.attention.documents import BlockDocuments, Documents, whole_rows
from megaspec_kernels.attention.one_block import attention_as_one_block
from megaspec_kernels.attention.packages import require
from megaspec_kernels.attention.scoring import PLAIN, Scoring
from megaspec_kernels.operation import fake_of, operation

_HALF = (torch.bfloat16, torch.float16)


def attention(
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKH: Tensor,
    *,
    documents: Documents | None = None,
    window: int | None = None,
    scoring: Scoring = PLAIN,
    sinks: Tensor | None = None,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """[B, T, N, H], [B, T, K, H], [B, T, K, H] -> [B, T, N, H]; see reference.py."""
    if documents is None and window is None:
        return sdpa.attention(q_BTNH, k_BTKH, v_BTKH, scoring=scoring, sinks=sinks, drop=drop)
    # its plans take what lies by itself; copied here, so that the copies are kept, and not what they are views of
    q_BTNH = q_BTNH.contiguous()
    k_BTKH = k_BTKH.contiguous()
    v_BTKH = v_BTKH.contiguous()
    if q_BTNH.is_meta:
        # without numbers: a plain causal pass has the same results and keeps the same
        return sdpa.attention(q_BTNH, k_BTKH, v_BTKH, scoring=scoring, sinks=sinks, drop=drop)
    assert drop is None, "cudnn has no attention dropout; the resolver picks reference"
    return attention_as_one_block(
        q_BTNH,
        k_BTKH,
        v_BTKH,
        forward=block_forward,
        backward=block_backward,
        documents=documents,
        window=window,
        scoring=scoring,
        sinks=sinks,
    )


def block_forward(
    q_BTNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    *,
    causal: bool,
    mask: Tensor | None = None,
    documents: BlockDocuments | None = None,
    window: int | None = None,
    scoring: Scoring = PLAIN,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """-> [B, T, N, H], [B, N, T]; see reference_block.py."""
    if not _takes(q_BTNH, causal=causal, mask=mask, hides=documents is not None or window is not None):
        return sdpa_block.block_forward(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            causal=causal,
            mask=mask,
            documents=documents,
            window=window,
            scoring=scoring,
            drop=drop,
        )
    assert drop is None, "cudnn has no attention dropout; the resolver picks reference"
    assert scoring.cap is None, "cudnn caps no scores; the resolver picks another"
    B, T, _, H = q_BTNH.shape
    packed = _packed(q_BTNH, k_BSKH, v_BSKH)
    out_PNH, lse_PN = _forward(*packed, *_lengths(documents, q_BTNH), window, scoring.scale_of(H))
    return out_PNH.unflatten(0, (B, T)), lse_PN.unflatten(0, (B, T)).transpose(1, 2)


def block_backward(
    grad_BTNH: Tensor,
    q_BTNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    out_BTNH: Tensor,
    lse_BNT: Tensor,
    *,
    causal: bool,
    mask: Tensor | None = None,
    documents: BlockDocuments | None = None,
    window: int | None = None,
    scoring: Scoring = PLAIN,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> what the block adds to the gradients of q, k and v; see reference_block.py."""
    if not _takes(q_BTNH, causal=causal, mask=mask, hides=documents is not None or window is not None):
        return sdpa_block.block_backward(
            grad_BTNH,
            q_BTNH,
            k_BSKH,
            v_BSKH,
            out_BTNH,
            lse_BNT,
            causal=causal,
            mask=mask,
            documents=documents,
            window=window,
            scoring=scoring,
            drop=drop,
        )
    assert drop is None, "cudnn has no attention dropout; the resolver picks reference"
    assert scoring.cap is None, "cudnn caps no scores; the resolver picks another"
    B, T, _, H = q_BTNH.shape
    packed = _packed(grad_BTNH, q_BTNH, k_BSKH, v_BSKH, out_BTNH)
    # cuDNN wants the numbers of a token's heads side by side: it sizes its memory by them
    lse_PN = lse_BNT.transpose(1, 2).flatten(0, 1).contiguous()
    grads = _backward(*packed, lse_PN, *_lengths(documents, q_BTNH), window, scoring.scale_of(H))
    d_q, d_k, d_v = (x.unflatten(0, (B, T)) for x in grads)
    return d_q, d_k, d_v


def _takes(q_BTNH: Tensor, *, causal: bool, mask: Tensor | None, hides: bool) -> bool:
    """Whether a block goes through cuDNN's kernels for lengths. Everything else is sdpa_block's, by its own table."""
    return hides and causal and mask is None and q_BTNH.dtype in _HALF and q_BTNH.device.type != "cpu"


def _packed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[B, T, N, H] -> [B · T, N, H] of each, as the plans take them."""
    return tuple(x.flatten(0, 1).contiguous() for x in tensors)


def _lengths(documents: BlockDocuments | None, q_BTNH: Tensor) -> tuple[Tensor, int]:
    """Where documents begin in all rows, and a bound on their length; a window alone lies in rows of one document."""
    B, T = q_BTNH.shape[:2]
    if documents is None:
        rows = whole_rows(B, T, device=q_BTNH.device)
    else:
        rows = documents.queries.for_rows(B)
    # of one query a sequence cuDNN makes another problem, with a log-sum-exp of some heads only
    return rows.starts, max(2, rows.longest)


# Operands of a plan.
_Q, _K, _V, _OUT, _LSE, _GRAD, _D_Q, _D_K, _D_V = range(1, 10)
_OF_QUERIES, _OF_KEYS, _OF_LSE, _TOKENS = range(10, 14)


@dataclass(frozen=True)
class Shape:
    """What a plan is made for."""

    sequences: int
    """S"""
    longest: int
    """L"""
    tokens: int
    """P"""
    heads: int
    kv_heads: int
    head_size: int
    window: int | None
    scale: float
    dtype: torch.dtype


@dataclass(frozen=True)
class Plan:
    """A graph of cuDNN's with its kernel."""

    graph: Any
    workspace: int
    """Bytes."""


class _Handles(threading.local):
    """cuDNN wants a handle for each thread, and autograd has one of its own."""

    def __init__(self) -> None:
        self.by_device: dict[int, Any] = {}


_HANDLES = _Handles()
# by direction, device and shape; threads share them
_PLANS: dict[tuple[str, int, Shape], Plan] = {}
_MAKING = threading.Lock()


def _handle(device: torch.device) -> Any:
    """cuDNN's handle of this thread, on torch's stream."""
    cudnn = require("cudnn")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _HANDLES.by_device:
        with torch.cuda.device(index):
            _HANDLES.by_device[index] = cudnn.create_handle()
    handle = _HANDLES.by_device[index]
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(index).cuda_stream)
    return handle


def plan_of(direction: str, shape: Shape, **where: Any) -> Plan:
    """Makes a plan. `where`: what cuDNN's frontend is told of the GPU, its handle or a description.

    RuntimeError: cuDNN has no kernel for it.
    """
    cudnn = require("cudnn")
    graph = cudnn.pygraph(
        io_data_type=_type_of(shape.dtype),
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        **where,
    )
    add = _add_forward if direction == "forward" else _add_backward
    add(graph, shape)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return Plan(graph, graph.get_workspace_size())


def _type_of(dtype: torch.dtype) -> Any:
    types = require("cudnn").data_type
    return types.BFLOAT16 if dtype == torch.bfloat16 else types.HALF


@dataclass(frozen=True)
class _Ragged:
    """The operands that say where sequences begin, in elements of what they are of, and how long they are."""

    of_queries: Any
    of_keys: Any
    of_lse: Any
    tokens: Any


def _ragged(graph: Any, shape: Shape) -> _Ragged:
    types = require("cudnn").data_type

    def one(uid: int, count: int, data_type: Any) -> Any:
        return graph.tensor(
            dim=(count, 1, 1, 1), stride=(1, 1, 1, 1), data_type=data_type, name=f"operand_{uid}", uid=uid
        )

    return _Ragged(
        of_queries=one(_OF_QUERIES, shape.sequences + 1, types.INT64),
        of_keys=one(_OF_KEYS, shape.sequences + 1, types.INT64),
        of_lse=one(_OF_LSE, shape.sequences + 1, types.INT64),
        tokens=one(_TOKENS, shape.sequences, types.INT32),
    )


def _layout(shape: Shape, heads: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of [S, heads, L, size] whose tokens lie one behind the other."""
    dim = (shape.sequences, heads, shape.longest, size)
    return dim, (shape.longest * heads * size, size, heads * size, 1)


def _input(graph: Any, uid: int, shape: Shape, heads: int, ragged_offset: Any) -> Any:
    dim, stride = _layout(shape, heads, shape.head_size)
    operand = graph.tensor(dim=dim, stride=stride, data_type=_type_of(shape.dtype), name=f"operand_{uid}", uid=uid)
    operand.set_ragged_offset(ragged_offset)
    return operand


def _output(operand: Any, uid: int, shape: Shape, heads: int, ragged_offset: Any) -> None:
    dim, stride = _layout(shape, heads, shape.head_size)
    operand.set_output(True).set_dim(dim).set_stride(stride).set_data_type(_type_of(shape.dtype)).set_uid(uid)
    operand.set_ragged_offset(ragged_offset)


def _options(shape: Shape, ragged: _Ragged) -> dict[str, Any]:
    """What both directions are told. In a window a query sees so many keys, itself the last."""
    options = {
        "attn_scale": shape.scale,
        "use_padding_mask": True,
        "seq_len_q": ragged.tokens,
        "seq_len_kv": ragged.tokens,
    }
    if shape.window is None:
        return options | {"use_causal_mask": True}
    return options | {"diagonal_band_left_bound": shape.window, "diagonal_band_right_bound": 0}


def _add_forward(graph: Any, shape: Shape) -> None:
    ragged = _ragged(graph, shape)
    out, lse = graph.sdpa(
        q=_input(graph, _Q, shape, shape.heads, ragged.of_queries),
        k=_input(graph, _K, shape, shape.kv_heads, ragged.of_keys),
        v=_input(graph, _V, shape, shape.kv_heads, ragged.of_keys),
        generate_stats=True,
        **_options(shape, ragged),
    )
    _output(out, _OUT, shape, shape.heads, ragged.of_queries)
    dim, stride = _layout(shape, shape.heads, 1)
    lse.set_output(True).set_dim(dim).set_stride(stride).set_data_type(require("cudnn").data_type.FLOAT).set_uid(_LSE)
    lse.set_ragged_offset(ragged.of_lse)


def _add_backward(graph: Any, shape: Shape) -> None:
    ragged = _ragged(graph, shape)
    dim, stride = _layout(shape, shape.heads, 1)
    lse = graph.tensor(dim=dim, stride=stride, data_type=require("cudnn").data_type.FLOAT, name="lse", uid=_LSE)
    lse.set_ragged_offset(ragged.of_lse)
    d_q, d_k, d_v = graph.sdpa_backward(
        q=_input(graph, _Q, shape, shape.heads, ragged.of_queries),
        k=_input(graph, _K, shape, shape.kv_heads, ragged.of_keys),
        v=_input(graph, _V, shape, shape.kv_heads, ragged.of_keys),
        o=_input(graph, _OUT, shape, shape.heads, ragged.of_queries),
        dO=_input(graph, _GRAD, shape, shape.heads, ragged.of_queries),
        stats=lse,
        # else cuDNN wants memory for all sequences as if each were the longest
        max_total_seq_len_q=shape.tokens,
        max_total_seq_len_kv=shape.tokens,
        **_options(shape, ragged),
    )
    _output(d_q, _D_Q, shape, shape.heads, ragged.of_queries)
    _output(d_k, _D_K, shape, shape.kv_heads, ragged.of_keys)
    _output(d_v, _D_V, shape, shape.kv_heads, ragged.of_keys)


def _run(direction: str, shape: Shape, operands: dict[int, Tensor], starts: Tensor) -> None:
    device = starts.device
    handle = _handle(device)
    key = (direction, -1 if device.index is None else device.index, shape)
    with _MAKING:
        if key not in _PLANS:
            _PLANS[key] = plan_of(direction, shape, handle=handle)
    plan = _PLANS[key]
    per_token_3 = _elements(shape.heads * shape.head_size, shape.kv_heads * shape.head_size, shape.heads, device)
    begin_3S = starts * per_token_3[:, None]
    tokens_S = starts.diff()
    ragged = {_OF_QUERIES: begin_3S[0], _OF_KEYS: begin_3S[1], _OF_LSE: begin_3S[2], _TOKENS: tokens_S}
    addresses = {uid: x.data_ptr() for uid, x in (operands | ragged).items()}
    # at least a byte, so that it has an address; the allocator gives it away again behind this stream's work
    workspace = torch.empty(max(1, plan.workspace), dtype=torch.uint8, device=device)
    plan.graph.execute(addresses, workspace.data_ptr(), handle=handle)


@cache
def _elements(of_queries: int, of_keys: int, of_lse: int, device: torch.device) -> Tensor:
    """int64 [3]: what a token has of queries, of keys and of the log-sum-exp. Kept, since a copy from the host would
    wait for the GPU."""
    return torch.tensor((of_queries, of_keys, of_lse), dtype=torch.int64, device=device)


def _shape(q_PNH: Tensor, k_PKH: Tensor, starts: Tensor, longest: int, window: int | None, scale: float) -> Shape:
    P, N, H = q_PNH.shape
    assert k_PKH.shape[0] == P, f"a causal block is square, {P} queries meet {k_PKH.shape[0]} keys"
    return Shape(starts.shape[0] - 1, longest, P, N, k_PKH.shape[1], H, window, scale, q_PNH.dtype)


# Operations of their own: torch.compile can't look into them.
@operation("megaspec::cudnn_documents")
def _forward(
    q_PNH: Tensor, k_PKH: Tensor, v_PKH: Tensor, starts: Tensor, longest: int, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    # the compiler may hand on other strides than it was told
    q_PNH, k_PKH, v_PKH = (x.contiguous() for x in (q_PNH, k_PKH, v_PKH))
    out_PNH = torch.empty_like(q_PNH)
    lse_PN = q_PNH.new_empty(q_PNH.shape[:2], dtype=torch.float32)
    operands = {_Q: q_PNH, _K: k_PKH, _V: v_PKH, _OUT: out_PNH, _LSE: lse_PN}
    _run("forward", _shape(q_PNH, k_PKH, starts, longest, window, scale), operands, starts)
    return out_PNH, lse_PN


@fake_of(_forward)
def _(q_PNH, k_PKH, v_PKH, starts, longest, window, scale):
    return q_PNH.new_empty(q_PNH.shape), q_PNH.new_empty(q_PNH.shape[:2], dtype=torch.float32)


@operation("megaspec::cudnn_documents_backward")
def _backward(
    grad_PNH: Tensor,
    q_PNH: Tensor,
    k_PKH: Tensor,
    v_PKH: Tensor,
    out_PNH: Tensor,
    lse_PN: Tensor,
    starts: Tensor,
    longest: int,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    assert not one_order.is_asked_for(), "cudnn adds the gradients of documents in no order; the resolver refuses it"
    inputs = {_GRAD: grad_PNH, _Q: q_PNH, _K: k_PKH, _V: v_PKH, _OUT: out_PNH, _LSE: lse_PN}
    inputs = {uid: x.contiguous() for uid, x in inputs.items()}
    d_q = q_PNH.new_empty(q_PNH.shape)
    d_k = k_PKH.new_empty(k_PKH.shape)
    d_v = v_PKH.new_empty(v_PKH.shape)
    operands = inputs | {_D_Q: d_q, _D_K: d_k, _D_V: d_v}
    _run("backward", _shape(q_PNH, k_PKH, starts, longest, window, scale), operands, starts)
    return d_q, d_k, d_v


@fake_of(_backward)
def _(grad_PNH, q_PNH, k_PKH, v_PKH, out_PNH, lse_PN, starts, longest, window, scale):
    return q_PNH.new_empty(q_PNH.shape), k_PKH.new_empty(k_PKH.shape), v_PKH.new_empty(v_PKH.shape)
