"""A learnable sequence that is made as it is read.

After x[t-1] comes table[x[t-j]], j = 1 + x[t-1] mod order: the last token says how far back to look, a fixed
permutation says what follows. With probability `noise` a token is drawn at random instead. The best possible loss is
that of the noise, and a model of one attention layer can reach it.
"""

import numpy as np

from megaspec.data.source import EVALUATION_SAMPLES, Sample, stream, uniform
from megaspec.data.spec import SYNTHETIC_DOCUMENT_RATE, SyntheticSpec

_TABLE_POSITION = 2**60


class SyntheticSource:
    """Sequences as a function of (seed, split, position); the rule depends on the seed alone."""

    def __init__(self, spec: SyntheticSpec, *, split: str, seed: int, segments: tuple[int, ...]):
        self._spec = spec
        self._split = split
        self._seed = seed
        self._length = sum(segments) if split == "train" else EVALUATION_SAMPLES
        bits = stream(seed, split="train", position=_TABLE_POSITION).random_raw(spec.vocab_size)
        self._table = np.argsort(bits, kind="stable").tolist()

    def __len__(self) -> int:
        return self._length

    def read(self, position: int) -> Sample:
        spec = self._spec
        n_tokens = spec.seq_len
        document_rate = SYNTHETIC_DOCUMENT_RATE if spec.document_mask else 0
        random = stream(self._seed, split=self._split, position=position % len(self))
        # the draws keep their order and number whatever the spec says: a sample is a function of its position
        drawn = (random.random_raw(n_tokens + 1) % np.uint64(spec.vocab_size)).astype(np.int64)
        noisy = uniform(random.random_raw(n_tokens + 1)) < spec.noise
        begins = uniform(random.random_raw(n_tokens + 1)) < document_rate
        begins[0] = True
        spread, *counts = uniform(random.random_raw(n_tokens + 1))
        # Every sequence has a share of its own; over the sequences the shares average `masked`.
        share = spec.masked + (2 * spread - 1) * min(spec.masked, 1 - spec.masked)
        documents = (np.cumsum(begins) - 1).astype(np.int32)
        return Sample(
            tokens=self._follow(drawn.tolist(), noisy.tolist(), begins.tolist()),
            mask=(np.array(counts) >= share) & ~begins[1:],
            documents=documents[:-1],
        )

    def _follow(self, tokens: list[int], noisy: list[bool], begins: list[bool]) -> np.ndarray:
        """The drawn tokens, each replaced by what the rule makes of those before it, but for noise and beginnings."""
        table = self._table
        order = self._spec.order
        first = 0
        for t in range(len(tokens)):
            if begins[t]:
                first = t
            elif not noisy[t] and t - first >= order:
                # x[t-j], j = 1 + x[t-1] mod order
                source = t - 1 - tokens[t - 1] % order
                tokens[t] = table[tokens[source]]
        return np.array(tokens, dtype=np.int64)
