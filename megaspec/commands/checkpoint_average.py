"""`megaspec checkpoint average RUN [RUN ...] --out NEW`: the mean of the weights of several checkpoints."""

import argparse
import math
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megaspec.checkpoint.files import refuse_existing
from megaspec.commands.checkpoint_save import in_words
from megaspec.commands.hf_export import DTYPES
from megaspec.commands.paragraphs import Paragraphs
from megaspec.commands.weights_source import WeightsSource, open_source, write_taken
from megaspec.core.errors import CheckpointError, DataError, RecipeError, printable
from megaspec.core.problems import show
from megaspec.hf.family import comparable, is_of_training
from megaspec.rules.difference import changed
from megaspec.run_folder import SavedRun, read_run, saved_steps

_DESCRIPTION = """Write the mean of the weights of several checkpoints into a new run folder of weights alone.

Of one run: --steps, or --last. Of several runs of one model: the newest good checkpoint of each, or those of --steps
or --last of each. Summed in fp64 and rounded once; memory holds a few rows at a time."""
# How far shares may be from 1 together: they are written with few digits.
_OFF = 1e-6
_MOST_MISFITS = 24
# Chunks that are kept of all checkpoints together, so that many of them take no more memory than few.
_KEPT_CHUNKS = 64
_LEAST_KEPT_CHUNKS = 2


def add_parser(commands: Any) -> None:
    """The parser of `checkpoint average`."""
    text = "write the mean of the weights of several checkpoints, as a run folder of weights alone"
    command = commands.add_parser("average", help=text, description=_DESCRIPTION, formatter_class=Paragraphs)
    command.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="folder of a run; again for more")
    command.add_argument("--out", required=True, metavar="NEW", type=Path, help="run folder to make")
    which = command.add_mutually_exclusive_group()
    which.add_argument("--steps", metavar="N,N,...", help="checkpoints of each run: 100,200,300")
    which.add_argument("--last", type=int, metavar="K", help="the newest K checkpoints of each run")
    text = "share of each checkpoint, in the order of runs and then of steps, as in 0.5,0.25,0.25; together 1 (equal)"
    command.add_argument("--weights", metavar="X,X,...", help=text)
    text = "round the mean to it; without it as it is stored: master weights in fp32"
    command.add_argument("--dtype", choices=DTYPES, help=text)


