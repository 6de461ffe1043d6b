"""Training sequences from text files, tokenized as they are read: the order is in stream_lane.py."""

import numpy as np

from megaspec.core.errors import CheckpointError, DataError
from megaspec.data.source import EVALUATION_SAMPLES, Sample
from megaspec.data.spec import StreamSpec
from megaspec.data.stream_lane import StreamOrder
from megaspec.data.stream_worker import Lanes, SampleFrame
from megaspec.data.stream_workers import StreamWorker


class StreamSource:
    """A stream's sequences. For training shuffled and without end; otherwise file after file, beginning again.

    Positions of a lane are quick to read in ascending order; one that lies before what was read is found from the place
    that the source began at. vocab_size: token ids must be below it.
    Raises DataError for files or a tokenizer that are not there or don't fit, and for lines that are no documents.
    """

    def __init__(self, spec: StreamSpec, *, split: str, seed: int, segments: tuple[int, ...], vocab_size: int):
        is_training = split == "train"
        self._spec = spec
        self._seed = seed
        self._length = sum(segments) if is_training else EVALUATION_SAMPLES
        self._order = StreamOrder(spec, seed=seed, shuffled=is_training)
        tokenizer = self._order.tokenizer
        if tokenizer.vocab_size > vocab_size:
            raise DataError(
                f"data.tokenizer={spec.tokenizer} has token ids up to {tokenizer.vocab_size - 1}, "
                f"model.vocab_size={vocab_size} must be at least {tokenizer.vocab_size}"
            )
        self._begin = np.stack([self._order.beginning(lane) for lane in range(self._order.n_lanes)])
        """Where the lanes begin to be read from here: at their beginning, or where a checkpoint stood."""
        self._place = self._begin.copy()
        self._lanes = Lanes(self._order)
        self._counted: dict[int, int] = {}
        self._worker_of: dict[int, StreamWorker] = {}
        self._workers: list[StreamWorker] = []
        # a pass from file to file is one lane, which nothing is gained for by a process
        self._n_workers = spec.workers if is_training else 0

    def __len__(self) -> int:
        return self._length

    def count(self, most: int) -> int:
        """Sequences of one pass, of an evaluation set: counted by reading it, to at most `most` of them.

        With several collections of files a pass ends where the first of them does. DataError: there is none.
        """
        if most not in self._counted:
            self._counted[most] = self._count(most)
        return self._counted[most]

    def _count(self, most: int) -> int:
        n_stretches = np.array([group.n_stretches for group in self._order.groups])
        for sample in range(most):
            place = self._take(0, sample).place
            # behind the first of a group's numbers, which counts its samples, is its stretch
            if (place[2::4] >= n_stretches).any():
                if sample == 0:
                    paths = ", ".join(entry.path for entry in self._spec.files[:3])
                    raise DataError(f"{paths}: no whole sequence of data.seq_len={self._spec.seq_len} tokens is there")
                return sample
        return most

    def read(self, position: int) -> Sample:
        lane = position % self._order.n_lanes
        sample = position // self._order.n_lanes
        frame = self._take(lane, sample)
        self._place[lane] = frame.place
        documents = frame.packed.documents
        # whether a label is the first token of the next document
        crosses = (documents[1:] != documents[:-1]) & self._spec.document_mask
        return Sample(tokens=frame.packed.tokens.astype(np.int64), mask=~crosses, documents=documents[:-1])

    def _take(self, lane: int, sample: int) -> SampleFrame:
        begin = self._begin[lane]
        if sample < begin[0]:
            # behind what a checkpoint keeps
            begin = self._order.beginning(lane)
        if self._n_workers:
            return self._worker(lane).take(lane, sample, begin)
        return self._lanes.sample(lane, sample, begin)

    def _worker(self, lane: int) -> StreamWorker:
        """Which worker a lane belongs to: in turn, in the order in which this rank comes to them."""
        if lane not in self._worker_of:
            number = len(self._worker_of) % self._n_workers
            if number == len(self._workers):
                n_columns = self._order.n_columns
                self._workers.append(StreamWorker(self._spec, seed=self._seed, shuffled=True, n_columns=n_columns))
            self._worker_of[lane] = self._workers[number]
        return self._worker_of[lane]

    def place(self) -> np.ndarray:
        """int64 [lanes, columns]: the place of each lane behind what was read; see stream_lane.py."""
        return self._place.copy()

    def go_to(self, place: np.ndarray) -> None:
        """Reads on from a place of any rank of any layout. Raises CheckpointError for one of another stream."""
        if place.dtype != np.int64 or place.shape != self._begin.shape:
            found = f"{place.dtype} {list(place.shape)}"
            raise CheckpointError(f"the place in the stream is {found}, expected int64 {list(self._begin.shape)}")
        # of each lane the samples of its groups, which are the first of their numbers
        turns = place[:, 1::4].sum(axis=1)
        if (place < 0).any() or (turns != place[:, 0] + np.arange(len(place))).any():
            raise CheckpointError("the place in the stream is none that a stream comes to")
        self._begin = place.copy()
        self._place = place.copy()
        assert not self._workers, "a stream that is read already"

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers.clear()
        self._worker_of.clear()
