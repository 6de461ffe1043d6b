"""Megatron's data order as arrays: document, sample and shuffle index of one data set, and the index of a blend.

Note "Where a sample begins". The tokens of all documents in the order of the document index are one stream. Sample i
takes tokens [i·T, i·T + T + 1): inputs and labels overlap by one token. So it begins at the document that holds token
i·T, which is a search in the running sum of lengths; an empty document holds no token. Only row 0 is (0, 0) whatever
the first document is.

Note "Blends in lock step". The greedy rule is sequential, but from any nearly balanced state it returns to the same
path within a few steps. So the range is cut into many chunks which all advance together, each from a guessed state a
little before its beginning. A chunk whose beginning is not the end of the one before it is made again from that end,
until all agree: the result is the sequential one, whatever the guesses were.
"""

from dataclasses import dataclass
from math import ceil

import numpy as np

INT32_MAX = np.iinfo(np.int32).max
UINT32_MAX = np.iinfo(np.uint32).max
# Megatron builds this much more of each data set of a blend than its weight asks for.
BLEND_SURPLUS = 0.005
_ROWS = 2**22
_BLOCK_STEPS = 64


@dataclass(frozen=True)
class GptIndices:
    """The order of one data set."""

    document_index: np.ndarray
    """int32 [epochs · documents]: documents in the order in which they are read."""
    sample_index: np.ndarray
    """int32 or int64 [samples + 1, 2]: place in the document index and token within it at which each sample begins."""
    shuffle_index: np.ndarray
    """uint32 or int64 [samples]: row of the sample index that each sample takes."""


def split_bounds(split: tuple[float, float, float], n_documents: int) -> tuple[int, int, int, int]:
    """Bounds of training, validation and test documents: shares of the sum, rounded half to even; 0 for a sum of 0."""
    if not any(split):
        return (0, 0, 0, 0)
    shares = np.array(split, dtype=np.float64)
    running = 0.0
    bounds = [0]
    for share in (shares / shares.sum()).tolist():
        running += share
        bounds.append(round(running * float(n_documents)))
    return tuple(bounds)


