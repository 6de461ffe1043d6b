"""Uniform random tokens, for measuring speed."""

import numpy as np

from megaspec.data.source import EVALUATION_SAMPLES, Sample, stream
from megaspec.data.spec import RandomSpec


class RandomSource:
    """Sequences of independent uniform tokens, a function of (seed, split, position)."""

    def __init__(self, spec: RandomSpec, *, split: str, seed: int, segments: tuple[int, ...]):
        self._spec = spec
        self._split = split
        self._seed = seed
        self._length = sum(segments) if split == "train" else EVALUATION_SAMPLES

    def __len__(self) -> int:
        return self._length

    def read(self, position: int) -> Sample:
        n_tokens = self._spec.seq_len
        bits = stream(self._seed, split=self._split, position=position % len(self)).random_raw(n_tokens + 1)
        return Sample(
            tokens=(bits % np.uint64(self._spec.vocab_size)).astype(np.int64),
            mask=np.ones(n_tokens, dtype=bool),
            documents=np.zeros(n_tokens, dtype=np.int32),
        )
