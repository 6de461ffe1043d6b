"""`megaspec generate RUN TEXT ...`: what a checkpoint of a run, or a folder of Hugging Face's, writes after texts."""

import argparse
import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from megaspec.commands.planned import refuse_jobs
from megaspec.commands.prompts import prompts_of
from megaspec.compose.compose import compose_dicts, recompose
from megaspec.compose.words import refuse_two_answers
from megaspec.core.axes import fewest_gpus, world_size
from megaspec.core.errors import COMMAND_LINE, Problem, RecipeError
from megaspec.core.frozen import AUTO
from megaspec.core.problems import one_of
from megaspec.estimate.target import Target, detect_target
from megaspec.hf.folder import CONFIG, open_hf_folder
from megaspec.hf.names import weight_table
from megaspec.hf.short import short_section
from megaspec.hf.table import family_of, read_model
from megaspec.model.spec import TransformerSpec
from megaspec.parallelism.spec import ParallelismSpec
from megaspec.plugins import loaded
from megaspec.precision.spec import fp8_recipe, model_format
from megaspec.recipe import Recipe
from megaspec.resolve.gather import gather_facts
from megaspec.resolve.resolver import resolve
from megaspec.rules.unbuilt import unbuilt_problems
from megaspec.run_folder import read_run, refuse_no_checkpoint
from megaspec.spec import Spec
from megaspec_launchers.local import launch

HF = "hf:"
_ENTRY = "megaspec.runtime.generation_rank:main"
_PRECISIONS = {"F64": "fp64", "F32": "fp32", "BF16": "bf16", "F16": "fp16"}
_MAY_BE_SET = ("parallelism", "kernels", "precision", "launcher")
"""Sections of a recipe."""
_SETTING = re.compile(rf"[~+]*({'|'.join(_MAY_BE_SET)}|[a-z_]+(?=[.]))([.]\w+)*=")
"""What among the words is a setting and no text: `path=value` with a dot in the path, or such a section alone."""
_SEQ_LEN = 2048
_SEQUENCES = 64
"""Of a rank, in the recipe that is resolved: as many as any pipeline needs."""
_LEAST = {"tokens": 0, "seed": 0, "samples": 1, "batch": 1, "top_k": 1, "gpus": 1, "step": 0}
_NOT_HERE: dict[str, tuple[object, str]] = {
    "cp": (1, "divides a text among ranks, none of which could keep its keys; use parallelism.tp or pp"),
    "dp_strategy": ("replicate", "shares out what only training has; divide the model with parallelism.tp, pp or ep"),
}
"""Keys of parallelism that make no sense here: what they have to be, and why."""

_DESCRIPTION = """Write text with the newest good checkpoint of a run, or with the weights in a folder of Hugging Face's
(hf:FOLDER). Several texts are written at a time, each as if it were alone."""


def add_parser(commands: Any) -> None:
    """The parser of `generate`."""
    command = commands.add_parser(
        "generate",
        help="write text with a run's checkpoint, or hf:FOLDER",
        description=_DESCRIPTION,
        allow_abbrev=False,
    )
    command.add_argument("run", metavar="RUN", help="folder of the run, or hf:FOLDER")
    text = "what to go on from, one or several; parallelism.tp=2 and the like choose a layout"
    command.add_argument("words", nargs="*", default=[], metavar="TEXT", help=text)
    text = "more prompts: .jsonl, an object with `prompt` a line, or .txt, a text a line; may be given again"
    command.add_argument("--prompts", action="append", default=[], metavar="FILE", help=text)
    command.add_argument("--tokens", type=int, default=64, metavar="N", help="how many tokens to write at most (64)")
    command.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0 takes the likeliest (0.8)")
    command.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    text = "draw from the likeliest tokens whose probabilities sum to P"
    command.add_argument("--top-p", type=float, metavar="P", help=text)
    text = "draw from the tokens at least P times as likely as the likeliest"
    command.add_argument("--min-p", type=float, metavar="P", help=text)
    command.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (0)")
    command.add_argument("--samples", type=int, default=1, metavar="N", help="texts of each prompt (1)")
    text = "a text that ends what is written, and is no part of it; may be given again"
    command.add_argument("--stop", action="append", default=[], metavar="TEXT", help=text)
    command.add_argument("--ignore-eos", action="store_true", help="go on behind tokens that end a text")
    command.add_argument("--batch", type=int, default=16, metavar="N", help="texts that are written at a time (16)")
    text = "keys: keep keys and values (the default); none: a forward pass of the whole text for each token"
    command.add_argument("--cache", choices=("keys", "none"), default="keys", help=text)
    command.add_argument("--step", type=int, metavar="N", help="step of the checkpoint (the newest good one)")
    text = "ranks (as many as the layout needs at least); more of them share the texts"
    command.add_argument("--gpus", type=int, metavar="N", help=text)
    command.add_argument("--json", action="store_true", help="print a JSON object a line for each text")
    command.add_argument("--out", type=Path, metavar="FILE", help="write these lines into a new file")
    command.add_argument("--config-dir", action="append", default=[], metavar="DIR", help="more groups")


