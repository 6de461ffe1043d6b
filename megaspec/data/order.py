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
nothing that it could be equal to: weights are divided once, and no data set is built beyond its end. With weights a
pass of the blend comes to the end of one data set before that of the others and begins it again: `n_once` positions lie
before.
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


class _OrderSegment:
    """One stretch of the order over all data sets.

    indices: of each data set of the blend; None for one that the segment reads nothing of. blend: `dataset` and
    `sample` of each position; None where all is read of data set `only`, in the order of its index.
    """

    def __init__(self, n_samples: int, indices: list[Arrays | None], blend: Arrays | None, *, only: int = 0):
        self.n_samples = n_samples
        self.indices = indices
        self._blend = blend
        self._only = only

    def location(self, position: int) -> SampleLocation:
        """Where the sample at a position lies; positions count from 0 at the beginning of the segment."""
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
        self._spec = spec
        self._files = files
        self._split = split
        for file in files:
            if len(file) > INT32_MAX:
                raise DataError(f"{file.prefix}.idx: sequence count={len(file)}, an order counts up to {INT32_MAX}")
        self._weights: list[float] | None = None
        if spec.weights is not None:
            self._weights = normalized(spec.weights)
        # of each data set: first and last but one document of the split, a hash, whole samples in one pass
        self._bounds: list[tuple[int, int]] = []
        self._identities: list[str] = []
        self._samples: list[int | None] = []
        number = SPLITS.index(split)
        for file in files:
            begin, end = split_bounds(spec.split, len(file))[number : number + 2]
            self._bounds.append((begin, end))
            self._identities.append(identity(file))
            self._samples.append(samples_per_pass(file, (begin, end), spec.seq_len))
        folder = spec.cache
        if folder == "auto":
            folder = Path(files[0].prefix).parent / "index-cache"
        self._cache = IndexCache(folder)
        self._segments: list[_OrderSegment] = []
        self._n_once = 0
        if split == "train":
            self._check_train()
            for index, n_samples in enumerate(segments):
                # numpy's RandomState takes seeds of 32 bits
                self._segments.append(self._train_segment(n_samples, (seed + index) % 2**32))
        else:
            self._segments.append(self._evaluation_segment())
        # position at which each segment ends
        self._ends = list(accumulate(segment.n_samples for segment in self._segments))

    def __len__(self) -> int:
        """Number of positions before the order ends (`train`) or begins again."""
        return self._ends[-1]

    def location(self, position: int) -> SampleLocation:
        """The data set and sample at a position. A position past the end of the training order is a bug."""
        _, location = self._locate(position)
        return location

    def pieces(self, position: int) -> tuple[int, list[tuple[int, int, int | None]]]:
        """The data set at a position and the (document, start, stop) of its seq_len + 1 tokens, in order.

        stop None: to the document's end.
        """
        segment, location = self._locate(position)
        index = segment.indices[location.dataset]
        assert index is not None, f"position {position} in a data set without samples"
        shuffle = index["shuffle_index"]
        sample = location.sample
        if self._split != "train":
            # a blend may ask for more of a data set than its one pass holds
            sample %= len(shuffle)
        row = int(shuffle[sample])
        # a sample ends with the token that the next one begins with: its last label
        (first, start), (last, stop) = index["sample_index"][row : row + 2].tolist()
        documents = index["document_index"][first : last + 1].tolist()
        if first == last:
            return location.dataset, [(documents[0], start, stop + 1)]
        pieces = [(documents[0], start, None)]
        pieces += [(document, 0, None) for document in documents[1:-1]]
        pieces.append((documents[-1], 0, stop + 1))
        return location.dataset, pieces

    def _locate(self, position: int) -> tuple[_OrderSegment, SampleLocation]:
        if self._split != "train":
            position %= len(self)
        assert 0 <= position < len(self), f"position {position} of {len(self)}"
        number = bisect_right(self._ends, position)
        segment = self._segments[number]
        begin = self._ends[number] - segment.n_samples
        return segment, segment.location(position - begin)

    def _check_train(self) -> None:
        for file, (begin, end), n_samples in zip(self._files, self._bounds, self._samples, strict=True):
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

    def _train_segment(self, n_samples: int, seed: int) -> _OrderSegment:
        if self._weights is None and len(self._files) == 1:
            return _OrderSegment(n_samples, [self._index(0, seed, n_samples)], None)
        if self._weights is None:
            return self._one_pass_segment(n_samples, seed)
        # divided by their sum once more: see the note "What a weight does"
        blend = self._blend(normalized(self._weights), n_samples)
        used = np.bincount(blend["dataset"], minlength=len(self._files)).tolist()
        indices: list[Arrays | None] = []
        for number, (weight, n_used) in enumerate(zip(self._weights, used, strict=True)):
            # Megatron's surplus, and never less than the blend takes: rounding may give more than a share
            n_built = max(blend_share(weight, n_samples), n_used, 1)
            indices.append(self._index(number, seed, n_built))
        return _OrderSegment(n_samples, indices, blend)

    def _one_pass_segment(self, n_samples: int, seed: int) -> _OrderSegment:
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
        return _OrderSegment(n_samples, [self._index(k, seed, None) for k in range(len(self._files))], blend)

    @property
    def n_once(self) -> int:
        """Of `valid` and `test`: positions before the first one that reads a sequence again."""
        return self._n_once

    def _evaluation_segment(self) -> _OrderSegment:
        """One pass over all data sets that hold a sample of the split; the others are left out of the blend."""
        shares = self._samples if self._weights is None else self._weights
        used: list[int] = []
        used_shares: list[float] = []
        total = 0
        indices: list[Arrays | None] = []
        for number, n_samples in enumerate(self._samples):
            if not n_samples:
                indices.append(None)
                continue
            used.append(number)
            used_shares.append(float(shares[number]))
            total += n_samples
            indices.append(self._index(number, EVALUATION_SEED, None))
        if not used:
            raise DataError(
                f"data.split={self._spec.split}: the {self._split} split (documents {self._documents_text()}) holds no "
                f"sequence of data.seq_len={self._spec.seq_len} tokens and one more; give it a larger share or shorten "
                "the sequence"
            )
        self._n_once = total
        if len(used) == 1:
            return _OrderSegment(total, indices, None, only=used[0])
        blend = self._blend(normalized(used_shares), total)
        in_a_pass = np.array([self._samples[number] for number in used])
        begins_again = blend["sample"] >= in_a_pass[blend["dataset"]]
        if begins_again.any():
            self._n_once = int(begins_again.argmax())
        # the blend counts the data sets that are used; the order counts all of them
        dataset = np.array(used)[blend["dataset"]]
        return _OrderSegment(total, indices, blend | {"dataset": dataset})

    def _documents_text(self) -> str:
        """`BEGIN to END of PREFIX` of every data set, for errors."""
        texts = []
        for file, (begin, end) in zip(self._files, self._bounds, strict=True):
            texts.append(f"{begin} to {end} of {file.prefix}")
        return ", ".join(texts)

    def _index(self, number: int, seed: int, n_samples: int | None) -> Arrays:
        file = self._files[number]
        begin, end = self._bounds[number]
        # all that the index depends on
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
    if not tokens:
        return None
    # the last sample needs one token more, its last label
    return (tokens - 1) // seq_len


def identity(file: IndexedFile) -> str:
    """Hash of the .idx file, from the manifest where there is one (the file was checked against it when opened)."""
    if file.manifest is not None:
        return file.manifest.idx_sha256
    return sha256_of_files([Path(f"{file.prefix}.idx")])
