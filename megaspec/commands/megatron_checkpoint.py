"""`megaspec from-megatron --checkpoint FOLDER --out RUN`: a run folder with the weights of a Megatron checkpoint."""

import argparse
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from megaspec.checkpoint.files import refuse_existing
from megaspec.checkpoint.format import DTYPE_BYTES
from megaspec.compose.compose import Composed, compose_dicts
from megaspec.core.errors import Problem, RecipeError, printable
from megaspec.core.units import count_in_words
from megaspec.estimate.target import detect_target
from megaspec.megatron.checkpoint_names import megatron_table
from megaspec.megatron.command import read_command
from megaspec.megatron.open_checkpoint import checkpoint_folder, open_checkpoint
from megaspec.megatron.opened import OpenedCheckpoint
from megaspec.megatron.rank_files import RankFiles
from megaspec.megatron.saved_args import saved_model
from megaspec.megatron.whole_tensors import WholeTensor
from megaspec.resolve.gather import gather_facts, with_digest
from megaspec.resolve.resolver import resolve

_SEQ_LEN = 2048
_PRECISIONS = {"F64": "fp64", "F32": "fp32", "BF16": "bf16", "F16": "fp16"}


def run(args: argparse.Namespace) -> int:
    """Import, and say what came of it. Raises CheckpointError, RecipeError, WriteError; nothing is left then."""
    # torch, only where it is needed
    from megaspec.megatron.weights import MegatronWeights
    from megaspec.weights_run import write_weights_run

    if args.out is None:
        raise RecipeError("--checkpoint makes a run folder; give --out RUN, such as runs/start")
    if args.gpus is not None:
        raise RecipeError("--gpus says nothing with --checkpoint: weights fit any layout; leave it out")
    refuse_existing(args.out)
    given = read_command(args.flags) if args.flags else None
    path, iteration = checkpoint_folder(args.checkpoint)
    with RankFiles(path) as files:
        opened = open_checkpoint(files, iteration)
        saved = saved_model(opened.args, given)
        if saved.lost and not args.partial:
            way_out = "give --partial for a model without these, which computes something else"
            raise RecipeError([*saved.lost, Problem("", way_out, "", "megatron-lost")])
        target = detect_target()
        composed = _composed(args, opened, saved.section)
        facts = replace(with_digest(gather_facts(composed.recipe)), run_dir=str(args.out))
        spec = resolve(composed.recipe, target, facts, composed.origins)
        table = megatron_table(spec.model)
        weights = MegatronWeights(files, opened, table, padded_vocab=saved.padded_vocab)
        write_weights_run(args.out, weights, recipe=composed.recipe, target=target, spec=spec, companions={})
        n_parameters = sum(prod(weights.shape(name)) for name in weights.names())
    of = f"a {opened.format} checkpoint of iteration {opened.iteration:,}"
    print(printable(f"{args.out}: {of}, {count_in_words(n_parameters)} parameters"))
    for because, count in opened.left_out.items():
        print(printable(f"left out: {count} entries, {because}"))
    padding = (saved.padded_vocab or spec.model.vocab_size) - spec.model.vocab_size
    if padding:
        print(printable(f"left out: {padding} rows of padding behind a vocabulary of {spec.model.vocab_size}"))
    for note in saved.notes:
        print(printable(f"note: {note}"))
    for problem in saved.lost:
        print(printable(f"lost: {problem}"))
    print(printable("beside it: no tokenizer, since Megatron's checkpoints have none that is read"))
    print(printable(f"megaspec train recipe=NAME init.load={args.out} trains from it"))
    return 0


def _main_dtype(tensors: Iterable[WholeTensor]) -> str:
    """The format of most of the bytes."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.dtype] += prod(tensor.shape) * DTYPE_BYTES.get(tensor.dtype, 1)
    return sizes.most_common(1)[0][0] if sizes else "F32"


def _composed(args: argparse.Namespace, opened: OpenedCheckpoint, section: Mapping[str, Any]) -> Composed:
    """The recipe of a run that is never trained: the checkpoint's model, and what every run has to say."""
    model = dict(section)
    vocab_size = model["vocab_size"]
    return compose_dicts(
        {
            "name": args.name or args.out.name,
            "model": model,
            "precision": {"kind": _PRECISIONS.get(_main_dtype(opened.tensors.values()), "fp32")},
            "data": {
                "kind": "random",
                "vocab_size": vocab_size,
                "seq_len": min(model["max_seq_len"], _SEQ_LEN),
            },
            "train": {"steps": 1, "global_batch": 1},
            "launcher": {"ranks": 1},
            "about": {
                "purpose": "Holds imported weights, and is never trained: data and optimizer are the defaults.",
                "source": f"Megatron-LM checkpoint {args.checkpoint}, iteration {opened.iteration}",
            },
        }
    )
