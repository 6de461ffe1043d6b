"""Core attention against the truth."""

from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from megaspec_kernels.attention import flex, sdpa, sdpa_block
from megaspec_kernels.attention.documents import Documents, documents_of
from megaspec_kernels.attention.reference import seen
from megaspec_kernels.attention.scoring import PLAIN, Scoring
from megaspec_kernels.catalog import CATALOG, Requirement
from megaspec_kernels.gate import check, in_dtype, results
from megaspec_kernels.registry import REGISTRY
from tests.kernels.te import te_runs

IMPLEMENTATIONS = sorted(REGISTRY["attention"])


@dataclass(frozen=True)
class Shape:
    """B sequences, T tokens, N query heads, K key and value heads, H head size."""

    B: int
    T: int
    N: int
    K: int
    H: int
    documents: bool = False
    strided: bool = False
    window: int | None = None
    scoring: Scoring = PLAIN
    sinks: bool = False

    def __str__(self) -> str:
        extra = ("-docs" if self.documents else "") + ("-strided" if self.strided else "")
        extra += "" if self.window is None else f"-window{self.window}"
        extra += "" if self.scoring.scale is None else f"-scale{self.scoring.scale}"
        extra += "" if self.scoring.cap is None else f"-cap{self.scoring.cap}"
        extra += "-sinks" if self.sinks else ""
        return f"{self.B}x{self.T}x{self.N}k{self.K}x{self.H}{extra}"


SHAPES = [
    Shape(1, 1, 1, 1, 8),
    Shape(3, 1, 4, 2, 16, documents=True),
    Shape(2, 63, 4, 4, 64),
    Shape(2, 63, 6, 2, 16, documents=True),
    Shape(2, 63, 4, 1, 32, strided=True),
    Shape(1, 1000, 2, 1, 64),
    Shape(1, 1000, 2, 2, 16, documents=True, strided=True),
    Shape(2, 63, 4, 2, 16, window=1),
    Shape(2, 64, 4, 2, 16, window=16, scoring=Scoring(scale=0.5)),
    Shape(1, 1, 4, 2, 8, sinks=True),
    Shape(2, 63, 4, 2, 16, sinks=True),
    Shape(2, 63, 6, 2, 16, documents=True, window=9, sinks=True, strided=True),
    Shape(2, 63, 4, 4, 16, scoring=Scoring(cap=1.5)),
    Shape(2, 63, 4, 2, 16, documents=True, window=7, scoring=Scoring(scale=0.4, cap=0.7), sinks=True),
]


