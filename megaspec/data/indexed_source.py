"""Training sequences from .bin/.idx files."""

import numpy as np

from megaspec.core.errors import DataError
from megaspec.data.indexed import IndexedFile
from megaspec.data.order import DataOrder
from megaspec.data.source import Sample
from megaspec.data.spec import IndexedSpec


class IndexedSource:
    """A blend of token files, packed into sequences of seq_len tokens in Megatron's order.

    vocab_size: token ids must be below it. Raises DataError for missing or damaged files and empty splits.
    """

    def __init__(self, spec: IndexedSpec, *, split: str, seed: int, segments: tuple[int, ...], vocab_size: int):
        self._spec = spec
        self._split = split
        self._vocab_size = vocab_size
        self._files = [IndexedFile(part.prefix) for part in spec.blend]
        for number, file in enumerate(self._files):
            check_vocabulary(f"data.blend.{number}.prefix", file, vocab_size)
        self._order = DataOrder(spec, self._files, split=split, seed=seed, segments=segments)

    def __len__(self) -> int:
        return len(self._order)

    def count(self, most: int) -> int:
        """Sequences of an evaluation, at most `most`: none twice, so a blend with weights ends where the first of its
        data sets does."""
        return min(most, self._order.n_once)

    def read(self, position: int) -> Sample:
        number, pieces = self._order.pieces(position)
        file = self._files[number]
        # the tokens of each document in the sequence; documents of no token are none
        of_documents = []
        lengths = []
        for document, start, stop in pieces:
            read = file.read(document, start, stop)
            if len(read):
                of_documents.append(read)
                lengths.append(len(read))
        tokens = np.concatenate(of_documents).astype(np.int64)
        assert len(tokens) == self._spec.seq_len + 1, f"{len(tokens)} tokens at position {position}"
        if int(tokens.max()) >= self._vocab_size or int(tokens.min()) < 0:
            wrong = tokens[(tokens >= self._vocab_size) | (tokens < 0)][0]
            raise DataError(
                f"{file.bin_path}: token id={wrong} in the {self._split} sequence at position {position}, "
                f"model.vocab_size={self._vocab_size} must be above it; see `megaspec data inspect {file.prefix}`"
            )
        documents = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        # whether a label is the first token of the next document
        crosses = (documents[1:] != documents[:-1]) & self._spec.document_mask
        return Sample(tokens=tokens, mask=~crosses, documents=documents[:-1])


def check_vocabulary(key: str, file: IndexedFile, vocab_size: int) -> None:
    """Raises DataError when a manifest says that the data has more token ids than the model."""
    if file.manifest is not None and file.manifest.tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"{key}={file.prefix} has token ids up to {file.manifest.tokenizer.vocab_size - 1}, "
            f"model.vocab_size={vocab_size} must be at least {file.manifest.tokenizer.vocab_size}"
        )