def run(args: argparse.Namespace) -> int:
    """Resolve a layout for this machine, start ranks where it has several, and print what they write."""
    _refuse_arguments(args)
    settings = [word for word in args.words if _SETTING.match(word)]
    texts = [word for word in args.words if not _SETTING.match(word)]
    prompts = prompts_of(texts, args.prompts)
    trained: Spec | None = None
    if args.run.startswith(HF):
        source = Path(args.run.removeprefix(HF))
        model, precision = _of_folder(source)
        if args.step is not None:
            raise RecipeError(f"--step {args.step}: {args.run} has no steps; leave it out")
    else:
        source = Path(args.run)
        saved = read_run(source, allows_gone=True)
        refuse_no_checkpoint(saved, args.step)
        trained = saved.spec
        model = trained.model
        precision = {"kind": model_format(trained.precision)}
    spec = generation_spec(model, precision, settings, args, detect_target())
    folder = Path(tempfile.mkdtemp(prefix="megaspec-generate-"))
    try:
        (folder / "spec.json").write_text(spec.model_dump_json())
        if trained is not None:
            (folder / "trained.json").write_text(trained.model_dump_json())
        (folder / "request.json").write_text(json.dumps(_request(args, source, prompts)))
        if spec.world_size > 1:
            return launch(
                str(folder),
                ranks=spec.world_size,
                entry=_ENTRY,
                grace_seconds=spec.launcher.grace_seconds,
                timeout_seconds=spec.launcher.timeout_seconds,
                arguments={"plugins": loaded()},
            )
        from megaspec.runtime.generation_rank import write_alone  # torch, only where it is needed

        write_alone(folder)
    finally:
        shutil.rmtree(folder)
    return 0