def plain(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *, documents: Documents | None, shape: Shape
) -> Tensor:
    """One query at a time in words: the weighted mean of the values at and before it, in its document and window."""
    B, T, N, H = q.shape
    outs = []
    for n in range(N):
        kn, vn = k[:, :, n // (N // k.shape[2])], v[:, :, n // (N // k.shape[2])]
        scale = H**-0.5 if shape.scoring.scale is None else shape.scoring.scale
        scores = (q[:, :, n] @ kn.transpose(1, 2)) * scale
        if shape.scoring.cap is not None:
            scores = shape.scoring.cap * torch.tanh(scores / shape.scoring.cap)
        place = torch.arange(T, device=q.device)
        seen = (place[:, None] >= place[None, :]).expand(B, T, T)
        if documents is not None:
            seen = seen & (documents.number.unsqueeze(2) == documents.number.unsqueeze(1))
        if shape.window is not None:
            seen = seen & (place[:, None] - place[None, :] < shape.window)
        weights = torch.softmax(torch.where(seen, scores, float("-inf")), dim=2)
        if sinks is not None:
            # what the sink leaves to the others
            lse = torch.logsumexp(torch.where(seen, scores, float("-inf")), dim=2, keepdim=True)
            weights = weights * torch.sigmoid(lse - sinks[n])
        outs.append(weights @ vn)
    return torch.stack(outs, dim=2)


def make(shape: Shape, device: torch.device) -> tuple[dict[str, Tensor], Tensor, Documents | None]:
    """Inputs and the output's gradient in values that bf16 holds exactly, and documents."""
    draw = torch.Generator().manual_seed(3)

    def tensor(heads: int) -> Tensor:
        if shape.strided:  # what a split of one wide projection hands over, heads before tokens
            wide = torch.randn(shape.B, heads, shape.T, 2 * shape.H, generator=draw)
            return wide.bfloat16().double().to(device)[..., ::2].transpose(1, 2)
        return torch.randn(shape.B, shape.T, heads, shape.H, generator=draw).bfloat16().double().to(device)

    inputs = {"q": tensor(shape.N), "k": tensor(shape.K), "v": tensor(shape.K)}
    if shape.sinks:
        inputs["sinks"] = torch.randn(shape.N, generator=draw).bfloat16().double().to(device)
    grad = tensor(shape.N)
    documents = None
    if shape.documents:
        begins = torch.rand(shape.B, shape.T, generator=draw) < 0.1
        documents = documents_of(begins.cumsum(1, dtype=torch.int32)).map(lambda x: x.to(device))
    return inputs, grad, documents


def run(name: str, shape: Shape):
    kernel = REGISTRY["attention"][name].attend

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *, documents: Documents | None) -> Tensor:
        options = {"window": shape.window, "scoring": shape.scoring, "sinks": sinks}
        return kernel(q, k, v, documents=documents, drop=None, **options)

    return attend


