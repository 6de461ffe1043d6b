"""The data order: a pure function of the data sets, their weights, the seed, the sequence length and the segments.

Note "Segments". Megatron's index depends on the total number of samples, so asking for more would move what was read
already. A longer run appends a segment instead: its own index over the same documents, with the seed of its number.
Segment 0 is exactly Megatron's order; what is appended changes no earlier sample.

Note "What a weight does". As in Megatron (core/datasets/blended_megatron_dataset_builder.py and blended_dataset.py of
0.16.1):
- Weights are divided by their sum twice, in the builder and in the blended data set. Once and twice may differ in the
  last bit, and from the first tie that this decides on the order does. How much is built of each data set follows from
  the weights that were divided once.
- A single data set with a weight is a blend of one: more of it is built than is read, so the last epoch may be another
  one, or be shuffled apart from the others. Without a weight exactly what is needed is built.
- Several data sets without weights: each is built for one epoch, and its number of sequences is its weight, divided by
  their sum once. What needs more sequences than these is refused; Megatron's run ends there.

Note "Evaluation". Megatron draws new validation samples for every evaluation, as many as the whole run will need, so
its order hangs on the number of steps. Ours is one pass over the split, the same whatever the run is, and there is
nothing that it could be equal to: weights are divided once, and no data set is built beyond its end.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from megaspec.core.errors import DataError
from megaspec.data.index_cache import Arrays, IndexCache
from megaspec.data.indexed import IndexedFile
from megaspec.data.indices import INT32_MAX, blend_indices, blend_share, gpt_indices, normalized, split_bounds
from megaspec.data.manifest import sha256_of_files
from megaspec.data.spec import IndexedSpec

SPLITS = ("train", "valid", "test")
# Evaluation reads the same samples whatever the seed of the run is, so that runs can be compared.
EVALUATION_SEED = 0


@dataclass(frozen=True)
class SampleLocation:
    """Where a sample lies."""

    dataset: int
    """Number of the data set in the blend."""
    sample: int
    """Number of the sample in the data set's index."""


class _Segment:
    """One stretch of the order over all data sets."""

    def __init__(self, n_samples: int, indices: list[Arrays | None], blend: Arrays | None):
        self.n_samples = n_samples
        self.indices = indices
        self._blend = blend
        self._only = next((i for i, index in enumerate(indices) if index is not None), 0)

    def place(self, position: int) -> SampleLocation:
        if self._blend is None:
            return SampleLocation(self._only, position)
        return SampleLocation(int(self._blend["dataset"][position]), int(self._blend["sample"][position]))


