"""A command of Megatron -> a draft of a recipe, and the proof that the recipe is one."""

import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from megaspec.compose.compose import compose
from megaspec.core.errors import Problem, RecipeError
from megaspec.core.frozen import AUTO
from megaspec.estimate.target import Target
from megaspec.megatron.command import Command
from megaspec.megatron.data import translate_data, translate_evaluation, translate_output
from megaspec.megatron.draft import GpusFrom, RecipeDraft, fewest_of
from megaspec.megatron.flag import Fate
from megaspec.megatron.flags import BY_NAME
from megaspec.megatron.layout import translate_layout
from megaspec.megatron.model import translate_model
from megaspec.megatron.silent import tell_silent_changes
from megaspec.megatron.training import translate_training
from megaspec.precision.spec import BLACKWELL_SM, fp8_recipe
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec_kernels.catalog import packages_of

_NEEDED = (
    ("--num-layers", "--encoder-num-layers"),
    ("--hidden-size",),
    ("--num-attention-heads",),
    ("--seq-length", "--encoder-seq-length"),
    ("--micro-batch-size",),
    ("--train-iters", "--train-samples"),
    ("--lr",),
)
_EITHER = (
    ("--num-layers", "--encoder-num-layers"),
    ("--seq-length", "--encoder-seq-length"),
    ("--train-iters", "--train-samples"),
    ("--lr-warmup-iters", "--lr-warmup-samples", "--lr-warmup-fraction"),
    ("--lr-decay-iters", "--lr-decay-samples"),
    ("--use-torch-fsdp2", "--use-megatron-fsdp"),
)
# Stands for the vocabulary of data that are not there.
_VOCABULARY = 32_000
# GPUs on which a recipe is tried: name, compute capability, GB of memory.
_BLACKWELL = ("B200", 100, 180)
_HOPPER = ("H100", 90, 80)


def translate(command: Command, *, gpus: int | None = None) -> RecipeDraft:
    """The draft of a recipe. `gpus`: world size, where the command does not say it; else the fewest that it needs.

    RecipeError: flags that are missing or exclude each other, or a launcher whose ranks can't be known.
    """
    missing = []
    for names in _NEEDED:
        if not any(name in command.values for name in names):
            missing.append(Problem("", f"{' or '.join(names)} is missing; give it", "", "megatron-flag"))
    if missing:
        raise RecipeError(missing)
    ranks = command.ranks
    if gpus is not None and ranks.count not in (None, gpus):
        way_out = f"drop --gpus, or {ranks.launcher}'s numbers"
        raise RecipeError(f"--gpus {gpus}: {ranks.launcher} starts {ranks.count}; {way_out}")
    if gpus is None and ranks.why:
        raise RecipeError([Problem("", ranks.why, "", "megatron-flag")])
    if ranks.count is not None:
        draft = RecipeDraft(command, ranks.count, GpusFrom.COMMAND)
    elif gpus is not None:
        draft = RecipeDraft(command, gpus, GpusFrom.OPTION)
    else:
        draft = RecipeDraft(command, fewest_of(command), GpusFrom.FEWEST)
    for names in _EITHER:
        given = [name for name in names if draft.is_given(name)]
        if len(given) > 1:
            draft.refuse(given[0], f"with {' and '.join(given[1:])}; give one")
    translate_model(draft)
    translate_layout(draft)
    translate_training(draft)
    translate_data(draft)
    translate_evaluation(draft)
    translate_output(draft)
    _tell_lost(draft)
    tell_silent_changes(draft)
    for name in command.repeated:
        draft.change(name, "given more than once: the last one counts")
    return draft


def _tell_lost(draft: RecipeDraft) -> None:
    """Every given flag that can't be said here, unless it says what Megatron does anyway."""
    for name, value in draft.command.values.items():
        flag = BY_NAME[name]
        if flag.fate is Fate.LOST and not _is_default(value, flag.default):
            draft.lose(name, flag.reason)
        if flag.fate is Fate.REMOVED:
            draft.lose(name, f"a flag of older releases, which Megatron refuses; give {flag.text}")


def _is_default(value: object, default: str | None) -> bool:
    if default is None or not isinstance(value, str):
        return False
    try:
        return float(value) == float(default)
    except ValueError:
        return value == default


def check(text: str, sources: Mapping[str, str]) -> list[Problem]:
    """What is wrong with a recipe: composed, typed and resolved for as many GPUs as it says, without its data.

    Each problem names the flags that its key is from (`sources`).
    """
    name = f"from-megatron-{os.getpid()}"
    with TemporaryDirectory() as folder:
        file = Path(folder) / "recipes" / f"{name}.yaml"
        file.parent.mkdir()
        file.write_text(text, encoding="utf-8")
        try:
            recipe = compose(name, (), [folder]).recipe
            # only newer GPUs have the format
            gpu, sm, gigabytes = _BLACKWELL if fp8_recipe(recipe.precision) in BLACKWELL_SM else _HOPPER
            ranks = recipe.launcher.ranks
            versions = {"tensorboard": ""}
            versions |= dict.fromkeys(packages_of({}, fp8_recipe=fp8_recipe(recipe.precision)), "")
            target = Target(gpus=ranks, gpu=gpu, sm=sm, gpu_memory=gigabytes * 10**9, versions=versions)
            vocabulary = _VOCABULARY if recipe.model.vocab_size == AUTO else None
            resolve(recipe, target, Facts(run_dir="runs/planned", vocab_size=vocabulary))
        except RecipeError as error:
            return [Problem(p.key, p.message, _flags_of(p.key, sources), p.code) for p in error.problems]
    return []


def _flags_of(key: str, sources: Mapping[str, str]) -> str:
    """The flags of a key, or of the section around it."""
    while key:
        if key in sources:
            return sources[key]
        key = key.rpartition(".")[0]
    return ""
