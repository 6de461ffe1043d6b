"""`megaspec completion bash|zsh`: a script with which a shell completes commands, recipes, groups, keys and values.

The script asks `megaspec _complete LINE` at each press of the key. That has to be quick, so it imports neither the
command line nor Hydra: commands and their flags stand here, and a test holds them equal to the parsers.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaspec.compose.search_path import SearchPath
from megaspec.core.fields import ENTRY, NAME, fields_of
from megaspec.core.frozen import Frozen
from megaspec.estimate.hardware import HARDWARE
from megaspec.recipe import SECTIONS, Recipe
from megaspec.sweep.spec import KEPT, SweepSpec

_BASH = r"""_megaspec_complete() {
    local line="${COMP_LINE:0:COMP_POINT}" word IFS=$'\n'
    word="${line##*[[:space:]]}"
    COMPREPLY=($("${COMP_WORDS[0]}" _complete "$line" 2>/dev/null))
    # where bash breaks words at =, it wants only what follows
    if [[ "$COMP_WORDBREAKS" == *=* && "$word" == *=* ]]; then
        COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*=}"}"}")
    fi
    if [[ ${#COMPREPLY[@]} == 1 && "${COMPREPLY[0]}" == *[=.] ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -o default -F _megaspec_complete megaspec
"""
_ZSH = r"""_megaspec_complete() {
    local -a found open whole
    found=(${(f)"$("${words[1]}" _complete "${BUFFER[1,CURSOR]}" 2>/dev/null)"})
    open=(${(M)found:#*[=.]})
    whole=(${found:#*[=.]})
    compadd -Q -S '' -a open
    compadd -Q -a whole
    (( ${#found} )) || _files
}
compdef _megaspec_complete megaspec
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH}


@dataclass(frozen=True)
class Completed:
    """What may follow a command."""

    flags: tuple[str, ...] = ()
    takes: str = ""
    """words: recipe=, groups and keys. changes: groups and keys. sweep: what a sweep that goes on may change. names:
    recipes. sides: recipes and runs. folders: more of its first word. key, group, shell: one of those."""
    own_words: tuple[str, ...] = ()
    """Words of this command that are no keys: names of `COMMAND_WORDS`."""
    folder: str = ""
    """Its first word is a folder that holds this file: that of a run, or of a sweep."""


# Files by which the folder of a run and that of a sweep are known.
RUN = "spec.json"
SWEEP = "sweep.json"
# Where such folders are made.
HOMES = {RUN: "runs", SWEEP: "sweeps"}


COMMAND_WORDS: dict[str, tuple[str, ...]] = {
    "hardware": (*HARDWARE, "cpu"),
    "gpus": (),
    "throughput": (),
    "resume": ("auto", "never"),
    "memory": ("check", "ignore"),
}
_GENERATE = (
    "--batch",
    "--cache",
    "--config-dir",
    "--gpus",
    "--ignore-eos",
    "--json",
    "--min-p",
    "--out",
    "--prompts",
    "--samples",
    "--seed",
    "--step",
    "--stop",
    "--temperature",
    "--tokens",
    "--top-k",
    "--top-p",
)
_MACHINE = ("hardware", "gpus", "throughput")
COMMANDS: dict[str, Completed] = {
    "train": Completed(("--config-dir", "--multirun", "--print", "--supervise"), "words", ("resume", "memory")),
    "plan": Completed(("--config-dir", "--json", "--ranks", "--trace"), "words", _MACHINE),
    "show": Completed(("--config-dir", "--origins", "--resolved"), "words", _MACHINE, RUN),
    "verify": Completed(("--config-dir", "--cpu", "--json", "--ranks", "--steps"), "words", (*_MACHINE, "memory")),
    "tune": Completed(("--config-dir", "--json", "--out", "--take", "--top", "--trainable"), "words", _MACHINE),
    "resume": Completed(("--config-dir", "--fork", "--supervise"), "changes", ("memory",), RUN),
    "eval": Completed(("--config-dir", "--data", "--json", "--step"), "changes", folder=RUN),
    "generate": Completed(_GENERATE, folder=RUN),
    "check": Completed(("--config-dir", "--json"), "names"),
    "recipes": Completed(("--config-dir", "--json")),
    "explain": Completed(("--config-dir",), "key"),
    "schema": Completed(("--config-dir", "--out"), "group"),
    "diff": Completed(("--config-dir", "--json"), "sides"),
    "report": Completed(("--out",), "folders", folder=RUN),
    "completion": Completed((), "shell"),
    "doctor": Completed(("--base", "--json", "--look-only", "--out", "--run-dir")),
    "from-megatron": Completed(("--checkpoint", "--gpus", "--name", "--out", "--partial")),
    "sweep": Completed(),
    "sweep resume": Completed((), "sweep", ("memory",), SWEEP),
    "sweep show": Completed(folder=SWEEP),
    "bench": Completed(),
    "bench step": Completed(
        ("--balanced", "--config-dir", "--out", "--rank", "--steps", "--warm"), "words", ("throughput", "memory")
    ),
    "bench throughput": Completed(("--only", "--out", "--seconds")),
    "bench kernel": Completed(("--json",)),
    "data": Completed(),
    "data prepare": Completed(
        (
            "--allow-lossy-tokenizer",
            "--eod",
            "--join",
            "--key",
            "--merges",
            "--out",
            "--overwrite",
            "--per-key",
            "--restart",
            "--skip-bad",
            "--tokenizer",
            "--workers",
        )
    ),
    "data fetch": Completed(("--download-dir", "--out")),
    "data inspect": Completed(("--download-dir", "--json", "--samples", "--tokenizer", "--vocab-size")),
    "hf": Completed(),
    "hf import": Completed(("--out", "--revision")),
    "hf export": Completed(("--dtype", "--family", "--shard-size", "--step"), folder=RUN),
    "hf verify": Completed(("--step", "--tensors-only"), folder=RUN),
    "hf recipe": Completed(("--out", "--revision")),
    "hf families": Completed(),
    "checkpoint": Completed(),
    "checkpoint list": Completed(folder=RUN),
    "checkpoint verify": Completed(("--step",), folder=RUN),
    "checkpoint inspect": Completed(("--json", "--statistics", "--step"), folder=RUN),
    "checkpoint diff": Completed(("--all", "--json", "--step"), "folders", folder=RUN),
    "checkpoint save": Completed(("--dtype", "--out", "--step"), folder=RUN),
    "checkpoint fetch": Completed(("--out", "--step")),
    "checkpoint average": Completed(("--dtype", "--last", "--out", "--steps", "--weights"), "folders", folder=RUN),
}
# Flags that stand alone; what follows any other is its value, which the shell completes as a file.
_ALONE = (
    "--json",
    "--cpu",
    "--origins",
    "--resolved",
    "--statistics",
    "--all",
    "--tensors-only",
    "--multirun",
    "--supervise",
    "--trainable",
    "--partial",
    "--allow-lossy-tokenizer",
    "--overwrite",
    "--restart",
    "--skip-bad",
    "--help",
)


def add_parser(commands: Any) -> None:
    """The parser of `completion`."""
    text = 'print a script for a shell: eval "$(megaspec completion bash)" completes from then on'
    command = commands.add_parser("completion", help=text, description=text, allow_abbrev=False)
    command.add_argument("shell", choices=sorted(SCRIPTS), help="put the eval line into ~/.bashrc or ~/.zshrc")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    print(SCRIPTS[args.shell], end="")
    return 0


def complete(line: str) -> list[str]:
    """What the last word of a command line may become."""
    words = line.split()[1:]
    current = ""
    if words and not line[-1].isspace():
        current = words.pop()
    if words and words[-1].startswith("--") and words[-1] not in _ALONE:
        return []  # the value of a flag
    return sorted({one for one in _candidates(words, current) if one.startswith(current)})


def _candidates(words: list[str], current: str) -> Iterable[str]:
    """What may stand behind these words, what does not begin with `current` included."""
    before, config_dirs = _positions(words)
    # `sweep show` is a command of two words, `sweep` one of a single word
    name = " ".join(before[:2])
    if name not in COMMANDS:
        name = " ".join(before[:1])
    if name not in COMMANDS:
        if before:
            return []
        commands = [one for one in COMMANDS if " " not in one]
        return [*commands, "--help", "--plugin", "--version"]
    if current.startswith("-"):
        return [*COMMANDS[name].flags, "--help"]
    second_words = [one.partition(" ")[2] for one in COMMANDS if one.startswith(f"{name} ")]
    if second_words:
        return second_words
    is_swept = "-m" in words or "--multirun" in words
    return _following(name, before, current, SearchPath(config_dirs), is_swept=is_swept)


def _positions(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words that are neither flags nor their values, and the folders of --config-dir that exist."""
    before: list[str] = []
    config_dirs: list[str] = []
    previous = ""
    for word in words:
        if previous == "--config-dir":
            folder = Path(word).expanduser()
            if folder.is_dir():
                config_dirs.append(str(folder))
        elif not word.startswith("-") and (not previous.startswith("--") or previous in _ALONE):
            before.append(word)
        previous = word
    return before, config_dirs


def _following(name: str, before: list[str], current: str, search: SearchPath, *, is_swept: bool) -> Iterator[str]:
    """Candidates for a word of a command, those that do not match included."""
    command = COMMANDS[name]
    given = before[len(name.split()) :]
    has_key = "=" in current or any("=" not in word for word in given)
    if command.folder and not given:
        yield from _folders(current, command.folder)
        return
    match command.takes:
        case "names":
            yield from search.choices("recipe")
        case "sides":
            yield from search.choices("recipe")
            yield from _folders(current, RUN)
        case "folders":
            yield from _folders(current, command.folder)
        case "shell":
            yield from SCRIPTS
        case "group":
            yield from ("recipe", *SECTIONS)
        case "key" if not has_key:
            yield from _keys(current, end="")
            yield from (*_codes(), "recipe=")
        case "words" | "key" | "changes":
            yield from _words(command, current, search, is_swept=is_swept)
        case "sweep":
            yield from _sweep_words(command, current, search)


def _folders(current: str, mark: str) -> Iterator[str]:
    """Folders that hold a file: where they are made, and in the folder that is typed so far."""
    for parent in {HOMES[mark], current.rpartition("/")[0]} - {""}:
        with suppress(OSError):  # there is none, or it can't be read
            names = [child.name for child in Path(parent).iterdir() if (child / mark).is_file()]
            for name in names:
                # a word with a blank would be two; what is hidden is kept in a run's folder, and none
                if name.split() == [name] and not name.startswith("."):
                    yield f"{parent}/{name}"


def _sweep_words(command: Completed, current: str, search: SearchPath) -> Iterator[str]:
    """Words of a sweep that goes on."""
    key, equals, _ = current.partition("=")
    if equals:
        for value in _values(key, search):
            yield f"{key}={value}"
        return
    for word in command.own_words:
        yield f"{word}="
    for word in _keys(current, model=SweepSpec, prefix="sweep."):
        if word.strip("=").removeprefix("sweep.") not in KEPT:
            yield word


def _words(command: Completed, current: str, search: SearchPath, *, is_swept: bool) -> Iterator[str]:
    """`key=value` words."""
    key, equals, value = current.partition("=")
    if equals:
        # of values with commas between them the last one is completed
        start = f"{key}="
        earlier_values = value.rpartition(",")[0]
        if earlier_values:
            start += f"{earlier_values},"
        for option in _values(key.lstrip("+"), search):
            yield f"{start}{option}"
        return
    if key.startswith("~"):
        for path in _keys(key[1:], end=""):
            yield f"~{path}"
        return
    if command.takes != "changes":
        yield "recipe="
    for word in (*SECTIONS, *command.own_words):
        yield f"{word}="
    yield from _keys(current)
    if is_swept:
        yield from _keys(current, model=SweepSpec, prefix="sweep.")


def _keys(current: str, *, end: str = "=", model: type[Frozen] = Recipe, prefix: str = "") -> Iterator[str]:
    """The keys that begin with a word, up to their next dot. `end`: what stands behind one that is complete."""
    for field in fields_of(model):
        path = f"{prefix}{field.path}"
        has_no_word = ENTRY in field.path or NAME in field.path.split(".")
        if has_no_word or not path.startswith(current):
            continue
        next_dot = path.find(".", len(current))
        if next_dot >= 0:
            yield path[: next_dot + 1]
        elif field.models:
            yield f"{path}."
        else:
            yield f"{path}{end}"


def _values(key: str, search: SearchPath) -> Iterator[str]:
    """What a key may be, where that is a fixed word."""
    if key == "recipe" or key in SECTIONS:
        yield from search.choices(key)
    yield from COMMAND_WORDS.get(key, ())
    path = key
    model: type[Frozen] = Recipe
    if key.startswith("sweep."):
        path = key.removeprefix("sweep.")
        model = SweepSpec
    for field in fields_of(model):
        if field.path == path:
            yield from field.literals


def _codes() -> tuple[str, ...]:
    # only `explain` needs them: importing every rule would slow the key in all other commands
    from megaspec.commands.codes import CODES
    from megaspec.rules.table import RULES

    return (*RULES, *CODES)
