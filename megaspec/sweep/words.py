"""The words of `megaspec train -m ...`: what sweeps, what is the same in every point, and how the sweep is run."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megaspec.compose.compose import Swept, plain_values, split_sweep
from megaspec.compose.words import take
from megaspec.core.errors import COMMAND_LINE, Problem, RecipeError
from megaspec.core.problems import did_you_mean, one_of, show, typed_problems
from megaspec.search.fits import MEMORY
from megaspec.sweep.spec import SweepSpec

MOST_POINTS = 10_000
OWN_LAUNCHER = "megaspec"
LAUNCHERS = (OWN_LAUNCHER, "basic", "joblib", "submitit_local", "submitit_slurm")
_JOBLIB = ("n_jobs", "backend", "prefer", "require", "verbose", "timeout", "batch_size", "max_nbytes", "mmap_mode")
_SUBMITIT = (
    "timeout_min",
    "cpus_per_task",
    "gpus_per_node",
    "tasks_per_node",
    "mem_gb",
    "nodes",
    "name",
    "stderr_to_stdout",
)
_SLURM = (
    "partition",
    "qos",
    "comment",
    "constraint",
    "exclude",
    "gres",
    "cpus_per_gpu",
    "gpus_per_task",
    "mem_per_gpu",
    "mem_per_cpu",
    "account",
    "signal_delay_s",
    "max_num_timeout",
    "array_parallelism",
)
# Launcher -> settings that are taken from sweep.json when a sweep goes on. The others run commands (setup), are
# evaluated (pre_dispatch) or say where files are written (submitit_folder): those only a command line can say.
KEPT_SETTINGS: dict[str, tuple[str, ...]] = {
    "basic": (),
    "joblib": _JOBLIB,
    "submitit_local": _SUBMITIT,
    "submitit_slurm": (*_SUBMITIT, *_SLURM),
}
_SETTING = re.compile(r"hydra\.launcher\.([a-z][a-z0-9_]*)((?:\.[A-Za-z0-9][A-Za-z0-9_-]*)*)=.*", re.DOTALL)
# What a partition, a constraint or a comment is written with, and nothing that ends a line of a batch script.
_PLAIN_TEXT = re.compile(r"[A-Za-z0-9 _.,:;@%+*=()\[\]/&|-]*")
_SWEEPERS = {"basic": "grid", "optuna": "optuna"}
# Keys that each point sets for itself.
_SET_PER_POINT = ("name", "run_dir", "resume")
# Hydra's and Optuna's names of what a sweep calls otherwise: their last part -> the field of SweepSpec.
_FOREIGN_NAMES = {"n_trials": "trials", "n_jobs": "slots", "seed": "seed", "direction": "direction", "dir": "folder"}


@dataclass(frozen=True)
class SweepWords:
    """A command line, taken apart."""

    plain: tuple[str, ...]
    """What is the same in every point."""
    swept: tuple[Swept, ...]
    spec: SweepSpec
    launcher: str = OWN_LAUNCHER
    """`megaspec`, or the Hydra launcher that runs the points."""
    launcher_words: tuple[str, ...] = ()
    """Settings of that launcher."""
    memory: str = MEMORY[0]
    """ignore: points that are predicted not to fit their GPUs are run all the same."""
    only_new: bool = False
    """resume=never: a sweep that is there is not gone on with."""


def read_words(words: Sequence[str], config_dirs: Sequence[str] = ()) -> SweepWords:
    """Takes the words after `train -m` apart. RecipeError: everything that is wrong with them as a sweep."""
    memory, words = take(list(words), "memory", MEMORY)
    hydra_words: list[str] = []
    sweep_words: list[str] = []
    resume_words: list[str] = []
    recipe_words: list[str] = []
    for word in words:
        if word.startswith("hydra"):
            hydra_words.append(word)
        elif re.match(r"sweep[.=]", word):
            sweep_words.append(word)
        elif word.startswith("resume="):
            resume_words.append(word)
        else:
            recipe_words.append(word)
    launcher, launcher_words, aliases = _hydra_words(hydra_words)
    # what Hydra calls otherwise comes first, so that a `sweep.*` word for the same field wins
    spec = sweep_spec([*aliases, *sweep_words])
    plain, swept = split_sweep(recipe_words, config_dirs)
    problems = _problems(plain, swept, spec) + _resume_problems(resume_words)
    if spec.kind == "optuna" and launcher != OWN_LAUNCHER:
        text = f"hydra/launcher={launcher}: a search runs on hydra/launcher={OWN_LAUNCHER}; drop it, or sweep.kind=grid"
        problems.append(Problem("hydra/launcher", text, COMMAND_LINE, "sweep.launcher"))
    if problems:
        raise RecipeError(problems)
    return SweepWords(
        plain=tuple(plain),
        swept=tuple(swept),
        spec=spec,
        launcher=launcher,
        launcher_words=tuple(launcher_words),
        memory=memory,
        only_new="resume=never" in resume_words,
    )


def sweep_spec(words: Sequence[str], given: Mapping[str, Any] | None = None) -> SweepSpec:
    """The SweepSpec of `sweep.a=b` words, on top of what is given. RecipeError: all that is wrong with them."""
    content = dict(given or {})
    for key, value in plain_values(_without_shorthand(words)).items():
        content[key.removeprefix("sweep.")] = value
    try:
        return SweepSpec.model_validate_json(json.dumps(content))
    except ValidationError as error:
        origins = dict.fromkeys(content, COMMAND_LINE)
        found = typed_problems(error, model=SweepSpec, content=content, origins=origins, choices={})
        raise RecipeError([_renamed(problem) for problem in found]) from None


def value_in(words: Sequence[str], key: str) -> str | None:
    """The value of the first `key=value` of the words; None where there is none."""
    for word in words:
        if word.startswith(f"{key}="):
            return word.removeprefix(f"{key}=")
    return None


def default_name(words: SweepWords) -> str:
    """`<recipe>-<keys>-<hash of what is computed>`: the same for the same command."""
    recipe = value_in(words.plain, "recipe")
    if recipe is None:
        recipe = "recipes"
    short_keys = []
    space = []
    for swept in words.swept:
        short_keys.append(swept.key.rpartition(".")[2])
        # sorted: the order of values, like that of words, changes no run
        space.append((swept.key, sorted(swept.words), swept.bounds, swept.is_log))
    search = words.spec.model_dump(include={"kind", "seed"})
    computed = (sorted(words.plain), space, search)
    tag = hashlib.sha256(json.dumps(computed).encode()).hexdigest()[:6]
    readable = re.sub(r"[^A-Za-z0-9._-]", "-", f"{recipe}-{'-'.join(short_keys)}")
    return f"{readable[:48].strip('.-_')}-{tag}"


def _without_shorthand(words: Sequence[str]) -> list[str]:
    return [re.sub(r"^sweep=", "sweep.kind=", w) for w in words]


def _renamed(problem: Problem) -> Problem:
    text = problem.message.replace("no key of a recipe", "no key of a sweep")
    return Problem(f"sweep.{problem.key}", f"sweep.{text}", problem.origin, problem.code)


def _hydra_words(words: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """The launcher, its settings, and `sweep.*` words for what Hydra calls otherwise."""
    launcher = OWN_LAUNCHER
    settings: list[str] = []
    aliases: list[str] = []
    problems: list[Problem] = []
    for word in words:
        key, _, value = word.partition("=")
        if key == "hydra/launcher" and value in LAUNCHERS:
            launcher = value
        elif key == "hydra/sweeper" and value in _SWEEPERS:
            aliases.append(f"sweep.kind={_SWEEPERS[value]}")
        elif key.startswith("hydra.launcher."):
            settings.append(word)
        else:
            problems.append(Problem(key, f"{word}: {_instead(key, value)}", COMMAND_LINE, "override.hydra"))
    if problems:
        raise RecipeError(problems)
    check_launcher(launcher, settings, COMMAND_LINE)
    return launcher, settings, aliases


def check_launcher(launcher: str, settings: Sequence[str], origin: str) -> None:
    """RecipeError: not a launcher that we know, or a word that is not a setting of one as plain data.

    The one check of what reaches Hydra, wherever the words are from; `origin` says where.
    """
    problems = []
    if launcher not in LAUNCHERS:
        text = f"hydra/launcher={launcher}: {_instead('hydra/launcher', launcher)}"
        problems.append(Problem("hydra/launcher", text, origin, "override.hydra"))
    elif settings and launcher == OWN_LAUNCHER:
        text = f"{settings[0]}: hydra/launcher={OWN_LAUNCHER} has no such setting; set sweep.slots or sweep.gpus"
        problems.append(Problem("hydra.launcher", text, origin, "override.hydra"))
    for word in settings:
        if why := _wrong_setting(word):
            key = word.partition("=")[0]
            problems.append(Problem(key, f"{show(word)}: {why}", origin, "override.hydra"))
    if problems:
        raise RecipeError(problems)


def kept_settings(launcher: str, settings: Sequence[str], given: Sequence[str], *, sweep: Path) -> tuple[str, ...]:
    """The settings of a sweep that goes on: those of sweep.json, and over them those that the command line has `given`.

    RecipeError: what `check_launcher` refuses of either, or a setting of sweep.json that only a command line can say.
    """
    check_launcher(launcher, given, COMMAND_LINE)
    head = str(sweep / "sweep.json")
    check_launcher(launcher, settings, head)
    given_keys = {word.partition("=")[0] for word in given}
    kept: list[str] = []
    problems = []
    for word in settings:
        key = word.partition("=")[0]
        if key in given_keys:
            continue
        kept.append(word)
        match = _SETTING.fullmatch(word)
        assert match is not None, f"{word} was not checked"
        if match[1] not in KEPT_SETTINGS[launcher] or match[2] or not _is_plain(word):
            way_out = f"after a look at it give it again: megaspec sweep resume {sweep} {show(word)}"
            text = f"{show(word)}: only a command line can say this; {way_out}"
            problems.append(Problem(key, text, head, "override.hydra"))
    if problems:
        raise RecipeError(problems)
    return (*kept, *given)


def _wrong_setting(word: str) -> str:
    """Why a word is no setting of a launcher; "" where it is one."""
    if _SETTING.fullmatch(word) is None:
        return "no setting of a launcher; those are hydra.launcher.name=value, the name in small letters"
    try:
        [value] = _setting(word).values()
    except RecipeError as error:
        return "; ".join(problem.message for problem in error.problems)
    # a `_target_` in a value is called when Hydra makes the launcher
    if _names_code(value):
        return "a setting is data, it can't name code; drop it"
    return ""


def _setting(word: str) -> dict[str, Any]:
    return plain_values([word.removeprefix("hydra.launcher.")])


def _names_code(value: Any) -> bool:
    if isinstance(value, dict):
        return any(key.startswith("_") or _names_code(inner) for key, inner in value.items())
    return isinstance(value, list) and any(_names_code(inner) for inner in value)


def _is_plain(word: str) -> bool:
    """Whether the value of a setting is one number or short text without lines, quotes and interpolations."""
    [value] = _setting(word).values()
    return value is None or isinstance(value, int | float) or bool(_PLAIN_TEXT.fullmatch(str(value)))


def _instead(key: str, value: str) -> str:
    if key == "hydra/launcher":
        return _choose(value, LAUNCHERS)
    if key == "hydra/sweeper":
        return _choose(value, list(_SWEEPERS))
    name = _FOREIGN_NAMES.get(key.rpartition(".")[2])
    if name is None:
        return "no setting of a sweep; those are sweep.* and hydra.launcher.*"
    return f"write sweep.{name}={value}"


def _choose(value: str, options: Sequence[str]) -> str:
    return did_you_mean(value, options) or f"choose {one_of(options)}"


def _problems(plain: Sequence[str], swept: Sequence[Swept], spec: SweepSpec) -> list[Problem]:
    problems: list[Problem] = []

    def refuse(key: str, text: str, code: str) -> None:
        problems.append(Problem(key, text, COMMAND_LINE, code))

    if not swept:
        refuse("", "-m without a key of several values, such as optim.lr=1e-3,3e-4; add one, or drop -m", "sweep.empty")
    # +key adds a key and ~key drops one: both are words about `key`
    given_keys = [word.partition("=")[0].lstrip("+~") for word in plain]
    given_keys += [one.key for one in swept]
    for one in swept:
        if one.key in _SET_PER_POINT or one.key.startswith("sweep"):
            refuse(one.key, f"{one.key} can't be swept: every point has its own; set sweep.name", "sweep.key")
        elif given_keys.count(one.key) > 1:
            refuse(one.key, f"{one.key} is given more than once; give all its values in one word", "sweep.twice")
        if one.bounds and spec.kind == "grid":
            text = f"{one.key}: a grid can't enumerate an interval; write values or range(...), or sweep.kind=optuna"
            refuse(one.key, text, "sweep.interval")
        elif one.bounds and one.is_log and one.bounds[0] <= 0:
            text = f"{one.key}: a logarithmic interval begins above 0, not at {one.bounds[0]:g}"
            refuse(one.key, text, "sweep.interval")
    if value_in(plain, "run_dir") is not None:
        refuse("run_dir", "run_dir: every point has a folder of its own; set sweep.folder instead", "sweep.key")
    number = spec.trials
    if spec.kind == "grid":
        number = prod(len(one.words) for one in swept)
    if number > MOST_POINTS:
        text = f"{number:,} points are more than {MOST_POINTS:,}; sweep fewer values, or search: sweep.kind=optuna"
        refuse("", text, "sweep.size")
    return problems


def _resume_problems(resume: Sequence[str]) -> list[Problem]:
    problems = []
    for word in resume:
        if word not in ("resume=auto", "resume=never"):
            text = f"{word}: a sweep takes resume=auto or never"
            problems.append(Problem("resume", text, COMMAND_LINE, "choice.unknown"))
    return problems