class DataOrder:
    """Global position -> pieces of documents.

    files: the data sets in the order of the blend. split: `train`, `valid` or `test`. For `valid` and `test` the
    order is one pass over the split, and positions past its end begin again.
    Raises DataError when a split holds no whole sample.
    """

    def __init__(
        self, spec: IndexedSpec, files: list[IndexedFile], *, split: str, seed: int, segments: tuple[int, ...]
    ):
        assert split in SPLITS, f"split {split!r}"
        self._spec, self._files, self._split = spec, files, split
        for file in files:
            if len(file) > INT32_MAX:
                raise DataError(f"{file.prefix}.idx: sequence count={len(file)}, an order counts up to {INT32_MAX}")
        self._weights = None if spec.weights is None else normalized(spec.weights)
        self._bounds = [
            split_bounds(spec.split, len(file))[SPLITS.index(split) : SPLITS.index(split) + 2] for file in files
        ]
        self._identities = [identity(file) for file in files]
        self._samples = [samples_per_pass(file, bounds, spec.seq_len) for file, bounds in self._ranges()]
        folder = Path(files[0].prefix).parent / "index-cache" if spec.cache == "auto" else spec.cache
        self._cache = IndexCache(folder)
        if split == "train":
            self._check_train()
            self._segments = [self._train_segment(n, (seed + k) % 2**32) for k, n in enumerate(segments)]
        else:
            self._segments = [self._evaluation_segment()]
        self._ends = list(accumulate(segment.n_samples for segment in self._segments))

    def __len__(self) -> int:
        """Number of positions before the order ends (`train`) or begins again."""
        return self._ends[-1]

    def place(self, position: int) -> SampleLocation:
        """The data set and sample at a position. A position past the end of the training order is a bug."""
        return self._locate(position)[1]

    def pieces(self, position: int) -> tuple[int, list[tuple[int, int, int | None]]]:
        """The data set at a position and the (document, start, stop) of its seq_len + 1 tokens, in order.

        stop None: to the document's end.
        """
        segment, place = self._locate(position)
        index = segment.indices[place.dataset]
        assert index is not None, f"position {position} in a data set without samples"
        shuffle = index["shuffle_index"]
        row = int(shuffle[place.sample if self._split == "train" else place.sample % len(shuffle)])
        (first, start), (last, stop) = index["sample_index"][row : row + 2].tolist()
        documents = index["document_index"][first : last + 1].tolist()
        if first == last:
            return place.dataset, [(documents[0], start, stop + 1)]
        middle = [(document, 0, None) for document in documents[1:-1]]
        return place.dataset, [(documents[0], start, None), *middle, (documents[-1], 0, stop + 1)]

    def _locate(self, position: int) -> tuple[_Segment, SampleLocation]:
        if self._split != "train":
            position %= len(self)
        assert 0 <= position < len(self), f"position {position} of {len(self)}"
        number = bisect_right(self._ends, position)
        segment = self._segments[number]
        return segment, segment.place(position - (self._ends[number] - segment.n_samples))

    def _ranges(self) -> list[tuple[IndexedFile, tuple[int, int]]]:
        return list(zip(self._files, self._bounds, strict=True))

    def _check_train(self) -> None:
        for (file, (begin, end)), n_samples in zip(self._ranges(), self._samples, strict=True):
            if n_samples is None:
                raise DataError(
                    f"{file.prefix}: no tokens in the training split (documents {begin} to {end} of {len(file)}); "
                    f"give data.split={self._spec.split} a larger first share, or prepare more data"
                )

    def _check_one_pass(self, n_samples: int) -> None:
        for file, n_there in zip(self._files, self._samples, strict=True):
            if n_there == 0:
                raise DataError(
                    f"{file.prefix}: no whole sequence of data.seq_len={self._spec.seq_len} tokens in the training "
                    "split, so a blend without weights can't count it; leave it out, or give the data sets weights"
                )
        total = sum(self._samples)
        if n_samples > total:
            raise DataError(
                f"data.blend: without weights it is one pass of {total} sequences, {n_samples} are needed; "
                "give the data sets weights"
            )

    def _train_segment(self, n_samples: int, seed: int) -> _Segment:
        if self._weights is None and len(self._files) == 1:
            return _Segment(n_samples, [self._index(0, seed, n_samples)], None)
        if self._weights is None:
            return self._one_pass_segment(n_samples, seed)
        blend = self._blend(normalized(self._weights), n_samples)
        used = np.bincount(blend["dataset"], minlength=len(self._files))
        wanted = [max(blend_share(w, n_samples), int(n), 1) for w, n in zip(self._weights, used, strict=True)]
        return _Segment(n_samples, [self._index(k, seed, n) for k, n in enumerate(wanted)], blend)

    def _one_pass_segment(self, n_samples: int, seed: int) -> _Segment:
        """Of a blend without weights."""
        self._check_one_pass(n_samples)
        blend = self._blend(normalized([float(n) for n in self._samples]), n_samples)
        used = np.bincount(blend["dataset"], minlength=len(self._files))
        for file, n_used, n_there in zip(self._files, used.tolist(), self._samples, strict=True):
            if n_used > n_there:
                raise DataError(
                    f"data.blend: {n_samples} sequences of the blend take {n_used} of {file.prefix}, one pass holds "
                    f"{n_there}; train some steps less, or give the data sets weights"
                )
        return _Segment(n_samples, [self._index(k, seed, None) for k in range(len(self._files))], blend)

    def _evaluation_segment(self) -> _Segment:
        full = [k for k, n in enumerate(self._samples) if n]
        if not full:
            ranges = ", ".join(f"{b} to {e} of {file.prefix}" for file, (b, e) in self._ranges())
            raise DataError(
                f"data.split={self._spec.split}: the {self._split} split (documents {ranges}) holds no sequence of "
                f"data.seq_len={self._spec.seq_len} tokens and one more; give it a larger share or shorten the sequence"
            )
        total = sum(self._samples[k] for k in full)
        indices = [self._index(k, EVALUATION_SEED, None) if k in full else None for k in range(len(self._files))]
        if len(full) == 1:
            return _Segment(total, indices, None)
        shares = self._samples if self._weights is None else self._weights
        blend = self._blend(normalized([float(shares[k]) for k in full]), total)
        return _Segment(total, indices, blend | {"dataset": np.array(full)[blend["dataset"]]})

    def _index(self, number: int, seed: int, n_samples: int | None) -> Arrays:
        file, (begin, end) = self._files[number], self._bounds[number]
        key = {
            "kind": "gpt",
            "idx_sha256": self._identities[number],
            "documents": [begin, end],
            "seq_len": self._spec.seq_len,
            "seed": seed,
            "samples": n_samples,
        }

        def build() -> Arrays:
            documents = np.arange(begin, end, dtype=np.int32)
            return vars(
                gpt_indices(file.index.lengths, documents, seq_len=self._spec.seq_len, seed=seed, n_samples=n_samples)
            )

        return self._cache.get(key, build)

    def _blend(self, weights: list[float], n_samples: int) -> Arrays:
        def build() -> Arrays:
            dataset, sample = blend_indices(weights, n_samples)
            return {"dataset": dataset, "sample": sample}

        return self._cache.get({"kind": "blend", "weights": weights, "samples": n_samples}, build)


def samples_per_pass(file: IndexedFile, bounds: tuple[int, int], seq_len: int) -> int | None:
    """Whole samples that one pass over a range of documents holds; None when it has no tokens."""
    tokens = int(file.index.lengths[bounds[0] : bounds[1]].sum(dtype=np.int64))
    return (tokens - 1) // seq_len if tokens else None


def identity(file: IndexedFile) -> str:
    """Hash of the .idx file, from the manifest where there is one (the file was checked against it when opened)."""
    if file.manifest is not None:
        return file.manifest.idx_sha256
    return sha256_of_files([Path(f"{file.prefix}.idx")])