def _refuse_arguments(args: argparse.Namespace) -> None:
    """RecipeError: all numbers that are out of bounds, and what says nothing."""
    problems = []
    for name, least in _LEAST.items():
        value = getattr(args, name)
        if value is not None and value < least:
            problems.append(f"{_flag(name)}={value} must be at least {least}")
    if not (isfinite(args.temperature) and args.temperature >= 0):
        problems.append(f"--temperature={args.temperature} must be at least 0, and finite")
    for name in ("top_p", "min_p"):
        value = getattr(args, name)
        if value is not None and not 0 < value <= 1:
            problems.append(f"{_flag(name)}={value} must be above 0, and at most 1")
    if args.temperature == 0:
        for name in ("top_k", "top_p", "min_p"):
            if getattr(args, name) is not None:
                text = f"{_flag(name)}={getattr(args, name)} says what to draw from, --temperature=0 draws nothing"
                problems.append(f"{text}: it takes the likeliest token; leave one of them out")
        if args.samples > 1:
            text = f"--samples={args.samples} are all the same with --temperature=0, which takes the likeliest token"
            problems.append(f"{text}; leave one of them out")
    if "" in args.stop:
        problems.append("--stop= is empty, which every text holds; leave it out")
    if any("\ud800" <= c <= "\udfff" for c in "".join(args.stop)):
        problems.append("--stop is not valid UTF-8; give it in the encoding of the terminal")
    if args.out is not None and (args.out.exists() or args.out.is_symlink()):
        problems.append(f"--out {args.out} is there already; name another file, or remove it")
    if args.out is not None and not args.out.parent.is_dir():
        problems.append(f"--out {args.out}: there is no folder {args.out.parent}; make it, or name another file")
    if problems:
        raise RecipeError(problems)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _of_folder(path: Path) -> tuple[TransformerSpec, dict[str, Any]]:
    """The model of a folder, and the precision of most of its weights. CheckpointError: as in an import."""
    with open_hf_folder(path) as folder:
        where = f"{folder.path / CONFIG}"
        model = read_model(folder.config, where)
        # what can't be read is told before ranks start
        weight_table(model.facts, family_of(folder.config, where).names(model))
        sizes: dict[str, int] = {}
        for entry in folder.tensors.values():
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.bytes
    most = max(sizes, key=sizes.__getitem__)
    return model, {"kind": _PRECISIONS.get(most, "bf16")}


def generation_spec(
    model: TransformerSpec,
    precision: dict[str, Any],
    settings: Sequence[str],
    args: argparse.Namespace,
    target: Target,
) -> Spec:
    """The model on this machine: one rank, unless settings or --gpus say otherwise. On a CPU in fp32, but for fp64.
    `precision`: as plain data, not fp8.

    RecipeError: settings that are wrong, break a rule, or make no sense where nothing is trained.
    """
    refuse_two_answers(settings)
    _refuse_sections(settings)
    # torchrun's ranks are none of ours
    target = target.model_copy(update={"world_size": None, "local_ranks": None})
    if target.device == "cpu" and precision["kind"] != "fp64":
        precision = {"kind": "fp32"}
    recipe = _recipe(model, precision)
    label = args.run
    composed = recompose(recipe, label, settings, args.config_dir)
    refuse_jobs(composed.recipe, composed.origins, "generate")
    parallelism = composed.recipe.parallelism
    ranks = _ranks(args.gpus, composed.recipe)
    _refuse_training_settings(composed.recipe, composed.origins)
    if target.device == "cuda" and ranks > target.gpus:
        text = f"the layout needs {ranks} ranks, this machine has {target.gpus} GPUs; take lower degrees"
        raise RecipeError([Problem("parallelism", text, COMMAND_LINE)])
    if target.device == "cuda":
        target = target.model_copy(update={"gpus": ranks})
    recipe["launcher"]["ranks"] = ranks
    recipe["train"]["global_batch"] = _SEQUENCES * ranks
    recipe["data"]["seq_len"] = _seq_len(model.max_seq_len, parallelism)
    composed = recompose(recipe, label, settings, args.config_dir)
    spec = resolve(composed.recipe, target, gather_facts(composed.recipe), composed.origins)
    problems = unbuilt_problems(spec, composed.origins)
    if spec.kernels.compile != "none":
        text = f"kernels.compile={spec.kernels.compile} would compile each length anew; set kernels.compile=none"
        problems.append(Problem("kernels.compile", text, COMMAND_LINE))
    problems += _uncached(spec, args.cache)
    if problems:
        raise RecipeError(problems)
    return spec


def _recipe(model: TransformerSpec, precision: dict[str, Any]) -> dict[str, Any]:
    """A run that is never trained: the model on one rank, and what every run has to say."""
    # a norm and the like need no sequences where nothing is kept; experts do, whose tokens are spread over tp
    sequence_parallel = AUTO if model.moe is not None else False
    one = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "etp": 1, "dp_strategy": "replicate"}
    composed = compose_dicts(
        {
            "name": "generate",
            "model": short_section(model),
            "precision": precision,
            "data": {"kind": "random", "vocab_size": model.vocab_size, "seq_len": 1},
            "train": {"steps": 1, "global_batch": 1, "micro_batch": 1},
            "kernels": {"compile": "none"},
            "parallelism": {**one, "sequence_parallel": sequence_parallel},
            "launcher": {"ranks": AUTO},
        }
    )
    return composed.recipe.model_dump(mode="json")