def n_epochs(tokens_per_epoch: int, seq_len: int, n_samples: int) -> int:
    """The fewest passes over the data that hold n_samples sequences and the one token that follows the last."""
    return max(1, -(-(n_samples * seq_len + 1) // tokens_per_epoch))


def gpt_indices(
    lengths: np.ndarray, documents: np.ndarray, *, seq_len: int, seed: int, n_samples: int | None
) -> GptIndices:
    """The order of the given documents, as Megatron's GPTDataset has it.

    lengths: int32, tokens of every document of the file. documents: the numbers of those that are read.
    n_samples: how many samples are asked for (there will be at least as many); None takes each document once.
    """
    per_epoch = int(lengths[documents].sum(dtype=np.int64))
    assert per_epoch > 0, "no tokens"
    epochs = 1
    if n_samples is not None:
        epochs = n_epochs(per_epoch, seq_len, n_samples)
    before_last = ((epochs - 1) * per_epoch - 1) // seq_len
    is_last_apart = epochs > 1 and _is_last_epoch_apart(n_samples - before_last, (per_epoch - 1) // seq_len)
    # one generator for all three draws, in this order, as Megatron has it
    random = np.random.RandomState(seed)
    if is_last_apart:
        earlier = _document_index(documents, epochs - 1, random)
        last = _document_index(documents, 1, random)
        document_index = np.concatenate([earlier, last])
    else:
        document_index = _document_index(documents, epochs, random)
    sample_index = _sample_index(lengths, document_index, seq_len)
    total = len(sample_index) - 1
    n_shuffled_first = before_last if is_last_apart else total
    shuffle_index = _shuffle_index(n_shuffled_first, total, random)
    return GptIndices(document_index, sample_index, shuffle_index)


def _is_last_epoch_apart(n_samples: int, n_samples_of_epoch: int) -> bool:
    """Whether the last epoch is shuffled apart from the others: in Megatron, where less than 80% of it is needed."""
    return n_samples < int(0.80 * n_samples_of_epoch)


def _document_index(documents: np.ndarray, epochs: int, random: np.random.RandomState) -> np.ndarray:
    """int32 [epochs · documents]: the documents, once for each epoch, all shuffled together."""
    index = np.tile(documents.astype(np.int32), epochs)
    random.shuffle(index)
    return index


def _sample_index(lengths: np.ndarray, document_index: np.ndarray, seq_len: int) -> np.ndarray:
    """[samples + 1, 2]: see the note "Where a sample begins". Row 0 stays (0, 0)."""
    # token of the stream at which each document ends
    ends = np.cumsum(lengths[document_index], dtype=np.int64)
    n_samples = (int(ends[-1]) - 1) // seq_len
    largest = max(len(document_index), int(lengths.max()))
    dtype = np.int32 if largest <= INT32_MAX else np.int64
    index = np.zeros((n_samples + 1, 2), dtype=dtype)
    # in blocks of rows, so that the 64-bit arrays between stay small
    for begin in range(1, n_samples + 1, _ROWS):
        token = np.arange(begin, min(begin + _ROWS, n_samples + 1), dtype=np.int64) * seq_len
        # side="right" passes over the empty documents that end at this token
        document = np.searchsorted(ends, token, side="right")
        document_begin = np.where(document > 0, ends[document - 1], 0)
        rows = slice(begin, begin + len(token))
        index[rows, 0] = document
        index[rows, 1] = token - document_begin
    return index


def _shuffle_index(first: int, total: int, random: np.random.RandomState) -> np.ndarray:
    """[total]: the first samples shuffled among themselves, then the others among themselves."""
    dtype = np.uint32 if total < UINT32_MAX - 1 else np.int64
    index = np.arange(total, dtype=dtype)
    random.shuffle(index[:first])
    if first < total:
        random.shuffle(index[first:])
    return index


def normalized(weights: list[float]) -> list[float]:
    """Weights divided by their sum. Doing it again may change the last bit."""
    w = np.array(weights, dtype=np.float64)
    return (w / np.sum(w)).tolist()


def blend_share(weight: float, size: int) -> int:
    """Samples that Megatron builds of a data set for `size` samples of the blend. `weight`: normalized once."""
    return ceil(ceil(size * weight) * (1 + BLEND_SURPLUS))


def blend_indices(weights: list[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Which data set each of `size` samples comes from, and which of its samples it is.

    At sample n the data set with the largest `weight · max(n, 1) - samples so far` is taken, the first of equals.
    weights: normalized. Returns int16 [size] and int64 [size].
    """
    datasets = _greedy(np.array(weights, dtype=np.float64), size)
    samples = np.empty(size, dtype=np.int64)
    for number in range(len(weights)):
        chosen = np.flatnonzero(datasets == number)
        samples[chosen] = np.arange(len(chosen))
    return datasets, samples


def _greedy(weights: np.ndarray, size: int) -> np.ndarray:
    """int16 [size]: the data set of each sample; see the note "Blends in lock step"."""
    n_chunks = max(1, min(2**14, size // 64))
    width = -(-size // n_chunks)
    begins = np.arange(n_chunks, dtype=np.int64) * width
    choices = np.empty((n_chunks, width), dtype=np.int16)
    # begin_counts, end_counts [K data sets, chunks]: samples taken of each data set before a chunk, and after it.
    # Guessed: a balanced state some steps before each chunk, advanced to its beginning.
    warm_up = min(width, 8 * len(weights))
    guess = _balanced(weights, np.maximum(begins - warm_up, 0))
    begin_counts = _advance(weights, begins - warm_up, guess, warm_up, None)
    begin_counts[:, 0] = 0
    end_counts = np.empty_like(begin_counts)
    todo = np.arange(n_chunks)
    while len(todo):
        made = np.empty((len(todo), width), dtype=np.int16)
        end_counts[:, todo] = _advance(weights, begins[todo], begin_counts[:, todo].copy(), width, made)
        choices[todo] = made
        # what was guessed wrong is made again, from where the chunk before it ended; chunk 0 was never guessed
        differs = (begin_counts[:, 1:] != end_counts[:, :-1]).any(axis=0)
        todo = np.flatnonzero(differs) + 1
        begin_counts[:, todo] = end_counts[:, todo - 1]
    return choices.reshape(-1)[:size]


def _balanced(weights: np.ndarray, at: np.ndarray) -> np.ndarray:
    """int64 [K, chunks]: counts near `weights · at` that sum to `at`."""
    ideal = weights[:, None] * at
    counts = np.floor(ideal).astype(np.int64)
    # what rounding down has left over goes to the data sets that it took most from, one sample each
    missing = at - counts.sum(axis=0)
    by_loss = np.argsort(counts - ideal, axis=0, kind="stable")
    rank = np.argsort(by_loss, axis=0, kind="stable")
    return counts + (rank < missing)


def _advance(
    weights: np.ndarray, begins: np.ndarray, counts: np.ndarray, n_steps: int, out: np.ndarray | None
) -> np.ndarray:
    """The counts after n_steps of the greedy rule in every chunk; `out[chunk, step]` gets the choices."""
    counts = counts.astype(np.float64)  # exact up to 2^53
    columns = np.arange(counts.shape[1])
    # choices of some steps, which are written to the rows of `out` at once: a column at a time is slow
    block = np.empty((_BLOCK_STEPS, counts.shape[1]), dtype=np.int16)
    for step in range(n_steps):
        at = np.maximum(begins + step, 1).astype(np.float64)
        # how far each data set is behind its share; only a larger value replaces the first of equals
        largest = weights[0] * at - counts[0]
        choice = np.zeros(len(columns), dtype=np.int16)
        for number in range(1, len(weights)):
            behind = weights[number] * at - counts[number]
            choice[behind > largest] = number
            np.maximum(largest, behind, out=largest)
        counts[choice, columns] += 1
        if out is None:
            continue
        block[step % _BLOCK_STEPS] = choice
        is_full = step % _BLOCK_STEPS == _BLOCK_STEPS - 1
        if is_full or step == n_steps - 1:
            first = step - step % _BLOCK_STEPS
            out[:, first : step + 1] = block[: step + 1 - first].T
    return counts.astype(np.int64)
