"""Uniform random tokens, for measuring speed."""

import numpy as np

from megaspec.data.source import EVALUATION_SAMPLES, Sample, stream, uniform
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
        random = stream(self._seed, split=self._split, position=position % len(self))
        bits = random.random_raw(n_tokens + 1)
        begins = np.zeros(n_tokens + 1, dtype=bool)
        if self._spec.document_length is not None:
            # behind the tokens, which are the same with and without documents
            begins = uniform(random.random_raw(n_tokens + 1)) < 1 / self._spec.document_length
        begins[0] = True
        documents = (np.cumsum(begins) - 1).astype(np.int32)
        return Sample(
            tokens=(bits % np.uint64(self._spec.vocab_size)).astype(np.int64),
            # no document's first token is a label of the one before it
            mask=~(begins[1:] & self._spec.document_mask),
            documents=documents[:-1],
        )