def _refuse_sections(settings: Sequence[str]) -> None:
    problems = []
    for word in settings:
        section = _SETTING.match(word).group(1)
        if section not in _MAY_BE_SET:
            text = f"{word}: {section} is nothing that can be set here; it must be {one_of(_MAY_BE_SET)}"
            problems.append(Problem(section, f"{text}. A text that looks so goes into --prompts FILE", COMMAND_LINE))
    if problems:
        raise RecipeError(problems)


def _ranks(gpus: int | None, recipe: Recipe) -> int:
    """As many as are asked for, or the layout needs."""
    said = recipe.launcher.ranks
    if said == AUTO:
        return gpus or _fewest_ranks(recipe.parallelism)
    if gpus not in (None, said):
        text = f"launcher.ranks={said} and --gpus {gpus} say the same thing differently; keep one"
        raise RecipeError([Problem("launcher.ranks", text, COMMAND_LINE)])
    return said


def _fewest_ranks(parallelism: ParallelismSpec) -> int:
    """Of both grids, with the data-parallel ranks that are asked for."""
    degrees = {}
    for axis in ("tp", "cp", "pp", "ep", "etp"):
        value = getattr(parallelism, axis)
        degrees[axis] = 1 if value == AUTO else value
    dense = {axis: value for axis, value in parallelism.degrees.items() if value != AUTO}
    fewest = fewest_gpus(**degrees)
    if fewest % world_size(dense):
        return world_size(dense)
    return fewest


def _refuse_training_settings(recipe: Recipe, origins: dict[str, str]) -> None:
    """RecipeError: a layout or a precision that only training has."""
    problems = []
    for key, (needed, why) in _NOT_HERE.items():
        value = getattr(recipe.parallelism, key)
        if value != needed:
            path = f"parallelism.{key}"
            problems.append(Problem(path, f"{path}={value} {why}", origins.get(path, COMMAND_LINE)))
    if fp8_recipe(recipe.precision) is not None:
        path = "precision.kind"
        text = f"{path}=fp8 takes scales over a batch, so a text would depend on those beside it; set precision=bf16"
        problems.append(Problem(path, text, origins.get(path, COMMAND_LINE)))
    if problems:
        raise RecipeError(problems)


def _seq_len(longest: int, parallelism: ParallelismSpec) -> int:
    """That tensor-parallel ranks can split: no text is as long, and rules ask."""
    tp = 1 if parallelism.tp == AUTO else parallelism.tp
    most = min(longest, _SEQ_LEN)
    return max(1, most // tp * tp)


def _uncached(spec: Spec, cache: str) -> list[Problem]:
    """A part of a plug-in, of which nobody here knows how it looks at other tokens."""
    if cache == "none":
        return []
    from megaspec.runtime.generate import why_uncached  # torch, only where it is needed

    why = why_uncached(spec)
    if why is None:
        return []
    text = f"{why}; --cache none takes a forward pass of the whole text for each token"
    return [Problem(why.partition("=")[0], text, COMMAND_LINE)]


def _request(args: argparse.Namespace, source: Path, prompts: list[dict[str, Any]]) -> dict[str, Any]:
    """See Request in runtime/generation_rank.py."""
    output = "json" if args.json or args.out is not None else "terminal"
    out = None if args.out is None else str(args.out.absolute())
    return {
        "source": str(source.absolute()),
        "step": args.step,
        "prompts": prompts,
        "tokens": args.tokens,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "seed": args.seed,
        "samples": args.samples,
        "stops": args.stop,
        "ignore_eos": args.ignore_eos,
        "batch": args.batch,
        "cache": args.cache,
        "output": output,
        "out": out,
    }
