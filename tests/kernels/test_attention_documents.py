"""Attention of packed documents, each against itself alone in fp64, and what the lengths are made of."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from megaspec_kernels.attention import reference_block, sdpa, sdpa_block, varlen
from megaspec_kernels.attention.documents import BlockDocuments, Documents, chunks_of, documents_of, starts_of
from megaspec_kernels.gate import Results, check, in_dtype, results
from megaspec_kernels.registry import REGISTRY
from tests.kernels.te import te_runs

CPU = torch.device("cpu")
# flex and te train on GPUs alone: test_attention_flex.py, test_planted_documents.py and below
IMPLEMENTATIONS = [name for name in sorted(REGISTRY["attention"]) if name not in ("flex", "te")]


@dataclass(frozen=True)
class Packed:
    """Rows of documents by their lengths; N query heads on K, of H."""

    rows: tuple[tuple[int, ...], ...]
    N: int = 4
    K: int = 2
    H: int = 16
    window: int | None = None
    sinks: bool = False

    def __str__(self) -> str:
        longest = max(max(row) for row in self.rows)
        extra = ("" if self.window is None else f"-window{self.window}") + ("-sinks" if self.sinks else "")
        return f"{'+'.join(str(len(row)) for row in self.rows)}of{longest}-{self.N}k{self.K}x{self.H}{extra}"

    @property
    def T(self) -> int:
        return sum(self.rows[0])

    @property
    def number(self) -> Tensor:
        """int32 [B, T]"""
        rows = []
        for lengths in self.rows:
            rows.append(torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)))
        return torch.stack(rows).to(torch.int32)


PACKED = [
    Packed(((1,),)),
    Packed(((63,),)),
    Packed(((1, 63, 1, 2), (67,))),
    Packed(((1,) * 40, (39, 1), (20, 20)), N=3, K=1),
    Packed(((63, 1, 100), (100, 64, 0), (0, 82, 82)), N=4, K=4),
    Packed(((63, 1, 100), (100, 64, 0), (0, 82, 82)), window=17),
    Packed(((63, 1, 100), (1, 162, 1)), window=1, sinks=True),
    Packed(((5, 30), (35,)), sinks=True),
]


def make(packed: Packed, device: torch.device = CPU) -> tuple[dict[str, Tensor], Tensor, Documents]:
    """Inputs and the output's gradient in values that bf16 holds exactly, and documents, those of no token among
    them."""
    draw = torch.Generator().manual_seed(11)
    B = len(packed.rows)

    def tensor(heads: int) -> Tensor:
        return torch.randn(B, packed.T, heads, packed.H, generator=draw).bfloat16().double().to(device)

    inputs = {"q": tensor(packed.N), "k": tensor(packed.K), "v": tensor(packed.K)}
    grad = tensor(packed.N)
    if packed.sinks:
        inputs["sinks"] = torch.randn(packed.N, generator=draw).bfloat16().double().to(device)
    # documents_of numbers anew, and knows of no documents without tokens but those behind the last
    bounds = documents_of(packed.number)
    documents = replace(bounds, number=packed.number, starts=starts_of(packed.number, bounds.most))
    return inputs, grad, documents.map(lambda x: x.to(device))


def alone(packed: Packed, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Every document as the only one of a batch, in plain words of torch."""
    rows = []
    for row, lengths in enumerate(packed.rows):
        outs = []
        first = 0
        for length in lengths:
            tokens = slice(first, first + length)
            first += length
            groups = packed.N // packed.K
            own_k = k[row, tokens].repeat_interleave(groups, dim=1)
            own_v = v[row, tokens].repeat_interleave(groups, dim=1)
            scores = torch.einsum("tnh,snh->nts", q[row, tokens], own_k) * packed.H**-0.5
            behind = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
            is_seen = (behind >= 0) & (behind < (packed.window or length + 1))
            scores = scores.masked_fill(~is_seen, float("-inf"))
            weights = scores.softmax(dim=-1)
            if sinks is not None:
                weights = weights * torch.sigmoid(scores.logsumexp(dim=-1) - sinks[:, None])[..., None]
            outs.append(torch.einsum("nts,snh->tnh", weights, own_v))
        rows.append(torch.cat(outs))
    return torch.stack(rows)


