"""`megaspec hf verify RUN FOLDER`: is every tensor of a folder the run's, to the bit, and are the logits the same?"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megaspec.commands.hf_export import open_checkpoint
from megaspec.core.errors import MegaspecError, RecipeError, printable
from megaspec.core.units import GIB
from megaspec.estimate.cpu_memory import available_memory
from megaspec.estimate.parameters import count_parameters
from megaspec.hf.companions import TOKENIZER, kept_companions
from megaspec.hf.family import Family
from megaspec.hf.folder import CONFIG, HfFolder, first_of, open_hf_folder
from megaspec.hf.names import WeightTable, weight_table
from megaspec.hf.table import family_of, read_model
from megaspec.run_folder import read_run
from megaspec.spec import Spec

NOT_EQUAL = MegaspecError.exit_code
_TEXT = "The quick brown fox jumps over the lazy dog; 3 of 12 pangrams, naturally, are about foxes.\n"


def add_parser(commands: Any) -> None:
    """The parser of `hf verify`."""
    text = "compare a run's checkpoint with a Hugging Face folder: tensors to the bit, logits with transformers"
    command = commands.add_parser("verify", help=text, description=text, allow_abbrev=False)
    command.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    command.add_argument("folder", metavar="FOLDER", type=Path, help="what it was imported from or exported to")
    command.add_argument("--step", type=int, metavar="N", help="checkpoint; without it the newest good one")
    text = "tensors alone: logits take both models' memory in fp32"
    command.add_argument("--tensors-only", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Print what is equal and what is not. -> 0, or 70 where something is not. Raises CheckpointError, RecipeError."""
    from megaspec.hf.weights import HfWeights  # torch, only where it is needed
    from megaspec.verify.hf_folder import compare_tensors, model_differences

    spec = read_run(args.run, allows_gone=True).spec
    if not args.tensors_only:
        _refuse_too_little_memory(spec)
    with open_hf_folder(args.folder) as folder, open_checkpoint(args.run, spec, args.step) as reader:
        model = read_model(folder.config, f"{folder.path / CONFIG}")
        family = family_of(folder.config, f"{folder.path / CONFIG}")
        table = weight_table(model.facts, family.names(model))
        other_model = model_differences(spec.model, model)
        found = compare_tensors(reader, folder, table)
        print(printable(f"step {reader.step} of {args.run} and {args.folder} ({family.model_type})"))
        rounded = f", the run's rounded to {' and '.join(sorted(found.rounded))}" if found.rounded else ""
        print(printable(f"tensors: {found.n_equal} of {found.n_tensors} are equal to the bit{rounded}"))
        worst = sorted(found.off.items(), key=lambda one: -one[1])
        for line in first_of([f"{name}: the largest difference is {off:.3e}" for name, off in worst]):
            print(printable(line))
        for line in first_of([*other_model, *found.problems]):
            print(printable(line))
        if other_model or found.problems:
            return NOT_EQUAL
        weights = reader
        if found.rounded and found.is_equal:
            # the folder's, which are the run's rounded, under the run's names: else rounding would be all that shows
            weights = HfWeights(folder, table)
        is_close = args.tensors_only or _logits_are_close(args, spec, weights, partial(_theirs, folder, family, table))
    return 0 if found.is_equal and is_close else NOT_EQUAL


def _refuse_too_little_memory(spec: Spec) -> None:
    """RecipeError: the system would end the process in the middle, without a word."""
    from megaspec.verify.hf_folder import has_transformers

    need = 4 * count_parameters(spec.model).total
    free = available_memory()
    if has_transformers() and need > free:
        text = f"the logits of this model take {need / GIB:.1f} GiB of memory in fp32, {free / GIB:.1f} GiB are free"
        raise RecipeError(f"{text}; compare tensors alone with --tensors-only, or take a machine with more")


def _theirs(folder: HfFolder, family: Family, table: WeightTable) -> Any:
    """What transformers is given: the folder, and its tensors where they are quantised."""
    from megaspec.verify.hf_folder import TheirModel, dequantised_tensors

    return TheirModel(folder.path, family.architecture, dequantised_tensors(folder, table))


def _logits_are_close(args: argparse.Namespace, spec: Spec, weights: Any, theirs: Callable[[], Any]) -> bool:
    """Prints how far logits lie apart, where transformers is installed. `theirs`: makes a TheirModel."""
    from megaspec.verify.hf_folder import compare_logits, fixed_tokens, has_transformers

    if not has_transformers():
        print("logits: not compared, since transformers is not installed")
        return True
    tokens = fixed_tokens(spec.model.vocab_size, spec.model.max_seq_len)
    what = "tokens of no text"
    if TOKENIZER in kept_companions(args.run):
        from megaspec.runtime.generate import encode, run_tokenizer

        tokens = encode(run_tokenizer(spec, args.run), _TEXT)[: spec.model.max_seq_len]
        what = "tokens of a text"
    logits = compare_logits(spec, weights, theirs(), tokens)
    numbers = f"the largest difference is {logits.difference:.1e} of logits up to {logits.largest:.1f}"
    print(printable(f"logits of {logits.n_tokens} {what}, with transformers in fp32: {numbers}, KL {logits.kl:.1e}"))
    return logits.is_close
