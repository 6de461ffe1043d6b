"""Blocks of attention, put together again, against the truth over all keys at once."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megaspec_kernels.attention import reference_block, sdpa_block
from megaspec_kernels.attention.documents import BlockDocuments, Documents, documents_of
from megaspec_kernels.attention.scoring import PLAIN, Scoring
from megaspec_kernels.gate import Results, check, in_dtype, results
from megaspec_kernels.registry import REGISTRY, AttentionKernel, AttentionMergeKernel
from tests.kernels.test_attention import skip_what_has_another_test


@dataclass(frozen=True)
class Shape:
    """B sequences, T queries, keys in blocks that begin at `starts` and end at S, N and K heads, H head size.

    The queries are the last T of S tokens; the last block of a causal shape holds just their keys.
    """

    B: int
    T: int
    starts: tuple[int, ...]
    S: int
    N: int
    K: int
    H: int
    causal: bool = True
    documents: bool = False
    scoring: Scoring = PLAIN

    @property
    def keys(self) -> list[slice]:
        return [slice(*pair) for pair in pairwise((*self.starts, self.S))]

    def __str__(self) -> str:
        extra = ("-causal" if self.causal else "") + ("-docs" if self.documents else "")
        extra += "" if self.scoring == PLAIN else f"-{self.scoring.scale}-{self.scoring.cap}"
        return f"{self.B}x{self.T}of{len(self.starts)}:{self.S}x{self.N}k{self.K}x{self.H}{extra}"


SHAPES = [
    Shape(1, 1, (0,), 1, 1, 1, 8),
    Shape(2, 63, (0,), 63, 4, 4, 64),
    Shape(2, 63, (0, 5, 40), 103, 6, 2, 16),
    Shape(3, 7, (0, 63), 64, 4, 1, 32, causal=False),
    Shape(2, 63, (0, 100, 101), 164, 4, 2, 24, documents=True),
    Shape(1, 500, (0, 500), 1000, 2, 1, 64, documents=True),
    Shape(2, 63, (0, 5, 40), 103, 6, 2, 16, scoring=Scoring(scale=0.4)),
    Shape(2, 63, (0, 40), 103, 4, 2, 16, documents=True, scoring=Scoring(scale=0.4, cap=0.8)),
]
SHAPES_CUDA = [
    Shape(1, 1024, (0,), 1024, 8, 2, 64),
    Shape(2, 1000, (0,), 1000, 8, 8, 128),
    Shape(2, 512, (0, 512, 1024), 1536, 8, 2, 128),
    Shape(2, 512, (0, 512), 1536, 8, 2, 64, causal=False),
    Shape(2, 512, (0, 512), 1024, 8, 2, 128, documents=True),
]


Blocks = tuple[AttentionKernel, AttentionMergeKernel]


def blocks_of(name: str, device: torch.device) -> Blocks:
    """An attention kernel, with what puts its blocks together where it is taken."""
    fused = name == "sdpa" and device.type == "cuda"
    return REGISTRY["attention"][name], REGISTRY["attention_merge"]["triton" if fused else "reference"]


class InBlocks(torch.autograd.Function):
    """Attention over keys that come in blocks, the last one first."""

    @staticmethod
    def forward(ctx, q, k, v, blocks, shape, documents):
        attention, merging = blocks
        out = lse = None
        for keys, options in order(shape, documents):
            new, new_lse = attention.block_forward(q, k[:, keys], v[:, keys], **options)
            assert new.dtype == q.dtype
            assert new_lse.dtype == torch.promote_types(q.dtype, torch.float32)
            if out is None:
                out, lse = new.to(new_lse.dtype, copy=True), new_lse.clone()
            else:
                merging.merge(out, lse, new, new_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = blocks, shape, documents
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        (attention, merging), shape, documents = ctx.rest
        sums = [torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v)]
        for keys, options in order(shape, documents):
            grads = attention.block_backward(grad, q, k[:, keys], v[:, keys], out, lse, **options)
            for total, new in zip((sums[0], sums[1][:, keys], sums[2][:, keys]), grads, strict=True):
                merging.add(total, new)
        return *(x.to(q.dtype) for x in sums), None, None, None


def order(shape: Shape, documents: Documents | None) -> list[tuple[slice, dict]]:
    """The blocks' keys and options, the last block first."""
    found = []
    for keys in reversed(shape.keys):
        options = {"causal": shape.causal and keys.stop == shape.S, "scoring": shape.scoring}
        if documents is not None:
            queries = documents.at(slice(shape.S - shape.T, shape.S))
            options["documents"] = BlockDocuments(queries, documents.at(keys))
        found.append((keys, options))
    return found