def flex_runs(shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
    """Skips what the catalog says that flex doesn't run, and on a CPU what torch has no backward pass for."""
    if device.type == "cpu":
        pytest.skip("flex trains on GPUs alone; its forward pass on a CPU has a test of its own")
    if dtype != torch.bfloat16 or shape.H < 16:
        pytest.skip("the catalog says that flex computes in bf16 and fp16, with heads of 16 or more")


def skip_what_has_another_test(name: str, scoring: Scoring, device: torch.device) -> None:
    """Skips what the catalog says that an implementation has not, and packages where they are not played."""
    need = CATALOG["attention"].implementations[name]
    if scoring.cap is not None and not need.score_cap:
        pytest.skip(f"the catalog says that {name} caps no scores")
    if need.package and name != "te" and device.type == "cuda":
        pytest.skip(
            f"{need.package} has tests of its own on GPUs: test_attention_cudnn.py, test_attention_flash_attn.py"
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_gate(name: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
    if name == "reference" and dtype != torch.float64:
        pytest.skip("the reference is what others are measured by in this dtype; fp64 holds it to the words below")
    skip_what_has_another_test(name, shape.scoring, device)
    if name == "flex":
        flex_runs(shape, dtype, device)
    if name == "te":
        te_runs(dtype, device)
    inputs, grad, documents = make(shape, device)
    words = partial(plain, documents=documents, shape=shape)
    truth = results(words, inputs, grad)
    if shape.T == 1 and not shape.sinks:  # one key: its weight is 1 whatever q and k are
        for key in ("q", "k"):
            assert truth[key].abs().max() == 0
    mine = in_dtype(inputs, dtype)
    check(
        results(partial(run(name, shape), documents=documents), mine, grad),
        results(words, mine, grad),
        truth,
    )


@pytest.mark.parametrize(
    "shape", [Shape(2, 5, 4, 2, 8, documents=True), Shape(2, 5, 4, 2, 8, window=3, sinks=True)], ids=str
)
# on a CPU what packages have is computed as sdpa computes it, which test_gate holds of each
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("reference", "sdpa")))
        for name in IMPLEMENTATIONS
        if name not in ("flex", "te")
    ],
)
def test_gradcheck(name: str, shape: Shape) -> None:
    inputs, _, documents = make(shape, torch.device("cpu"))
    leaves = tuple(x.requires_grad_() for x in inputs.values())
    attend = partial(run(name, shape), documents=documents)
    assert torch.autograd.gradcheck(attend, leaves, eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_flex_forward(shape: Shape, is_compiled: bool) -> None:
    """In fp64, of which the GPU's kernel has nothing but the mask, the score and the sink: those are made here."""
    inputs, _, documents = make(shape, torch.device("cpu"))
    attend = partial(run("flex", shape), documents=documents)
    if is_compiled:
        torch._dynamo.reset()
        attend = torch.compile(attend, backend="eager", fullgraph=True)
    with torch.no_grad():
        found = attend(**inputs)
    truth = plain(**inputs, documents=documents, shape=shape)
    # the log-sum-exp of a traced call is in fp32, whatever the inputs are in
    tolerance = 1e-6 if shape.sinks and is_compiled else 1e-13
    assert (found - truth).abs().max() <= tolerance * truth.abs().max()


@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 300, 2000])
@pytest.mark.parametrize("rate", [0.0, 0.004, 0.02, 0.3, 1.0])
@pytest.mark.parametrize("T", [1, 127, 128, 129, 1000])
def test_flex_attends_to_the_blocks_that_are_seen_and_to_no_other(T: int, rate: float, window: int | None) -> None:
    """Counted from the mask: blocks of which a query sees something, and blocks of the past that it sees whole."""
    device = torch.device("cpu")
    draw = torch.Generator().manual_seed(5)
    documents = documents_of((torch.rand(3, T, generator=draw) < rate).cumsum(1, dtype=torch.int32))
    mask = flex.block_mask(T, documents=documents, window=window, device=device)
    blocks = -(-T // 128)
    padded = torch.zeros(3, blocks * 128, blocks * 128, dtype=torch.bool)
    padded[:, :T, :T] = seen(T, documents=documents, window=window, device=device)[:, 0]
    by_block = padded.view(3, blocks, 128, blocks, 128)
    assert torch.equal(mask.to_dense()[:, 0].bool(), by_block.any(dim=4).any(dim=2))
    # beyond the last token anything goes
    padded[:, T:] = True
    is_whole = padded.view(3, blocks, 128, blocks, 128).all(dim=4).all(dim=2).tril(-1)
    for sequence, row in product(range(3), range(blocks)):
        count = mask.full_kv_num_blocks[sequence, 0, row]
        told = mask.full_kv_indices[sequence, 0, row, :count]
        assert told.tolist() == is_whole[sequence, row].nonzero().flatten().tolist()


def test_flex_sends_what_hides_nothing_through_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(2, 63, 6, 2, 16, sinks=True)
    inputs, _, _ = make(shape, torch.device("cpu"))
    monkeypatch.setattr(flex, "flex_attention", None)
    assert torch.equal(run("flex", shape)(**inputs, documents=None), run("sdpa", shape)(**inputs, documents=None))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
def test_flex_never_computes_all_scores_unasked() -> None:
    """Once torch has compiled as often as it may, it would go on without the compiler."""
    torch._dynamo.reset()
    x = torch.randn(1, 512, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    half = x[:, :256]
    with torch._dynamo.config.patch(recompile_limit=1):
        flex.attention(x, x, x, window=100)
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            flex.attention(half, half, half, window=100)
    torch._dynamo.reset()


def test_what_sdpa_has_not_is_never_computed_otherwise() -> None:
    inputs, _, _ = make(Shape(1, 7, 2, 2, 8), torch.device("cpu"))
    with pytest.raises(AssertionError, match="caps no scores"):
        REGISTRY["attention"]["sdpa"].attend(*inputs.values(), scoring=Scoring(cap=2.0))


def test_weights_are_dropped_before_they_meet_the_values() -> None:
    inputs, _, _ = make(Shape(1, 7, 2, 2, 8), torch.device("cpu"))
    seen = []

    def drop(weights: Tensor) -> Tensor:
        seen.append(weights)
        return weights * 0.5

    half = REGISTRY["attention"]["reference"].attend(*inputs.values(), documents=None, drop=drop)
    full = REGISTRY["attention"]["reference"].attend(*inputs.values(), documents=None, drop=None)
    assert torch.equal(half, full * 0.5)
    assert seen[0].shape == (1, 2, 7, 7)
    assert torch.allclose(seen[0].sum(-1), torch.ones(1, 2, 7, dtype=torch.float64))
    with pytest.raises(AssertionError, match="no attention dropout"):
        REGISTRY["attention"]["sdpa"].attend(*inputs.values(), documents=None, drop=drop)


LOW = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """What scaled_dot_product_attention is asked for, on tensors that go the way of a GPU and hold nothing."""
    calls: list[dict] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, **how: object) -> Tensor:
        backends = {
            SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled(),
            SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled(),
            SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled(),
            SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled(),
        }
        enabled = {backend for backend, is_on in backends.items() if is_on}
        calls.append({"shapes": [tuple(x.shape) for x in (q, k, v)], "strides": q.stride(), "backends": enabled, **how})
        return torch.empty_like(q)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    return calls


@pytest.fixture
def exact():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def attend_on_meta(*, T: int = 64, K: int = 2, dtype: torch.dtype) -> None:
    q = torch.empty(2, T, 4, 32, dtype=dtype, device="meta")
    k = torch.empty(2, T, K, 32, dtype=dtype, device="meta")
    out = sdpa.attention(q, k, k)
    assert out.shape == q.shape


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_a_gpu_is_never_left_to_keep_the_scores(asked: list[dict], dtype: torch.dtype) -> None:
    """torch falls back to plain products where no fused kernel may or can."""
    attend_on_meta(dtype=dtype)
    (call,) = asked
    assert SDPBackend.MATH not in call["backends"]
    assert call["backends"] == set(sdpa.backends(dtype))
    assert (call["attn_mask"], call["is_causal"]) == (None, True)


def test_in_fp64_plain_products_are_meant(asked: list[dict]) -> None:
    attend_on_meta(dtype=torch.float64)
    assert asked[0]["backends"] == {SDPBackend.MATH}


def test_keys_and_values_are_repeated_where_no_kernel_takes_groups(asked: list[dict], request) -> None:
    attend_on_meta(dtype=torch.float32)
    attend_on_meta(dtype=torch.bfloat16)
    attend_on_meta(dtype=torch.float32, K=4)
    request.getfixturevalue("exact")
    attend_on_meta(dtype=torch.bfloat16)
    assert [call["enable_gqa"] for call in asked] == [False, True, False, True]
    assert [call["shapes"][1][1] for call in asked] == [4, 2, 4, 2]


def test_a_single_token_needs_no_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "attention_as_one_block", None)
    inputs, _, documents = make(Shape(3, 1, 4, 2, 16, documents=True), torch.device("cpu"))
    assert torch.equal(sdpa.attention(*inputs.values(), documents=documents), sdpa.attention(*inputs.values()))


