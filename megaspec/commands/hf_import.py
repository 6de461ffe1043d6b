"""`megaspec hf import FOLDER --out RUN`: a run folder with the weights of a folder of Hugging Face's."""

import argparse
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from megaspec.checkpoint.files import refuse_existing
from megaspec.checkpoint.format import DTYPE_BYTES
from megaspec.compose.compose import Composed, compose_dicts
from megaspec.core.errors import printable
from megaspec.core.units import count_in_words
from megaspec.estimate.target import detect_target
from megaspec.hf.companions import read_companions, refuse_other_vocabulary
from megaspec.hf.fits import DEQUANTISED, Stored
from megaspec.hf.folder import CONFIG, open_hf_folder
from megaspec.hf.hub import described, local_folder
from megaspec.hf.names import weight_table
from megaspec.hf.short import short_section
from megaspec.hf.table import family_of, read_model
from megaspec.model.decoder.spec import DecoderSpec
from megaspec.resolve.gather import gather_facts, with_digest
from megaspec.resolve.resolver import resolve

_SEQ_LEN = 2048
_PRECISIONS = {"F64": "fp64", "F32": "fp32", "BF16": "bf16", "F16": "fp16"}


def add_parser(commands: Any) -> None:
    """The parser of `hf import`."""
    text = "make a run folder of a Hugging Face folder: weights, tokenizer and a Spec"
    command = commands.add_parser("import", help=text, description=text, allow_abbrev=False)
    command.add_argument(
        "folder", metavar="FOLDER", help="folder with config.json and safetensors files, or ORG/NAME on the hub"
    )
    command.add_argument(
        "--out", required=True, metavar="RUN", type=Path, help="run folder to make, such as runs/start"
    )
    command.add_argument("--revision", metavar="REV", help="branch, tag or commit on the hub (default: main)")


def run(args: argparse.Namespace) -> int:
    """Import, and say what came of it. Raises CheckpointError, RecipeError, WriteError; nothing is left then."""
    # before anything is downloaded
    refuse_existing(args.out)
    given = local_folder(args.folder, revision=args.revision, with_weights=True)
    with open_hf_folder(given) as folder:
        model = read_model(folder.config, f"{folder.path / CONFIG}")
        family = family_of(folder.config, f"{folder.path / CONFIG}")
        table = weight_table(model.facts, family.names(model))

        # torch, only where it is needed: what is wrong with a name or a configuration is told at once
        from megaspec.hf.weights import HfWeights
        from megaspec.weights_run import write_weights_run

        weights = HfWeights(folder, table)
        left_out = Counter(because for name in folder.tensors if (because := table.why_ignored(name)))
        companions = read_companions(folder.path)
        refuse_other_vocabulary(companions, vocab_size=model.vocab_size, where=str(folder.path))
        target = detect_target()
        composed = _composed(given, described(args.folder, given), args.out, weights.tensors.values(), model)
        facts = replace(with_digest(gather_facts(composed.recipe)), run_dir=str(args.out))
        spec = resolve(composed.recipe, target, facts, composed.origins)
        write_weights_run(args.out, weights, recipe=composed.recipe, target=target, spec=spec, companions=companions)
    n_parameters = sum(prod(weights.shape(name)) for name in weights.names())
    kept = [name for name in companions if name != CONFIG]
    print(printable(f"{args.out}: a {family.model_type} of {count_in_words(n_parameters)} parameters"))
    forms = Counter(stored.form for stored in weights.tensors.values() if stored.form != "plain")
    for form, count in forms.items():
        print(printable(f"dequantised: {count} tensors in {form}, now in {_PRECISIONS[DEQUANTISED]}"))
    for because, count in left_out.items():
        print(printable(f"left out: {count} tensors, {because}"))
    print(printable(f"beside it: {', '.join(kept) or 'no tokenizer, since the folder has none'}"))
    print(printable(f"megaspec train recipe=NAME init.load={args.out} trains from it"))
    return 0


def _composed(given: Path, source: str, out: Path, tensors: Iterable[Stored], model: DecoderSpec) -> Composed:
    """The recipe of a run that is never trained: the folder's model, and what every run has to say."""
    sizes: Counter[str] = Counter()
    for stored in tensors:
        sizes[stored.dtype] += prod(stored.shape) * DTYPE_BYTES[stored.dtype]
    main_dtype = sizes.most_common(1)[0][0]
    return compose_dicts(
        {
            "name": out.name,
            "model": short_section(model),
            "precision": {"kind": _PRECISIONS[main_dtype]},
            "data": {
                "kind": "random",
                "vocab_size": model.vocab_size,
                "seq_len": min(model.max_seq_len, _SEQ_LEN),
            },
            "train": {"steps": 1, "global_batch": 1},
            "launcher": {"ranks": 1},
            "init": {"from_hf": str(given)},
            "about": {
                "purpose": "Holds imported weights, and is never trained: data and optimizer are the defaults.",
                "source": source,
            },
        }
    )
