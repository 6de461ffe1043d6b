"""`megaspec hf export RUN FOLDER`: a checkpoint of a run as a folder of Hugging Face's."""

import argparse
import re
from pathlib import Path
from typing import Any

from megaspec.core.errors import CheckpointError, RecipeError, printable
from megaspec.core.problems import did_you_mean, one_of
from megaspec.data.spec import IndexedSpec
from megaspec.hf.companions import (
    GENERATION,
    TOKENIZER,
    TOKENIZER_CONFIG,
    generation_config,
    kept_companions,
    plain_tokenizer_config,
    token_ids,
    with_template_in_both_places,
)
from megaspec.hf.family import Family, objections
from megaspec.hf.folder import CONFIG
from megaspec.hf.names import weight_table
from megaspec.hf.table import FAMILIES
from megaspec.rules.belonging import other_place
from megaspec.run_folder import own_checkpoint, read_run
from megaspec.spec import Spec

DTYPES = ("bf16", "fp16", "fp32", "fp64")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def add_parser(commands: Any) -> None:
    """The parser of `hf export`."""
    text = "write a checkpoint as a Hugging Face folder, in which each tensor lies as the family's models have it"
    command = commands.add_parser("export", help=text, description=text, allow_abbrev=False)
    command.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    command.add_argument("folder", metavar="FOLDER", type=Path, help="folder to make")
    command.add_argument("--step", type=int, metavar="N", help="checkpoint; without it the newest good one")
    text = "round weights to it; without it each stays as it is stored: master weights in fp32"
    command.add_argument("--dtype", choices=DTYPES, help=text)
    command.add_argument("--shard-size", default="5GB", metavar="SIZE", help="largest file, in KB, MB or GB (5GB)")
    text = "model type to write, of those that can say this model; see megaspec hf families"
    command.add_argument("--family", metavar="NAME", help=text)


def run(args: argparse.Namespace) -> int:
    """Export, and say what was written. Raises RecipeError, CheckpointError, WriteError; nothing is left then."""
    shard_bytes = _shard_bytes(args.shard_size)
    spec = read_run(args.run, allows_gone=True).spec
    family = choose_family(spec, args.family)
    companions = companions_of(args.run, spec)
    ids = token_ids(companions) or _ids_of_data(spec)
    if GENERATION not in companions:
        companions[GENERATION] = generation_config(ids)
    # the config.json that the weights once came with: written anew
    companions.pop(CONFIG, None)

    from megaspec.hf.writing import main_dtype, out_tensors, write_folder  # torch, only where it is needed
    from megaspec.runtime.build import DTYPES as TORCH_DTYPES

    table = weight_table(spec.model.facts, family.names(spec.model))
    dtype = None if args.dtype is None else TORCH_DTYPES[args.dtype]
    with open_checkpoint(args.run, spec, args.step) as reader:
        missing = [name for name in table.ours if name not in reader]
        if missing:
            raise CheckpointError(f"{reader.path}: holds no {missing[0]} and {len(missing) - 1} more of this model")
        tensors = out_tensors(table, reader, dtype)
        main = str(main_dtype(tensors)).removeprefix("torch.")
        config = {
            "architectures": [family.architecture],
            "model_type": family.model_type,
            **family.write(spec.model),
            **ids,
            "torch_dtype": main,
            "use_cache": True,
        }
        n_bytes = write_folder(args.folder, reader, tensors, config=config, others=companions, shard_bytes=shard_bytes)
        step = reader.step
    named = f"step {step} of {args.run} as {family.model_type}"
    print(printable(f"{args.folder}: {named}, {len(tensors)} tensors in {main}, {n_bytes:,} bytes"))
    print(printable(f"beside them: {', '.join(sorted(companions))}"))
    if TOKENIZER not in companions:
        print(printable(f"no tokenizer: {_why_no_tokenizer(spec)}"))
    return 0


def open_checkpoint(run_dir: Path, spec: Spec, step: int | None) -> Any:
    """A Reader of a run's checkpoint, verified in every byte, which moves nothing. CheckpointError: there is none."""
    from megaspec.checkpoint.comm import SoloComm
    from megaspec.checkpoint.opening import open_saved
    from megaspec.runtime.state import tell_passed_over

    reader = open_saved(run_dir, other_place(spec), SoloComm(), step=step, inspect=own_checkpoint(spec))
    tell_passed_over(reader)
    return reader


def choose_family(spec: Spec, asked: str | None) -> Family:
    """The family that is asked for, else the one that the run began with, else the first that can say the model.

    RecipeError: there is none of that name, or it can't say the model: why, key by key.
    """
    if asked is not None:
        if asked not in FAMILIES:
            hint = did_you_mean(asked, FAMILIES) or f"there are {', '.join(FAMILIES)}"
            raise RecipeError(f"--family {asked} is no model type that can be said; {hint}")
        why = objections(FAMILIES[asked], spec.model)
        if why:
            others = [name for name, family in FAMILIES.items() if not objections(family, spec.model)]
            way_out = f"--family {one_of(others)} can" if others else "no other family can"
            raise RecipeError(f"--family {asked} can't say this model: {'; '.join(why[:4])}; {way_out}")
        return FAMILIES[asked]
    order = list(FAMILIES)
    began = None if spec.weights_from is None else spec.weights_from.family
    if began in FAMILIES:
        order = [began, *(name for name in order if name != began)]
    problems = []
    for name in order:
        why = objections(FAMILIES[name], spec.model)
        if not why:
            return FAMILIES[name]
        problems.append(f"{name}: {'; '.join(why[:4])}")
    raise RecipeError(["no family of Hugging Face's can say this model:", *problems])


def companions_of(run_dir: Path, spec: Spec) -> dict[str, bytes]:
    """Tokenizer files and what belongs to them: those that the run keeps, else the tokenizer of its data."""
    kept = kept_companions(run_dir)
    if TOKENIZER in kept or not isinstance(spec.data, IndexedSpec):
        return with_template_in_both_places(kept)
    from megaspec.data.provenance import tokenizer_of_data
    from megaspec.data.tokenizer import FileTokenizer

    tokenizer = tokenizer_of_data(spec.data, spec.remote)
    if isinstance(tokenizer, FileTokenizer):
        kept[TOKENIZER] = tokenizer.text
        kept[TOKENIZER_CONFIG] = plain_tokenizer_config(
            tokenizer.text, eod=tokenizer.eod, max_seq_len=spec.model.max_seq_len
        )
    return kept


def _ids_of_data(spec: Spec) -> dict[str, Any]:
    """The token that ends a document in a run's data, which also begins the next one."""
    if not isinstance(spec.data, IndexedSpec):
        # said, since transformers otherwise takes numbers of its own
        return {"bos_token_id": None, "eos_token_id": None}
    from megaspec.data.provenance import tokenizer_of_data

    eod = tokenizer_of_data(spec.data, spec.remote).eod
    return {"bos_token_id": eod, "eos_token_id": eod}


def _why_no_tokenizer(spec: Spec) -> str:
    if isinstance(spec.data, IndexedSpec):
        return "the data were made of bytes, which no tokenizer.json says"
    return f"data.kind={spec.data.kind} has none, and the run began without one"


def _shard_bytes(text: str) -> int:
    """`5GB` in bytes. RecipeError."""
    match = re.fullmatch(r"([1-9][0-9]{0,11})(KB|MB|GB)", text)
    if not match:
        raise RecipeError(f"--shard-size {text} must be a number and KB, MB or GB, as in 5GB")
    return int(match[1]) * _UNITS[match[2]]