def hold(name: str, packed: Packed, dtype: torch.dtype, device: torch.device) -> None:
    """Holds an implementation to the gate."""
    inputs, grad, documents = make(packed, device)
    kernel = REGISTRY["attention"][name]

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return kernel.attend(q, k, v, documents=documents, window=packed.window, sinks=sinks)

    def truth(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return alone(packed, q, k, v, sinks)

    mine = in_dtype(inputs, dtype)
    check(results(attend, mine, grad), results(truth, mine, grad), results(truth, inputs, grad))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packed", PACKED, ids=str)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_document_is_attended_as_if_it_were_alone(name: str, packed: Packed, dtype: torch.dtype) -> None:
    if name == "reference" and dtype != torch.float64:
        pytest.skip("the reference is what others are measured by in this dtype")
    hold(name, packed, dtype, CPU)


@dataclass(frozen=True)
class Part:
    """A block of packed sequences: some of their tokens as queries and as keys."""

    queries: slice
    keys: slice
    causal: bool = False


PARTS = [
    Part(slice(0, 67), slice(0, 67), causal=True),
    Part(slice(20, 50), slice(20, 50), causal=True),
    Part(slice(50, 67), slice(0, 50)),
    Part(slice(66, 67), slice(0, 1)),  # in the first row another document
    Part(slice(1, 64), slice(0, 1)),
]
UNEVEN = Packed(((1, 30, 0, 33, 3), (67,), (10, 11, 12, 13, 21)))


def words(part: Part, number: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, one row, head and query at a time: what it sees is looked up."""
    B, T, N, H = q.shape
    groups = N // k.shape[2]
    out = torch.zeros_like(q)
    lse = q.new_full((B, N, T), float("-inf"))
    for b in range(B):
        for t in range(T):
            last = t + 1 if part.causal else k.shape[1]
            own = number[b, part.queries][t]
            seen = [s for s in range(last) if number[b, part.keys][s] == own]
            if not seen:
                continue
            for n in range(N):
                scores = k[b, seen, n // groups] @ q[b, t, n] * H**-0.5
                lse[b, n, t] = scores.logsumexp(dim=0)
                out[b, t, n] = scores.softmax(dim=0) @ v[b, seen, n // groups]
    return out, lse


@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize("name", sorted(REGISTRY["attention"]))
def test_a_block_has_queries_and_keys_of_its_own_documents(name: str, part: Part) -> None:
    """Output, log-sum-exp and gradients; documents with queries and no keys, with keys and no queries, with neither."""
    inputs, grad, documents = make(UNEVEN)
    kernel = REGISTRY["attention"][name]
    q = inputs["q"][:, part.queries].requires_grad_()
    k = inputs["k"][:, part.keys].requires_grad_()
    v = inputs["v"][:, part.keys].requires_grad_()
    grad = grad[:, part.queries]
    met = BlockDocuments(documents.at(part.queries), documents.at(part.keys))
    truth, truth_lse = words(part, documents.number, q, k, v)
    with torch.no_grad():
        out, lse = kernel.block_forward(q, k, v, causal=part.causal, documents=met)
        assert torch.equal(lse == -torch.inf, truth_lse == -torch.inf)
        assert (out - truth).abs().max() <= 1e-14 * max(1.0, truth.abs().max())
        assert (lse - truth_lse).nan_to_num(0.0).abs().max() <= 1e-13
        grads = kernel.block_backward(grad, q, k, v, out, lse, causal=part.causal, documents=met)
    if not truth.requires_grad:
        assert all(x.abs().max() == 0 for x in grads)
        return
    for mine, exact in zip(grads, torch.autograd.grad(truth, (q, k, v), grad), strict=True):
        assert (mine - exact).abs().max() <= 1e-13 * max(1.0, exact.abs().max())


def test_bounds_are_rounded_up_and_numbers_begin_at_zero() -> None:
    documents = documents_of(torch.tensor([[7, 7, 9, 9, 9, 9, 9], [4, 5, 6, 7, 8, 9, 10]], dtype=torch.int32))
    assert documents.number.tolist() == [[0, 0, 1, 1, 1, 1, 1], [0, 1, 2, 3, 4, 5, 6]]
    assert (documents.most, documents.longest) == (32, 7)
    assert documents.starts.tolist() == [0, 2, *[7] * 30, *range(7, 14), *[14] * 25, 14]
    for count, most in ((32, 32), (33, 64), (64, 64), (65, 128)):
        assert documents_of(torch.arange(count, dtype=torch.int32)[None]).most == most
    for length, longest in ((1, 1), (2, 2), (3, 4), (64, 64), (65, 100)):
        number = torch.ones(1, 100, dtype=torch.int32).cumsum(dim=1, dtype=torch.int32)
        number[:, :length] = 0
        assert documents_of(number).longest == longest


def test_starts_count_the_tokens_before() -> None:
    draw = torch.Generator().manual_seed(2)
    documents = documents_of((torch.rand(3, 50, generator=draw) < 0.2).cumsum(1, dtype=torch.int32))
    for places in (torch.tensor([0, 3, 4, 30, 49]), slice(7, 9), slice(0, 50), torch.arange(25, 50)):
        some = documents.at(places)
        rows, tokens = some.number.shape
        expected = [int((row < d).sum()) + b * tokens for b, row in enumerate(some.number) for d in range(some.most)]
        assert some.starts.tolist() == [*expected, rows * tokens]
        assert some.starts.dtype == torch.int32
        assert int(some.starts.diff().max()) <= some.longest <= tokens
    last = documents.of_rows(slice(1, 3))
    assert last.starts.tolist() == starts_of(documents.number[1:], documents.most).tolist()


@pytest.mark.parametrize("chunk", [1, 7, 16, 63])
@pytest.mark.parametrize("is_packed", [False, True])
def test_chunks_are_within_their_bounds(chunk: int, is_packed: bool) -> None:
    documents = documents_of(UNEVEN.number) if is_packed else None
    positions = torch.arange(67)[None]
    if is_packed:
        rows = [[torch.arange(length) for length in lengths] for lengths in UNEVEN.rows]
        positions = torch.stack([torch.cat(row) for row in rows])
    chunks = chunks_of(positions, chunk, documents=documents)
    lengths = documents_of(chunks.number).starts.diff()
    assert int(lengths.max()) <= chunks.longest <= chunk
    assert int(chunks.number.max()) < chunks.most
    assert (chunks.number[:, 0] == 0).all()


def test_a_bound_that_is_too_low_is_refused() -> None:
    inputs, _, documents = make(Packed(((63, 1),)))
    low = Documents(documents.number, documents.starts, documents.most, 32)
    with pytest.raises(AssertionError, match="a document of 63 queries, the bound says 32"):
        sdpa.attention(*inputs.values(), documents=low)


@pytest.mark.parametrize("sinks", [False, True])
def test_the_compiler_neither_breaks_nor_begins_anew(sinks: bool) -> None:
    compiles_once("sdpa", torch.float64, sinks=sinks)


def compiles_once(name: str, dtype: torch.dtype, *, sinks: bool) -> None:
    """One graph; another number of documents below the same bounds is no reason to compile."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks_N: Tensor | None, documents: Documents) -> Tensor:
        return REGISTRY["attention"][name].attend(q * 1.0, k, v, documents=documents, sinks=sinks_N)

    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    for lengths in ((30, 10), (17, 1, 22), (20, 20), *[(32, *[1] * n, 8 - n) for n in range(1, 8)]):
        inputs, grad, documents = make(Packed((lengths, (40 - len(lengths), *[1] * len(lengths))), sinks=sinks))
        assert documents.most == 32
        leaves = [x.to(dtype).requires_grad_() for x in inputs.values()]
        grad = grad.to(dtype)
        arguments = (*leaves, documents) if sinks else (*leaves, None, documents)
        mine = compiled(*arguments)
        plain = attend(*arguments)
        assert torch.equal(mine, plain)
        for a, b in zip(torch.autograd.grad(mine, leaves, grad), torch.autograd.grad(plain, leaves, grad), strict=True):
            assert torch.equal(a, b)
    # one more where a bound turns out to vary
    assert counter.frame_count <= 2


def _one_token_late(starts: Tensor) -> Tensor:
    return torch.cat((starts[:1], (starts[1:-1] + 1).clamp(max=int(starts[-1])), starts[-1:]))


def _without_the_second(starts: Tensor) -> Tensor:
    return torch.cat((starts[:1], starts[2:3], starts[2:]))


@pytest.mark.parametrize("change", [_one_token_late, _without_the_second])
def test_planted_bugs_are_caught(change: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """A boundary off by one, and a document that leaks into the next; what sees too much and what sees too little."""
    packed = Packed(((20, 5, 30), (25, 5, 25)))
    hold("sdpa", packed, torch.bfloat16, CPU)
    original = sdpa.attention_as_one_block

    def planted(*tensors: Tensor, documents: Documents, **rest: object) -> Tensor:
        return original(*tensors, documents=replace(documents, starts=change(documents.starts)), **rest)

    monkeypatch.setattr(sdpa, "attention_as_one_block", planted)
    with pytest.raises(AssertionError, match="from the truth"):
        hold("sdpa", packed, torch.bfloat16, CPU)


def test_the_operators_take_what_they_are_given() -> None:
    """Shapes through torch's own shape functions, on the meta device: arguments, grouped heads, a window."""
    q = torch.empty(2, 40, 8, 64, device="meta", dtype=torch.bfloat16)
    k = torch.empty(2, 33, 2, 64, device="meta", dtype=torch.bfloat16)

    def of(tokens: int) -> Documents:
        number = torch.empty(2, tokens, device="meta", dtype=torch.int32)
        return Documents(number, torch.empty(2 * 32 + 1, device="meta", dtype=torch.int32), 32, 16)

    for keys, causal, window in ((q[:, :, :2], True, None), (q[:, :, :2], True, 7), (k, False, None)):
        options = {
            "way": "flash",
            "documents": BlockDocuments(of(40), of(keys.shape[1])),
            "causal": causal,
            "window": window,
            "scale": 0.5,
        }
        out, lse = varlen.forward(q, keys, keys, **options)
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, (2, 8, 40), torch.float32)
        grads = varlen.backward(out, q, keys, keys, out, lse, **options)
        assert [x.shape for x in grads] == [q.shape, keys.shape, keys.shape]


CUDA = torch.device("cuda")
ON_GPU = [
    *PACKED,
    Packed(((1000, 24, 1, 999), (2024,), (2000, 12, 12)), N=8, K=2, H=128),
    Packed(((1000, 24, 1, 999), (2024,)), N=8, K=2, H=64, window=100, sinks=True),
    Packed(((300, 212), (512,)), N=4, K=2, H=256),
    Packed(((8, 120) * 16, (128,) * 16), N=4, K=4, H=64),
]


@contextmanager
def host_never_waits() -> Iterator[None]:
    """Whoever makes the host wait for the GPU while this is entered has an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("packed", ON_GPU, ids=str)
def test_gate_on_a_gpu(packed: Packed, dtype: torch.dtype, poisoned: None) -> None:
    hold("sdpa", packed, dtype, CUDA)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("packed", ON_GPU, ids=str)
def test_gate_of_transformer_engine(packed: Packed, dtype: torch.dtype, poisoned: None) -> None:
    """Documents of no token and of one, windows, sinks."""
    te_runs(dtype, CUDA)
    hold("te", packed, dtype, CUDA)


@pytest.mark.gpu
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_gate_of_blocks_on_a_gpu(part: Part, poisoned: None) -> None:
    """Documents without keys, and without queries: zeros, -inf, and gradients of zero."""
    inputs, grad, documents = make(UNEVEN, CUDA)
    met = BlockDocuments(documents.at(part.queries), documents.at(part.keys))

    def block(of: dict[str, Tensor], kernel: object) -> Results:
        q = of["q"][:, part.queries]
        k = of["k"][:, part.keys]
        v = of["v"][:, part.keys]
        given = grad[:, part.queries].to(q.dtype)
        out, lse = kernel.block_forward(q, k, v, causal=part.causal, documents=met)
        d_q, d_k, d_v = kernel.block_backward(given, q, k, v, out, lse, causal=part.causal, documents=met)
        is_hidden = lse == -torch.inf
        # what hides from all is compared by where it is
        return {"out": out, "lse": lse.masked_fill(is_hidden, 0.0), "hidden": is_hidden.to(lse.dtype),
                "d_q": d_q, "d_k": d_k, "d_v": d_v}  # fmt: skip

    mine = in_dtype(inputs, torch.bfloat16)
    assert sdpa_block.choose(mine["q"], mine["k"], masked=False, documents=True) == "flash by document"
    check(block(mine, sdpa_block), block(mine, reference_block), block(inputs, reference_block))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sdpa", "te", "flex"])
def test_sums_are_kept_in_one_order(name: str) -> None:
    """Of documents; Transformer Engine's of whole sequences."""
    if name == "te":
        te_runs(torch.bfloat16, CUDA)
    if name == "flex":
        # a graph for each mask, of which other tests have made as many as recompile_limit allows
        torch._dynamo.reset()
    attention = REGISTRY["attention"][name].attend
    packed = Packed(((1000, 24, 1, 999), (2024,)), N=8, K=2, H=128)
    inputs, grad, found = make(packed, CUDA)
    documents = None if name == "te" else found
    mine = in_dtype(inputs, torch.bfloat16)
    leaves = [mine[name].requires_grad_() for name in ("q", "k", "v")]
    runs = []
    # as a run sets it; torch takes it as no request where it only warns, as `results` has it
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            out = attention(*leaves, documents=documents)
            runs.append([out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))])
    finally:
        torch.use_deterministic_algorithms(False)
    for other in runs[1:]:
        for name, mine_now, first in zip(("out", "q", "k", "v"), other, runs[0], strict=True):
            assert torch.equal(mine_now, first), name


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sdpa", "te"])
def test_the_host_does_not_wait(name: str) -> None:
    attention = REGISTRY["attention"][name].attend
    inputs, grad, documents = make(Packed(((300, 212), (512,)), H=64), CUDA)
    leaves = [x.bfloat16().requires_grad_() for x in inputs.values()]
    met = BlockDocuments(documents.at(slice(256, 512)), documents.at(slice(0, 256)))
    if name == "te":
        te_runs(torch.bfloat16, CUDA)
        # the first call loads libraries and makes plans
        torch.autograd.grad(attention(*leaves, documents=documents), leaves, grad.bfloat16())
    with host_never_waits():
        out = attention(*leaves, documents=documents)
        torch.autograd.grad(out, leaves, grad.bfloat16())
        q, k, v = (x.detach() for x in leaves)
        sdpa_block.block_forward(q[:, 256:], k[:, :256], v[:, :256], causal=False, documents=met)