def plain(q: Tensor, k: Tensor, v: Tensor, *, shape: Shape, documents: Documents | None) -> Tensor:
    """All keys at once: the weighted mean of the values that a query sees."""
    places = torch.arange(shape.S, device=q.device)
    seen = places[-shape.T :, None] >= places[None, :] if shape.causal else torch.ones(shape.T, shape.S).bool()
    seen = seen.to(q.device)[None].expand(shape.B, -1, -1)
    if documents is not None:
        seen = seen & (documents.number[:, -shape.T :, None] == documents.number[:, None, :])
    outs = []
    for n in range(shape.N):
        kn, vn = k[:, :, n // (shape.N // shape.K)], v[:, :, n // (shape.N // shape.K)]
        scores = q[:, :, n] @ kn.transpose(1, 2) * shape.scoring.scale_of(shape.H)
        if shape.scoring.cap is not None:
            scores = shape.scoring.cap * torch.tanh(scores / shape.scoring.cap)
        outs.append(torch.softmax(torch.where(seen, scores, float("-inf")), dim=2) @ vn)
    return torch.stack(outs, dim=2)


def make(shape: Shape, device: torch.device) -> tuple[dict[str, Tensor], Tensor, Documents | None]:
    """Inputs and the output's gradient in values that bf16 holds exactly, and documents of S tokens."""
    draw = torch.Generator().manual_seed(5)

    def tensor(tokens: int, heads: int) -> Tensor:
        return torch.randn(shape.B, tokens, heads, shape.H, generator=draw).bfloat16().double().to(device)

    inputs = {"q": tensor(shape.T, shape.N), "k": tensor(shape.S, shape.K), "v": tensor(shape.S, shape.K)}
    documents = None
    if shape.documents:
        begins = torch.rand(shape.B, shape.S, generator=draw) < 0.05
        documents = documents_of(begins.cumsum(1, dtype=torch.int32)).map(lambda x: x.to(device))
    return inputs, tensor(shape.T, shape.N), documents


def hold(blocks: Blocks, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
    """Holds blocks, put together, to the gate."""
    inputs, grad, documents = make(shape, device)

    def truth_of(of: dict[str, Tensor]) -> Results:
        return results(lambda q, k, v: plain(q, k, v, shape=shape, documents=documents), of, grad)

    mine = in_dtype(inputs, dtype)
    fast = results(lambda q, k, v: InBlocks.apply(q, k, v, blocks, shape, documents), mine, grad)
    check(fast, truth_of(mine), truth_of(inputs))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", sorted(REGISTRY["attention"]))
def test_gate(name: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
    skip_what_has_another_test(name, shape.scoring, device)
    hold(blocks_of(name, device), shape, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES_CUDA, ids=str)
def test_gate_of_every_operator(shape: Shape, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operator on each shape that it takes, whatever would be chosen."""
    device = torch.device("cuda")
    half = dtype != torch.float32
    ways = ["cudnn", "flash", "efficient"]
    if shape.documents:
        ways = ["efficient", "flash by document"]
    if not half:
        ways = ["efficient"]
    for way in ways:
        monkeypatch.setattr(sdpa_block, "choose", lambda *_, way=way, **__: way)
        hold(blocks_of("sdpa", device), shape, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("H", [64, 128])
def test_gradients_of_operators_mix(H: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log-sum-exp is the same number everywhere: one operator's gradients of another one's output."""
    shape = Shape(2, 512, (0, 512), 1024, 8, 2, H)
    inputs, grad, _ = make(shape, torch.device("cuda"))
    mine = in_dtype(inputs, torch.bfloat16)
    plain_half, truth = (results(lambda q, k, v: plain(q, k, v, shape=shape, documents=None), x, grad)
                         for x in (mine, inputs))  # fmt: skip
    for there in ("cudnn", "flash", "efficient"):
        for back in ("cudnn", "flash", "efficient"):
            leaves = [x.detach().requires_grad_() for x in mine.values()]
            monkeypatch.setattr(sdpa_block, "choose", lambda *_, way=there, **__: way)
            out = InBlocks.apply(*leaves, blocks_of("sdpa", grad.device), shape, None)
            monkeypatch.setattr(sdpa_block, "choose", lambda *_, way=back, **__: way)
            grads = torch.autograd.grad(out, leaves, grad.bfloat16())
            check({"out": out.detach(), **dict(zip("qkv", grads, strict=True))}, plain_half, truth)


@pytest.mark.parametrize("name", sorted(REGISTRY["attention"]))
def test_a_query_that_sees_nothing_gets_zeros(name: str, device: torch.device) -> None:
    kernel = REGISTRY["attention"][name]
    for dtype in (torch.float64, torch.float32):
        q, k, v, grad = torch.randn(4, 1, 16, 2, 8, dtype=dtype, device=device)
        mask = torch.ones(1, 1, 16, 16, dtype=torch.bool, device=device)
        mask[:, :, 3] = False
        mask[:, :, 5, :6] = False  # what it may see lies in its future
        out, lse = kernel.block_forward(q, k, v, causal=True, mask=mask)
        assert (lse == -torch.inf).nonzero().tolist() == [[0, 0, 3], [0, 0, 5], [0, 1, 3], [0, 1, 5]]
        assert out[:, [3, 5]].abs().max() == 0
        grads = kernel.block_backward(grad, q, k, v, out, lse, causal=True, mask=mask)
        assert all(x.isfinite().all() for x in (out, *grads))
        assert grads[0][:, [3, 5]].abs().max() == 0


def test_dropped_weights_count_in_the_gradients_and_not_in_the_log_sum_exp() -> None:
    shape = Shape(2, 6, (0, 6), 12, 4, 2, 8)
    inputs, grad, _ = make(shape, torch.device("cpu"))
    kept = (torch.rand(2, 4, 6, 12, generator=torch.Generator().manual_seed(1)) < 0.5) * 2.0
    leaves = [x.requires_grad_() for x in inputs.values()]
    q, k, v = leaves
    scores = torch.einsum("btnh,bsnh->bnts", q, k.repeat_interleave(2, dim=2)) / 8**0.5
    seen = torch.ones(6, 12, dtype=torch.bool).tril(6)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1) * kept
    truth = torch.einsum("bnts,bsnh->btnh", weights, v.repeat_interleave(2, dim=2))

    def dropped(keys: slice) -> dict:
        return {"drop": lambda weights: weights * kept[..., keys]}

    merged = []
    for keys, options in order(shape, None):
        merged.append(reference_block.block_forward(q, k[:, keys], v[:, keys], **options, **dropped(keys)))
    (late, late_lse), (early, early_lse) = merged
    weight = torch.sigmoid(early_lse - late_lse).transpose(1, 2)[..., None]
    out, lse = torch.lerp(late, early, weight), torch.logaddexp(late_lse, early_lse)
    assert torch.allclose(out, truth, rtol=0, atol=1e-14)
    assert torch.allclose(lse, scores.masked_fill(~seen, -torch.inf).logsumexp(-1), rtol=0, atol=1e-14)
    expected = torch.autograd.grad(truth, leaves, grad)
    sums = [torch.zeros_like(x) for x in leaves]
    for keys, options in order(shape, None):
        grads = reference_block.block_backward(grad, q, k[:, keys], v[:, keys], out, lse, **options, **dropped(keys))
        for total, new in zip((sums[0], sums[1][:, keys], sums[2][:, keys]), grads, strict=True):
            total += new.detach()
    for mine, exact in zip(sums, expected, strict=True):
        assert torch.allclose(mine, exact, rtol=0, atol=1e-13)
    with pytest.raises(AssertionError, match="no attention dropout"):
        REGISTRY["attention"]["sdpa"].block_forward(q, k[:, :6], v[:, :6], causal=True, drop=lambda weights: weights)


def test_the_operators_take_what_they_are_given() -> None:
    """Shapes through torch's own shape functions, on the meta device: arguments, layouts, grouped heads, padding."""
    q, k = torch.empty(2, 40, 8, 64, device="meta", dtype=torch.bfloat16), torch.empty(2, 33, 2, 64, device="meta")
    k = k.to(torch.bfloat16)
    mask = torch.ones(2, 1, 40, 33, device="meta", dtype=torch.bool)
    for forward, backward, more in (
        (sdpa_block._cudnn_forward, sdpa_block._cudnn_backward, (False, 0.5)),
        (sdpa_block._flash_forward, sdpa_block._flash_backward, (False, 0.5)),
        (sdpa_block._efficient_forward, sdpa_block._efficient_backward, (False, None, 0.5)),
        (sdpa_block._efficient_forward, sdpa_block._efficient_backward, (False, mask, None)),
    ):
        out, lse = forward(q, k, k, *more)
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, (2, 8, 40), torch.float32)
        grads = backward(out, q, k, k, out, lse, *more)
        assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]


@pytest.mark.gpu
def test_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def way(H: int, dtype: torch.dtype, keys: int = 8, masked: bool = False, **hidden: bool) -> str:
        x = torch.empty(1, keys, 1, H, dtype=dtype, device="cuda")
        return sdpa_block.choose(x, x, masked=masked, **hidden)

    for sm, half in (((7, 5), "efficient"), ((8, 0), "flash"), ((9, 0), "cudnn")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, sm=sm: sm)
        assert way(64, torch.float16) == half
        assert way(64, torch.float16, masked=True) == way(64, torch.float32) == "efficient"
        assert way(60, torch.float16) == way(64, torch.float64) == "equations"
    assert way(192, torch.bfloat16) == way(64, torch.bfloat16, keys=1) == "flash"
    for hidden in ({"documents": True}, {"window": True}, {"documents": True, "window": True}):
        assert way(64, torch.bfloat16, **hidden) == way(256, torch.float16, **hidden) == "flash by document"
        assert way(64, torch.float32, **hidden) == way(64, torch.float16, masked=True, **hidden) == "efficient"
    torch.use_deterministic_algorithms(True)
    try:
        assert way(64, torch.bfloat16) == "flash"
    finally:
        torch.use_deterministic_algorithms(False)