def run(args: argparse.Namespace) -> int:
    """Write it, and say what it is the mean of. Raises RecipeError, CheckpointError, WriteError; nothing is left then.

    RecipeError: the checkpoints are not of one model, all that differs at once, or the shares are none of a mean.
    """
    # before anything is read
    refuse_existing(args.out)
    chosen = _chosen(args)
    shares = _shares(args.weights, len(chosen))

    from megaspec.checkpoint.streamed import MeanWeights  # torch, only where it is needed
    from megaspec.runtime.build import DTYPES as TORCH_DTYPES

    with ExitStack() as stack:
        sources = []
        for saved, step in chosen:
            source = open_source(saved, step)
            stack.enter_context(source.reader)
            source.reader.kept_chunks = max(_LEAST_KEPT_CHUNKS, _KEPT_CHUNKS // len(chosen))
            sources.append(source)
        _refuse_twice(sources)
        _refuse_other_models(sources)
        taken = [source.taken(share) for source, share in zip(sources, shares, strict=True)]
        readers = [source.reader for source in sources]
        weights = MeanWeights(readers, shares, TORCH_DTYPES.get(args.dtype))
        write_taken(args.out, weights, sources[0].run, taken)
        print(printable(f"{args.out}: the mean of {len(sources)} checkpoints, {in_words(weights)}"))
    for one in taken:
        print(printable(f"{one.weight:g} of step {one.step} of {one.path}"))
    print(printable(f"megaspec train recipe=NAME init.load={args.out} trains from it"))
    return 0


def _chosen(args: argparse.Namespace) -> list[tuple[SavedRun, int | None]]:
    """Which checkpoints of which runs, in order; None: the newest good one. RecipeError, CheckpointError."""
    steps = _numbers("--steps", args.steps)
    if len(set(steps)) < len(steps):
        raise RecipeError(f"--steps {args.steps} names a step twice; name each once, and its share with --weights")
    if args.last is not None and args.last < 1:
        raise RecipeError(f"--last {args.last} must be at least 1")
    chosen: list[tuple[SavedRun, int | None]] = []
    for folder in args.runs:
        saved = read_run(folder, allows_gone=True)
        if steps:
            chosen += [(saved, step) for step in steps]
        elif args.last is not None:
            chosen += [(saved, step) for step in _last(saved, args.last)]
        else:
            chosen.append((saved, None))
    if len(chosen) < 2:
        text = "one checkpoint has no mean; name more with --steps or --last, or more runs"
        raise RecipeError(f"{text}. megaspec checkpoint save keeps the weights of one")
    return chosen


def _last(run: SavedRun, count: int) -> list[int]:
    steps = saved_steps(run)
    if len(steps) < count:
        listed = ", ".join(map(str, steps))
        text = f"--last {count}: {run.folder} has checkpoints of {listed}"
        raise CheckpointError(f"{text}; a run keeps as many as checkpoint.keep says")
    return steps[-count:]


def _numbers(flag: str, text: str | None) -> list[int]:
    """Steps that are written with commas between them. RecipeError."""
    if text is None:
        return []
    words = text.split(",")
    if not all(re.fullmatch(r"[0-9]{1,18}", word) for word in words):
        raise RecipeError(f"{flag} {text} must be whole numbers with commas between them, as in 100,200,300")
    return [int(word) for word in words]


def _shares(text: str | None, count: int) -> list[float]:
    """The share of each checkpoint. RecipeError: not as many as there are, not finite, or together not 1."""
    if text is None:
        return [1 / count] * count
    try:
        shares = [float(word) for word in text.split(",")]
    except ValueError:
        raise RecipeError(f"--weights {text} must be numbers with commas between them, as in 0.5,0.25,0.25") from None
    if not all(math.isfinite(share) for share in shares):
        raise RecipeError(f"--weights {text} must be finite")
    if len(shares) != count:
        raise RecipeError(f"--weights {text} has {len(shares)} shares for {count} checkpoints; give one for each")
    total = math.fsum(shares)
    if abs(total - 1) > _OFF:
        text = f"--weights {text} must be 1 together, they are {total:g}"
        raise RecipeError(f"{text}; divide each by {total:g}" if total else text)
    return shares


def _refuse_twice(sources: Sequence[WeightsSource]) -> None:
    """RecipeError: a checkpoint would count twice without a word."""
    counted = Counter(source.reader.manifest.digest for source in sources)
    for source in sources:
        if counted[source.reader.manifest.digest] > 1:
            text = f"step {source.reader.step} of {source.run.folder} is named more than once"
            raise RecipeError(f"{text}; name it once, and its share with --weights")


def _refuse_other_models(sources: Sequence[WeightsSource]) -> None:
    """RecipeError: everything in which checkpoints are of another model than the first."""
    first = sources[0]
    tokenizers = {source.run.folder: _tokenizer(source.run) for source in sources}
    problems: dict[str, None] = {}
    for other in sources[1:]:
        problems |= dict.fromkeys(_model_differences(first.run, other.run))
        problems |= dict.fromkeys(_tensor_differences(first, other))
        here = tokenizers[first.run.folder]
        there = tokenizers[other.run.folder]
        if here and there and here != there:
            text = f"{other.run.folder}: its tokenizer is {there}, that of {first.run.folder} is {here}"
            problems[f"{text}: a token means something else there"] = None
    if problems:
        listed = list(problems)
        if len(listed) > _MOST_MISFITS:
            listed = [*listed[:_MOST_MISFITS], f"and {len(listed) - _MOST_MISFITS} more"]
        text = "the mean is taken of checkpoints of one model; these differ, so leave out what is of another"
        raise RecipeError([text, *listed])


def _model_differences(one: SavedRun, other: SavedRun) -> list[str]:
    """In what two runs have other models, a line each. What only their training reads may differ."""
    mine, theirs = comparable(one.spec.model, other.spec.model)
    found = []
    for key, here, there in changed(mine, theirs):
        if not is_of_training(key):
            found.append(f"{other.folder}: model.{key}={show(there)}, in {one.folder} {show(here)}")
    return found


def _tensor_differences(one: WeightsSource, other: WeightsSource) -> list[str]:
    """Weights that one of two checkpoints has not, or in another shape, a line each."""
    from megaspec.checkpoint.streamed import WeightsOf

    mine = WeightsOf(one.reader)
    theirs = WeightsOf(other.reader)
    found = []
    for name in sorted({*mine.names(), *theirs.names()}):
        if name not in theirs:
            found.append(f"{theirs.path}: holds no {name}, {mine.path} does")
        elif name not in mine:
            found.append(f"{theirs.path}: holds {name}, {mine.path} does not")
        elif mine.shape(name) != theirs.shape(name):
            shapes = f"{list(theirs.shape(name))}, in {mine.path} {list(mine.shape(name))}"
            found.append(f"{theirs.path}: {name} has shape {shapes}")
    return found


def _tokenizer(run: SavedRun) -> str:
    """The hash of the tokenizer that a run's tokens are of; "" where nothing that is still there says."""
    from megaspec.runtime.generate import run_tokenizer

    try:
        tokenizer = run_tokenizer(run.spec, run.folder)
    except DataError:
        # data of no text, or they are elsewhere by now: the model's vocab_size is what can be compared
        return ""
    return f"sha256 {tokenizer.sha256[:12]}"