def test_a_refusal_is_what_torch_says_of_all_three(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def answer(name: str, takes: bool):
        def can_use(params: object, debug: bool = False) -> bool:
            seen.append((name, tuple(params.query.shape), tuple(params.key.shape), params.enable_gqa, params.attn_mask))
            return takes

        return can_use

    sizes = {"n_heads": 4, "n_kv_heads": 2, "d_head": 16, "tokens": 8, "device": torch.device("cpu")}
    for taker in (None, "cudnn", "flash", "efficient"):
        for name in ("cudnn", "flash", "efficient"):
            monkeypatch.setattr(torch.backends.cuda, f"can_use_{name}_attention", answer(name, name == taker))
        assert sdpa.is_refused(**sizes, dtype=torch.bfloat16) == (taker is None)
        assert not sdpa.is_refused(**sizes, dtype=torch.float64)
    assert {one[0] for one in seen} == {"cudnn", "flash", "efficient"}
    assert all(one[1:4] == ((1, 4, 8, 16), (1, 2, 8, 16), True) for one in seen)
    assert all(one[4] is None for one in seen)
    seen.clear()
    sdpa.is_refused(**sizes, dtype=torch.float32)
    assert seen[0][1:] == ((1, 4, 8, 16), (1, 4, 8, 16), False, None)


def test_blocks_refuse_heads_that_only_equations_take() -> None:
    assert sdpa_block.is_refused(d_head=60, dtype=torch.bfloat16)
    assert not sdpa_block.is_refused(d_head=60, dtype=torch.float32)
    assert not sdpa_block.is_refused(d_head=64, dtype=torch.bfloat16)
    assert not sdpa_block.is_refused(d_head=3, dtype=torch.float64)


def train_once(
    dtype: torch.dtype, *, documents: bool, T: int = 4096, N: int = 8, K: int = 2, H: int = 64
) -> tuple[list[Tensor], int]:
    """Output and gradients on a GPU, and the most memory that it took beside the inputs."""
    draw = torch.Generator("cuda").manual_seed(1)
    q, k, v = (torch.randn(1, T, n, H, dtype=dtype, device="cuda", generator=draw).requires_grad_() for n in (N, K, K))
    packed = None
    if documents:
        packed = documents_of((torch.arange(T, device="cuda") // 100).to(torch.int32)[None])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = sdpa.attention(q, k, v, documents=packed)
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    return [out.detach(), *grads], torch.cuda.max_memory_allocated() - before


# Bytes of the scores of 8 heads and 4,096 tokens in fp32: plain products hold several of their size.
SCORES = 8 * 4096**2 * 4


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_a_gpu_keeps_no_scores(dtype: torch.dtype, documents: bool) -> None:
    _, peak = train_once(dtype, documents=documents)
    assert peak < SCORES


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_sums_are_kept_in_one_order_without_the_scores(exact: None, dtype: torch.dtype, documents: bool) -> None:
    """Grouped heads; with a mask, or in fp32, by the kernel that takes no groups."""
    sizes = {"n_heads": 8, "n_kv_heads": 2, "d_head": 64, "tokens": 4096, "device": torch.device("cuda")}
    assert not sdpa.is_refused(**sizes, dtype=dtype)
    (first, peak), (second, _) = (train_once(dtype, documents=documents) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert peak < SCORES


@pytest.mark.gpu
@pytest.mark.parametrize("H", [64, 60, 128, 256])
@pytest.mark.parametrize("K", [2, 8])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_a_refusal_tells_what_would_happen(dtype: torch.dtype, K: int, H: int) -> None:
    sizes = {"n_heads": 8, "n_kv_heads": K, "d_head": H, "tokens": 256, "device": torch.device("cuda")}
    if sdpa.is_refused(**sizes, dtype=dtype):
        with pytest.raises(RuntimeError, match="No available kernel"):
            train_once(dtype, documents=False, T=256, K=K, H=H)
    else:
        train_once(dtype, documents=False, T=256, K=K, H=H)


@pytest.mark.parametrize("sinks", [False, True])
def test_flex_traces_without_memory(sinks: bool) -> None:
    """Traces of a step have tensors without memory, which torch's flex_attention refuses."""
    q_BTNH, k_BTKH, v_BTKH = (torch.empty(2, 8, n, 16, device="meta", requires_grad=True) for n in (4, 2, 2))
    sinks_N = torch.empty(4, device="meta", requires_grad=True) if sinks else None
    out = flex.attention(q_BTNH, k_BTKH, v_BTKH, window=4, scoring=Scoring(cap=5.0), sinks=sinks_N)
    assert out.shape == q_BTNH.shape
    out.sum().backward()
    assert q_BTNH.grad is not None
    assert q_BTNH.grad.shape == q_BTNH.shape


@pytest.mark.parametrize("sinks", [False, True])
def test_flex_traces_what_it_computes_in_one_order(exact: None, sinks: bool) -> None:
    """It keeps queries, keys and values that lie by themselves, as its own kernel does, and not what they are views
    of."""
    product = torch.empty(2, 8, 4 + 2 + 2, 16, device="meta", requires_grad=True)
    q_BTNH, k_BTKH, v_BTKH = (product * 1).split([4, 2, 2], dim=2)
    sinks_N = torch.empty(4, device="meta", requires_grad=True) if sinks else None
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.untyped_storage().nbytes()) or x, id):
        out = flex.attention(q_BTNH, k_BTKH, v_BTKH, sinks=sinks_N)
    assert out.shape == q_BTNH.shape
    assert q_BTNH.untyped_storage().nbytes() not in sizes
    assert q_BTNH.numel() * q_BTNH.element_size() in sizes


@pytest.mark.gpu
@pytest.mark.parametrize("H", [64, 128])
def test_torch_takes_the_kernel_that_it_says(H: int, request: pytest.FixtureRequest) -> None:
    """cuDNN on Hopper, FlashAttention-2 with gradients in one order: what is asked, what is expected, and what runs."""
    sm = 10 * torch.cuda.get_device_capability()[0]
    if sm < 90:
        pytest.skip(f"nothing is expected of sm{sm} but a fused kernel")
    sizes = {"n_heads": 8, "n_kv_heads": 2, "d_head": H, "tokens": 512, "dtype": torch.bfloat16}
    leaves = [torch.randn(1, 512, n, H, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (8, 2, 2)]
    for deterministic, name, node in ((False, "cudnn", "CudnnAttention"), (True, "flash", "FlashAttention")):
        if deterministic:
            request.getfixturevalue("exact")
        expected = sdpa.expected(d_head=H, tokens=512, dtype=torch.bfloat16, sm=sm, deterministic=deterministic)
        assert expected == name
        assert sdpa.served_by(**sizes, device=torch.device("cuda")) == name
        out = sdpa.attention(*leaves)
        assert node in out.grad_fn.next_functions[0][0].name()


def table_of_readme() -> str:
    """Who can what, as kernels/megaspec_kernels/attention/README.md shows it: the catalog in words."""
    heads = (
        "| | GPU | formats | sizes of heads | documents | windows, chunks | sinks | capped scores | dropout | blocks |"
        " gradients in one order | package |"
    )
    lines = [heads, "|---" * 12 + "|"]
    for name, need in CATALOG["attention"].implementations.items():
        gpu = f"sm{need.min_sm}" if need.min_sm else "any, and CPUs"
        if need.min_sm == need.max_sm:
            gpu += " alone"
        sizes = "all"
        if need.head_size > 1:
            sizes = f"from {need.head_size}"
        if need.largest_head:
            sizes = f"{need.head_size} to {need.largest_head}"
        if need.head_step > 1:
            sizes += f" by {need.head_step}"
        words = [
            f"`{name}`",
            gpu,
            ", ".join(need.precisions) or "all",
            sizes,
            _in_words(need.documents),
            _in_words(need.window),
            # around whoever gives the log-sum-exp
            "yes",
            _in_words(need.score_cap),
            _in_words(need.attention_dropout),
            _in_words(need.blocks),
            _in_one_order(need),
            need.package or "",
        ]
        lines.append("| " + " | ".join(words) + " |")
    return "\n".join(lines).replace("|  |", "| |")


def _in_one_order(need: Requirement) -> str:
    if need.deterministic and not need.deterministic_documents:
        return "not of documents"
    return _in_words(need.deterministic)


def _in_words(can: bool) -> str:
    return "yes" if can else "no"


def test_the_readme_says_who_can_what() -> None:
    text = Path(sdpa.__file__).with_name("README.md").read_text()
    assert table_of_readme() in text, f"the table of attention/README.md should be:\n{table_of_readme()}"
