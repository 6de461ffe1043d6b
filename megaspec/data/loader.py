"""From sources to batches on the device, read ahead by a thread.

Note "The same order on any layout". Step s takes the positions [consumed(s), consumed(s + 1)). Micro batch j of data
rank r takes `first + (j · dp_size + r) · micro_batch` and the micro_batch - 1 after it, so together the ranks read the
step's range from front to back whatever dp_size and micro_batch are.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, Self

import numpy as np
import torch

from megaspec.data.batch import Batch
from megaspec.data.indexed_source import IndexedSource
from megaspec.data.random import RandomSource
from megaspec.data.source import ResumableSource, Source
from megaspec.data.spec import DataSpec, IndexedSpec, RandomSpec, StreamSpec, SyntheticSpec
from megaspec.data.stream_source import StreamSource
from megaspec.data.synthetic import SyntheticSource
from megaspec_kernels.attention.documents import documents_of

Split = Literal["train", "valid", "test"]

SOURCES: Mapping[type[DataSpec], Callable[..., Source]] = {
    IndexedSpec: IndexedSource,
    SyntheticSpec: lambda spec, *, vocab_size, **rest: SyntheticSource(spec, **rest),
    RandomSpec: lambda spec, *, vocab_size, **rest: RandomSource(spec, **rest),
    StreamSpec: StreamSource,
}


class Schedule(Protocol):
    """The global batch over the steps, in sequences (megaspec.train.batch_schedule)."""

    def batch(self, step: int) -> int: ...

    def consumed(self, step: int) -> int: ...


@dataclass(frozen=True)
class StepBatch:
    """What one rank needs for one optimizer step."""

    micro_batches: list[Batch]
    """On the device, in the order in which they are run."""
    ids: tuple[int, int]
    """First position and number of the sequences that all ranks together take in this step."""
    place: np.ndarray | None = None
    """Where the source stands once this rank's sequences are read; None for a source that finds any position."""


def open_source(
    data_spec: DataSpec,
    *,
    split: Split,
    seed: int,
    segments: tuple[int, ...],
    vocab_size: int,
    sources: Mapping[type[DataSpec], Callable[..., Source]] = SOURCES,
) -> Source:
    """The source that a data spec describes.

    segments: sequences of each stretch of the training order. vocab_size: token ids must be below it.
    sources: ours, and those of plug-ins where there are any.
    Raises DataError for files that are missing, damaged or don't fit the vocabulary, WriteError for the index cache.
    """
    made = getattr(data_spec, "vocab_size", None)
    assert made is None or made <= vocab_size, f"data.vocab_size={made} exceeds model.vocab_size={vocab_size}"
    return sources[type(data_spec)](data_spec, split=split, seed=seed, segments=segments, vocab_size=vocab_size)


class Loader:
    """Batches of one data rank for steps start_step ... start_step + steps - 1, `prefetch` steps read ahead.

    Iterating yields a StepBatch a step. An error of the reading thread is raised where the batch is asked for. Close
    it, or use it as a context manager, to stop the thread early.
    """

    def __init__(
        self,
        source: Source,
        schedule: Schedule,
        *,
        start_step: int,
        steps: int,
        micro_batch: int,
        dp_rank: int,
        dp_size: int,
        device: torch.device,
        prefetch: int = 2,
        document_mask: bool = False,
    ):
        self._source = source
        self._schedule = schedule
        self._micro_batch = micro_batch
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._device = torch.device(device)
        self._document_mask = document_mask
        self._queue: queue.Queue[StepBatch | BaseException | None] = queue.Queue(maxsize=max(1, prefetch))
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._read_ahead, args=(range(start_step, start_step + steps),), name="loader", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[StepBatch]:
        while not self._stopping.is_set():
            item = self._queue.get()
            if isinstance(item, BaseException):
                self.close()
                raise item
            if item is None:
                break
            yield StepBatch([batch.to(self._device) for batch in item.micro_batches], item.ids, item.place)
        self.close()

    def close(self) -> None:
        """Stop the thread and drop what it read ahead. May be called more than once."""
        self._stopping.set()
        self._drop()  # a thread that waits for room goes on at once
        self._thread.join()
        self._drop()
        self._queue.put_nowait(None)  # whoever still waits for a batch wakes up

    def _drop(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._queue.get_nowait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_ahead(self, steps: range) -> None:
        try:
            for step in steps:
                batch = self._step(step)
                if batch is None or not self._put(batch):
                    return
            self._put(None)
        # Whatever it is, the consumer has to get it: a silent thread would leave it waiting for ever.
        except BaseException as error:
            self._put(error)

    def _put(self, item: StepBatch | BaseException | None) -> bool:
        while not self._stopping.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def _step(self, step: int) -> StepBatch | None:
        """The batches of a step; None when the loader was closed meanwhile."""
        first = self._schedule.consumed(step)
        count = self._schedule.batch(step)
        n_micro, rest = divmod(count, self._micro_batch * self._dp_size)
        assert rest == 0, f"global batch {count} is no multiple of {self._micro_batch} · {self._dp_size}"
        batches = []
        for j in range(n_micro):
            if self._stopping.is_set():
                return None
            # see the note "The same order on any layout"
            begin = first + (j * self._dp_size + self._dp_rank) * self._micro_batch
            positions = list(range(begin, begin + self._micro_batch))
            batch = read_batch(self._source, positions, document_mask=self._document_mask)
            if self._device.type == "cuda":
                batch = pinned(batch)
            batches.append(batch)
        place = None
        if isinstance(self._source, ResumableSource):
            # here, since the thread reads on before the step is trained
            place = self._source.place()
        return StepBatch(batches, (first, count), place)


def eval_batches(
    source: Source,
    samples: int,
    *,
    micro_batch: int,
    dp_rank: int,
    dp_size: int,
    device: torch.device,
    document_mask: bool = False,
) -> Iterator[Batch]:
    """This rank's part of the first `samples` evaluation sequences.

    Every rank yields the same number of micro batches of the same shape; rows past the last sample have a mask that is
    False throughout and the id -1.
    """
    device = torch.device(device)
    for begin in range(0, samples, micro_batch * dp_size):
        first = begin + dp_rank * micro_batch
        positions = [p if p < samples else -1 for p in range(first, first + micro_batch)]
        batch = read_batch(source, positions, document_mask=document_mask)
        if device.type == "cuda":
            batch = pinned(batch)
        yield batch.to(device)


def read_batch(source: Source, positions: list[int], *, document_mask: bool) -> Batch:
    """The sequences at some positions as one batch on the CPU. Position -1: a row that counts nothing."""
    tokens = []
    masks = []
    documents = []
    for position in positions:
        # a row that counts nothing has to hold something: sample 0
        sample = source.read(max(position, 0))
        tokens.append(sample.tokens)
        masks.append(sample.mask & (position >= 0))
        documents.append(sample.documents)
    packed = None
    if document_mask:
        # here, where their bounds cost nothing: on a GPU the host would wait for them
        packed = documents_of(torch.from_numpy(np.stack(documents)))
    # [B, T + 1]: the inputs, and the label of the last
    tokens = torch.from_numpy(np.stack(tokens))
    return Batch(
        tokens=tokens[:, :-1].contiguous(),
        labels=tokens[:, 1:].contiguous(),
        mask=torch.from_numpy(np.stack(masks)),
        ids=torch.tensor(positions, dtype=torch.int64),
        documents=packed,
    )


def pinned(batch: Batch) -> Batch:
    """The same batch in page-locked memory, from which a GPU copies without the CPU waiting."""
    return batch.map(lambda tensor: tensor.pin_memory())
