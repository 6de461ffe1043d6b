"""Attention: over whole sequences, in a window, over packed documents, and over a block of keys."""

# B sequences, T tokens, N query heads, K key and value heads, H head size

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megaspec_kernels.attention.documents import Documents, documents_of
from megaspec_kernels.attention.scoring import Scoring
from megaspec_kernels.bench import Bench, Held, Work, random, training_dtype
from megaspec_kernels.gate import Results, in_dtype, results
from megaspec_kernels.registry import REGISTRY, AttentionKernel

# Products of queries and keys in the forward pass: two. In the backward pass, which makes the weights again: five.
_PRODUCTS = 7


def _inputs(B: int, T: int, N: int, K: int, H: int, device: torch.device) -> dict[str, Tensor]:
    return {
        "q": random(B, T, N, H, seed=0, device=device),
        "k": random(B, T, K, H, seed=1, device=device),
        "v": random(B, T, K, H, seed=2, device=device),
    }


def packed_documents(T: int, mean: int, device: torch.device) -> Documents:
    """A row of T tokens of documents of `mean` tokens in the mean: exponentially many short ones, as text has."""
    draw = torch.Generator().manual_seed(mean)
    lengths = []
    while sum(lengths) < T:
        length = 1 + int(torch.empty(()).exponential_(1 / mean, generator=draw))
        lengths.append(min(length, T - sum(lengths)))
    number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return documents_of(number[None].to(torch.int32)).map(lambda x: x.to(device))


def _pairs(documents: Documents) -> float:
    """Pairs of a query and a key of its own document, of which causal attention has half."""
    lengths = documents.starts.diff().double()
    return float((lengths * lengths).sum())


def _whole(kernel: AttentionKernel) -> Callable[..., Tensor]:
    return lambda q, k, v: kernel.attend(q, k, v)


def _with_sinks(kernel: AttentionKernel, scoring: Scoring) -> Callable[..., Tensor]:
    """In a window of 16 keys."""
    return lambda q, k, v, sinks: kernel.attend(q, k, v, window=16, scoring=scoring, sinks=sinks)


def _with_documents(kernel: AttentionKernel, T: int, device: torch.device) -> Callable[..., Tensor]:
    """Of 20 tokens in the mean, with a bound that leaves some empty."""
    documents = packed_documents(T, 20, device)
    return lambda q, k, v: kernel.attend(q, k, v, documents=documents, window=30)


def _block(kernel: AttentionKernel, inputs: dict[str, Tensor], grad: Tensor) -> Results:
    """A block of which every query sees every key: its output, and what it adds to the gradients."""
    out, lse = kernel.block_forward(*inputs.values(), causal=False)
    grads = kernel.block_backward(grad, *inputs.values(), out, lse, causal=False)
    return {"out": out, "lse": lse, **dict(zip(inputs, grads, strict=True))}


def held(name: str, device: torch.device) -> Iterator[Held]:
    """Odd lengths, one key, grouped heads."""
    kernel = REGISTRY["attention"][name]
    plain = REGISTRY["attention"]["reference"]
    dtype = training_dtype(device)
    scaled = Scoring(scale=0.5)
    for B, T, N, K, H in ((1, 1, 1, 1, 16), (2, 63, 6, 2, 16), (2, 63, 4, 4, 64), (1, 1000, 2, 1, 128)):
        # flex compiles for each shape, and torch compiles a function eight times at most
        torch.compiler.reset()
        # the truth is computed from these, the implementation and plain PyTorch from the same in the training format
        inputs = _inputs(B, T, N, K, H, device)
        grad = random(B, T, N, H, seed=9, device=device)
        mine = in_dtype(inputs, dtype)
        sinks = random(N, seed=3, device=device)
        shape = f"{B} x {T} tokens, {N} heads on {K}, of {H}"
        yield Held(
            shape,
            results(_whole(kernel), mine, grad),
            results(_whole(plain), mine, grad),
            results(_whole(plain), inputs, grad),
        )
        yield Held(
            f"window, scale and sinks, {shape}",
            *(
                results(_with_sinks(one, scaled), given | {"sinks": sinks.to(given["q"].dtype)}, grad)
                for one, given in ((kernel, mine), (plain, mine), (plain, inputs))
            ),
        )
        yield Held(
            f"documents and a window, {shape}",
            *(
                results(_with_documents(one, T, device), given, grad)
                for one, given in ((kernel, mine), (plain, mine), (plain, inputs))
            ),
        )
        yield Held(
            f"block of {shape}",
            _block(kernel, mine, grad.to(dtype)),
            _block(plain, mine, grad.to(dtype)),
            _block(plain, inputs, grad),
        )


def works(name: str, device: torch.device) -> Iterator[Work]:
    """Forward and backward pass of one layer."""
    kernel = REGISTRY["attention"][name]
    is_gpu = device.type == "cuda"
    B, T, N, K, H = (1, 4096, 32, 8, 128) if is_gpu else (1, 512, 4, 2, 64)
    inputs = in_dtype(_inputs(B, T, N, K, H, device), training_dtype(device))
    grad = torch.ones_like(inputs["q"])

    shape = f"{T} tokens, {N} heads on {K}, of {H}"
    pairs = B * N * T * T
    # a product takes 2 H operations a pair of query and key; causal attention has half of the pairs
    yield Work(f"causal, {shape}", _both(kernel, inputs), _PRODUCTS * 2 * pairs * H / 2, "flops")
    window = T // 8
    # every query has `window` keys, but for the first ones, which have as many less as come before them
    in_window = B * N * (T * window - window * window / 2)
    whole = _both(kernel, inputs, window=window)
    yield Work(f"window of {window}, {shape}", whole, _PRODUCTS * 2 * in_window * H, "flops")
    fixed = {key: x.detach() for key, x in inputs.items()}
    yield Work(f"block, {shape}", partial(_block, kernel, fixed, grad), _PRODUCTS * 2 * pairs * H, "flops")
    T, sizes, means = (8192, (64, 128), (256, 1024, 4096)) if is_gpu else (512, (64,), (64,))
    for H in sizes:
        torch.compiler.reset()
        row = in_dtype(_inputs(1, T, N, K, H, device), training_dtype(device))
        for mean in means:
            documents = packed_documents(T, mean, device)
            flops = _PRODUCTS * 2 * N * _pairs(documents) * H / 2
            shape = f"{T} tokens, {N} heads on {K}, of {H}"
            yield Work(f"documents of {mean}, {shape}", _both(kernel, row, documents=documents), flops, "flops")


def _both(kernel: AttentionKernel, inputs: dict[str, Tensor], **options: Any) -> Callable[[], object]:
    leaves = [x.detach().requires_grad_() for x in inputs.values()]
    grad = torch.ones_like(leaves[0])
    return lambda: torch.autograd.grad(kernel.attend(*leaves, **options), leaves, grad)


BENCH = Bench(held, works)
