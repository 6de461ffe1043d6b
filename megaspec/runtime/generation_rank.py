"""What ranks run for `megaspec generate`: the weights of a run or of a Hugging Face folder on any layout, and texts.

FOLDER/spec.json      the model on its ranks
FOLDER/trained.json   the run as it is trained, whose own the checkpoint has to be; not there for a folder
FOLDER/request.json   what is to be written, see Request
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from megaspec.checkpoint.comm import Comm, DistComm, SoloComm
from megaspec.core.errors import MemoryRunOut, WriteError
from megaspec.core.frozen import Fraction, Frozen, NonNegativeCount, NonNegativeFloat, PositiveCount, PositiveInt
from megaspec.launcher.rendezvous import Rendezvous
from megaspec.launcher.stop import stop_requested
from megaspec.plugins import load
from megaspec.runtime.build import SplitModel, build_split_model, mesh_of
from megaspec.runtime.draw import Draw, Sampling
from megaspec.runtime.generate import Limits, Prompt, generate, longest_text, refuse_long
from megaspec.runtime.out_of_memory import is_out_of_memory
from megaspec.runtime.position import Position
from megaspec.runtime.rank import RankInfo, bounded, exit_code_of, join_world, leave_world, pick_device, read_spec
from megaspec.runtime.text_output import AsLines, OnTerminal, Output, open_lines
from megaspec.runtime.text_passes import ModelOnRanks, Passes, cached_passes, whole_passes
from megaspec.runtime.text_source import Language, language_of_folder, language_of_run, load_folder, load_run
from megaspec.spec import Spec

TRAINED = "trained.json"
REQUEST = "request.json"


class Request(Frozen):
    """What is to be written, as plain data."""

    source: str
    """The run's folder, or one of Hugging Face's."""
    step: int | None
    """Of the run's checkpoint; None: the newest good one."""
    prompts: tuple[dict[str, Any], ...]
    """Each with its text under `prompt`, and what else its line holds."""
    tokens: NonNegativeCount
    """At most so many are written of each text."""
    temperature: NonNegativeFloat
    top_k: PositiveInt | None
    top_p: Annotated[Fraction, Field(gt=0)] | None
    min_p: Annotated[Fraction, Field(gt=0)] | None
    """See Sampling."""
    seed: NonNegativeCount
    samples: PositiveCount
    """Texts of each prompt."""
    stops: tuple[str, ...]
    """Texts that end one."""
    ignore_eos: bool
    """Tokens that end a text are written as any other."""
    batch: PositiveCount
    """Texts that are written at a time."""
    cache: Literal["keys", "none"]
    """none: each token takes a forward pass of the whole text."""
    output: Literal["terminal", "json"]
    out: str | None
    """The file that JSON lines go to; None: the terminal."""

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.seed)


def main(
    run_dir: str,
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    attempt: int,
    store: Rendezvous,
    timeout_seconds: float,
    plugins: Sequence[str] = (),
) -> int:
    """Writes what the folder `run_dir` asks for. -> exit code (core/errors.py)."""
    me = RankInfo(rank, world_size, local_rank, attempt, store, timeout_seconds)

    def write() -> None:
        load(plugins)
        # a terminal that can't show a letter shows a question mark
        sys.stdout.reconfigure(errors="replace")
        with ExitStack() as stack:
            device = pick_device(read_spec(Path(run_dir)), local_rank)
            join_world(me, device)
            stack.push(leave_world)
            write_texts(Path(run_dir), me, DistComm(device=device))

    return exit_code_of(me, write)


def write_alone(folder: Path) -> None:
    """Writes what a folder asks for that needs one rank, in this process. Raises as `write_texts` does."""
    nowhere = RankInfo(rank=0, world_size=1, local_rank=0, attempt=0, store=None, timeout_seconds=0.0)
    write_texts(folder, nowhere, SoloComm())


