"""The next token of a text, out of the logits: the likeliest, or drawn."""

# n texts, V vocabulary

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaspec.nn.hashing import key_of, uniform_53

NOT_FINITE = -1
"""In place of a token: the logits hold NaN or infinities."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. What is set cuts the likely tokens out in this order, as in transformers."""

    temperature: float = 0.8
    """Logits are divided by it; 0 takes the likeliest token."""
    top_k: int | None = None
    """The k likeliest, and those as likely as the last of them."""
    top_p: float | None = None
    """The fewest likeliest ones whose probabilities sum to p at least (Holtzman et al. 2020)."""
    min_p: float | None = None
    """Those at least p times as likely as the likeliest (Nguyen et al. 2024)."""
    seed: int = 0
    """Of the draws."""


def text_key(seed: int, prompt: Sequence[int], sample: int) -> int:
    """What the draws of one text follow from, whatever is written beside it. `sample`: texts of one prompt differ."""
    ids = ",".join(map(str, prompt))
    return key_of(seed, f"text/{sample}/{ids}")


class Draw:
    """Tokens of several texts at a time."""

    def __init__(self, sampling: Sampling):
        self._sampling = sampling

    def __call__(self, logits_nV: Tensor, keys: Sequence[int], counters: Sequence[int]) -> list[int]:
        """`keys`: of the texts, see text_key. `counters`: tokens that each has so far. -> tokens, or NOT_FINITE"""
        # on the CPU in fp64, so that the same seed writes the same text on every device
        logits_nV = logits_nV.to("cpu", torch.float64)
        is_finite_n = torch.isfinite(logits_nV).all(dim=-1)
        if self._sampling.temperature == 0:
            found = logits_nV.argmax(dim=-1)
            return torch.where(is_finite_n, found, NOT_FINITE).tolist()
        tokens = []
        for logits_V, is_finite, key, counter in zip(logits_nV, is_finite_n.tolist(), keys, counters, strict=True):
            if is_finite:
                tokens.append(_drawn(probabilities(logits_V, self._sampling), uniform_53(key, counter)))
            else:
                tokens.append(NOT_FINITE)
        return tokens


def probabilities(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """[V] in float64, of which a token is drawn; not those of temperature 0."""
    # first less the largest, which changes nothing: a tiny temperature would leave no number
    scores_V = (logits_V - logits_V.max()) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(scores_V):
        least = scores_V.topk(sampling.top_k).values[-1]
        scores_V = scores_V.masked_fill(scores_V < least, float("-inf"))
    probabilities_V = scores_V.softmax(0)
    if sampling.top_p is not None and sampling.top_p < 1:
        sorted_V, order_V = probabilities_V.sort(descending=True, stable=True)
        # a token is left while those before it do not reach p; the likeliest always
        before_V = sorted_V.cumsum(0) - sorted_V
        left_out_V = order_V[before_V >= sampling.top_p]
        probabilities_V = probabilities_V.index_fill(0, left_out_V, 0.0)
    if sampling.min_p is not None:
        is_likely_V = probabilities_V >= sampling.min_p * probabilities_V.max()
        probabilities_V = probabilities_V.where(is_likely_V, 0.0)
    return probabilities_V / probabilities_V.sum()


def _drawn(probabilities_V: Tensor, uniform: float) -> int:
    """The token on whose part of [0, 1) a number falls, the parts in the order of the vocabulary."""
    ends_V = probabilities_V.cumsum(0)
    token = torch.searchsorted(ends_V, uniform * float(ends_V[-1]), right=True)
    # rounding may bring the number to the end of the last part
    last = torch.searchsorted(ends_V, ends_V[-1])
    return min(int(token), int(last))
