"""What texts are written with: the weights and the tokenizer of a run, or of a folder of Hugging Face's."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from megaspec.checkpoint.comm import Comm, together
from megaspec.checkpoint.reader import Weights
from megaspec.core.errors import DataError
from megaspec.data.tokenizer import TOKENIZER_NAMES, Tokenizer, load_tokenizer
from megaspec.hf.companions import end_ids, kept_companions, read_companions, refuse_other_vocabulary
from megaspec.hf.folder import CONFIG, open_hf_folder
from megaspec.hf.names import weight_table
from megaspec.hf.table import family_of, read_model
from megaspec.hf.weights import HfWeights
from megaspec.nn.decoder import Decoder
from megaspec.parallelism.expert import buffers_of
from megaspec.rules.belonging import is_imported
from megaspec.runtime.build import SplitModel
from megaspec.runtime.evaluation_rank import open_checkpoint
from megaspec.runtime.generate import encode, run_tokenizer
from megaspec.runtime.state import fill, load_buffers, load_weights, tell_passed_over
from megaspec.spec import Spec


@dataclass(frozen=True)
class Language:
    """How text becomes tokens, and which of them end it."""

    tokenizer: Tokenizer
    ends: frozenset[int]
    begins: bool
    """A prompt gets what the tokenizer's file says to put around a text. Not for a model that was trained on data of
    ours: there nothing stands in front of a document."""

    def ids(self, text: str) -> list[int]:
        """Of a prompt; at least one."""
        if self.begins:
            ids = self.tokenizer.encode_prompt(text)
            if ids:
                return ids
        return encode(self.tokenizer, text)


def language_of_run(trained: Spec, run_dir: Path) -> Language:
    """Raises DataError, CheckpointError."""
    tokenizer = run_tokenizer(trained, run_dir)
    kept = kept_companions(run_dir)
    ends = end_ids(kept, str(run_dir))
    if is_imported(trained) and ends:
        return Language(tokenizer, ends, begins=True)
    if tokenizer.eod is not None:
        ends |= {tokenizer.eod}
    return Language(tokenizer, ends, begins=is_imported(trained))


def language_of_folder(folder: Path, *, vocab_size: int) -> Language:
    """Of a folder of Hugging Face's. Raises DataError, CheckpointError."""
    companions = read_companions(folder)
    refuse_other_vocabulary(companions, vocab_size=vocab_size, where=str(folder))
    if not any(name in companions for name in TOKENIZER_NAMES):
        text = f"{folder} holds no tokenizer, which text needs; put one of {', '.join(TOKENIZER_NAMES)} beside the"
        raise DataError(f"{text} weights")
    tokenizer = load_tokenizer(folder)
    ends = end_ids(companions, str(folder))
    if not ends and tokenizer.eod is not None:
        ends = frozenset({tokenizer.eod})
    return Language(tokenizer, ends, begins=True)


def load_run(trained: Spec, split: SplitModel, comm: Comm, *, step: int | None) -> None:
    """This rank's weights of a run's checkpoint. CheckpointError: there is none, or it is damaged."""
    with open_checkpoint(trained, comm, step) as reader:
        if comm.rank == 0:
            tell_passed_over(reader)
        layouts = split.strategies.tensor.layouts
        for chunk in split.chunks:
            parameters = chunk.global_parameters()
            elsewhere = layouts.keys() - parameters.keys()
            load_weights(parameters, layouts, reader, elsewhere=elsewhere)
        load_buffers(split.chunks, reader)


def load_folder(folder: Path, split: SplitModel, comm: Comm) -> None:
    """This rank's slices of a folder of Hugging Face's. CheckpointError, on all ranks: it is damaged."""
    with opened_weights(folder) as weights:
        # one rank may meet NaN in its slices
        together(comm, lambda: _fill_chunks(split.chunks, split, weights))


@contextmanager
def opened_weights(folder: Path) -> Iterator[Weights]:
    """A folder of Hugging Face's under our names."""
    with ExitStack() as stack:
        opened = stack.enter_context(open_hf_folder(folder))
        where = f"{opened.path / CONFIG}"
        model = read_model(opened.config, where)
        family = family_of(opened.config, where)
        yield HfWeights(opened, weight_table(model.facts, family.names(model)))


@torch.no_grad()
def _fill_chunks(chunks: Sequence[Decoder], split: SplitModel, weights: Weights) -> None:
    layouts = split.strategies.tensor.layouts
    for chunk in chunks:
        for name, parameter in chunk.global_parameters().items():
            fill(parameter, layouts[name], f"model/{name}", weights)
    for name, buffer in buffers_of(chunks).items():
        buffer.copy_(weights.read(f"router/{name}"))