def write_texts(folder: Path, me: RankInfo, comm: Comm) -> None:
    """Builds, loads and writes; rank 0 tells. Raises CheckpointError, DataError, NonFiniteError, Preempted, WriteError,
    and UsageError for a part that keeps no keys and values."""
    spec = read_spec(folder)
    request = Request.model_validate_json((folder / REQUEST).read_bytes())
    device = pick_device(spec, me.local_rank)
    with ExitStack() as stack:
        position = Position(device)
        stack.enter_context(bounded(position, me))
        mesh = mesh_of(spec, rank=me.rank, device=device, timeout=timedelta(seconds=me.timeout_seconds or 600.0))
        language = _language(folder, request, spec)
        texts = _texts(request)
        prompts = []
        for number, text in enumerate(texts):
            prompts.append(Prompt(language.ids(text["prompt"]), sample=number % request.samples))
        limits = _limits(request, spec, language)
        # before weights are read
        refuse_long(prompts, limits)
        split = build_split_model(spec, mesh=mesh)
        _load(folder, request, split, comm)
        for chunk in split.chunks:
            chunk.eval()
            position.watch(chunk)
        model = ModelOnRanks.of_weights(spec, mesh, split)
        rows = min(request.batch, len(prompts))
        passes: Passes
        draw = Draw(request.sampling)
        if request.cache == "keys":
            length = longest_text(prompts, limits)
            passes = stack.enter_context(cached_passes(model, draw, rows=rows, length=length, stops=stop_requested))
        else:
            passes = stack.enter_context(whole_passes(model, draw, stops=stop_requested))
        with _output(request, texts, prompts, spec, is_first=me.rank == 0) as output, _memory_told(request):
            generate(
                passes,
                prompts,
                tokenizer=language.tokenizer,
                limits=limits,
                rows=rows,
                seed=request.seed,
                on_piece=output.piece,
                on_done=output.done,
            )


@contextmanager
def _memory_told(request: Request) -> Iterator[None]:
    """Raises MemoryRunOut in place of torch's or NCCL's error."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        text = f"memory ran out with --batch {request.batch} texts at a time: {str(error).splitlines()[0]}"
        raise MemoryRunOut(f"{text}; take a smaller --batch, or divide the model with parallelism.tp=2") from error


def _texts(request: Request) -> list[dict[str, Any]]:
    """One line for each text: prompts, each as often as there are samples of it."""
    texts = []
    for line in request.prompts:
        for sample in range(request.samples):
            text = dict(line)
            if request.samples > 1:
                text["sample"] = sample
            texts.append(text)
    return texts


def _limits(request: Request, spec: Spec, language: Language) -> Limits:
    ends = frozenset() if request.ignore_eos else language.ends
    return Limits(request.tokens, spec.model.max_seq_len, ends, request.stops)


def _language(folder: Path, request: Request, spec: Spec) -> Language:
    if (folder / TRAINED).exists():
        return language_of_run(_trained(folder), Path(request.source))
    return language_of_folder(Path(request.source), vocab_size=spec.model.vocab_size)


def _trained(folder: Path) -> Spec:
    return Spec.model_validate_json((folder / TRAINED).read_bytes())


def _load(folder: Path, request: Request, split: SplitModel, comm: Comm) -> None:
    if (folder / TRAINED).exists():
        load_run(_trained(folder), split, comm, step=request.step)
    else:
        load_folder(Path(request.source), split, comm)


class _Silent:
    """The output of the other ranks."""

    def piece(self, number: int, text: str) -> None:
        """Rank 0 tells."""

    def done(self, written: object) -> None:
        """Rank 0 tells."""


@contextmanager
def _output(
    request: Request, texts: Sequence[dict[str, Any]], prompts: Sequence[Prompt], spec: Spec, *, is_first: bool
) -> Iterator[Output]:
    if not is_first:
        yield _Silent()
    elif request.output == "terminal":
        yield OnTerminal([text["prompt"] for text in texts], max_seq_len=spec.model.max_seq_len)
    elif request.out is None:
        yield AsLines(texts, [len(prompt.ids) for prompt in prompts], sys.stdout)
    else:
        with open_lines(Path(request.out)) as file:
            try:
                yield AsLines(texts, [len(prompt.ids) for prompt in prompts], file)
            except OSError as error:
                raise WriteError(f"{request.out} can't be written: {error.strerror}") from error
