"""`megaspec completion bash|zsh`: a script with which a shell completes commands, recipes, groups, keys and values.

The script asks `megaspec _complete LINE` at each press of the key. That has to be quick, so it imports neither the
command line nor Hydra: commands and their flags stand here, and a test holds them equal to the parsers.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaspec.compose.search_path import SearchPath
from megaspec.core.fields import ENTRY, fields_of
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
    recipes. sides: recipes and runs. key, group, shell: one of those."""
    own: tuple[str, ...] = ()
    """Words of this command that are no keys: names of `OWN`."""
    folder: str = ""
    """Its first word is a folder that holds this file: that of a run, or of a sweep."""


RUN, SWEEP = "spec.json", "sweep.json"
# Where such folders are made.
HOMES = {RUN: "runs", SWEEP: "sweeps"}


OWN: dict[str, tuple[str, ...]] = {
    "hardware": (*HARDWARE, "cpu"),
    "gpus": (),
    "ceilings": (),
    "resume": ("auto", "never"),
    "memory": ("check", "ignore"),
}
_MACHINE = ("hardware", "gpus", "ceilings")
COMMANDS: dict[str, Completed] = {
    "train": Completed(("--config-dir", "--multirun"), "words", ("resume", "memory")),
    "plan": Completed(("--config-dir", "--json", "--ranks", "--trace"), "words", _MACHINE),
    "verify": Completed(("--config-dir", "--cpu", "--json", "--ranks", "--steps"), "words", _MACHINE),
    "tune": Completed(("--config-dir", "--json", "--out", "--take", "--top", "--trainable"), "words", _MACHINE),
    "resume": Completed(("--config-dir", "--fork"), "changes", ("memory",), RUN),
    "generate": Completed(("--seed", "--temperature", "--tokens"), folder=RUN),
    "check": Completed(("--config-dir", "--json"), "names"),
    "recipes": Completed(("--config-dir", "--json")),
    "explain": Completed(("--config-dir",), "key"),
    "schema": Completed(("--config-dir", "--out"), "group"),
    "diff": Completed(("--config-dir", "--json"), "sides"),
    "completion": Completed((), "shell"),
    "from-megatron": Completed(("--gpus", "--name", "--out", "--partial")),
    "sweep": Completed(),
    "sweep resume": Completed((), "sweep", ("memory",), SWEEP),
    "sweep show": Completed(folder=SWEEP),
    "bench": Completed(),
    "bench ceilings": Completed(("--out",)),
    "bench kernel": Completed(("--json",)),
    "data": Completed(),
    "data prepare": Completed(
        (
            "--allow-lossy-tokenizer",
            "--eod",
            "--key",
            "--out",
            "--overwrite",
            "--restart",
            "--skip-bad",
            "--tokenizer",
            "--workers",
        )
    ),
    "data inspect": Completed(("--samples", "--tokenizer", "--vocab-size")),
    "checkpoint": Completed(),
    "checkpoint list": Completed(folder=RUN),
    "checkpoint verify": Completed(("--step",), folder=RUN),
}
# Flags that stand alone; what follows any other is its value, which the shell completes as a file.
_ALONE = (
    "--json",
    "--cpu",
    "--multirun",
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
    current = "" if not words or line[-1:].isspace() else words.pop()
    before, dirs = _positions(words)
    name = " ".join(before[:2]) if " ".join(before[:2]) in COMMANDS else " ".join(before[:1])
    if words and words[-1].startswith("--") and words[-1] not in _ALONE:
        return []
    if name not in COMMANDS:
        found = [one for one in COMMANDS if " " not in one] if not before else []
        found += ["--help", "--plugin", "--version"] if not before else []
    elif current.startswith("-"):
        found = [*COMMANDS[name].flags, "--help"]
    else:
        below = [one.partition(" ")[2] for one in COMMANDS if one.startswith(f"{name} ")]
        is_swept = "-m" in words or "--multirun" in words
        found = below or list(_following(name, before, current, SearchPath(dirs), is_swept=is_swept))
    return sorted({one for one in found if one.startswith(current)})


def _positions(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words that are neither flags nor their values, and the folders of --config-dir that exist."""
    before, dirs = [], []
    for number, word in enumerate(words):
        previous = words[number - 1] if number else ""
        if previous == "--config-dir":
            dirs += _existing(word)
        elif not word.startswith("-") and (not previous.startswith("--") or previous in _ALONE):
            before.append(word)
    return before, dirs


def _existing(folder: str) -> list[str]:
    path = Path(folder).expanduser()
    return [str(path)] if path.is_dir() else []


def _following(name: str, before: list[str], current: str, search: SearchPath, *, is_swept: bool) -> Iterator[str]:
    """Candidates for a word of a command, those that do not match included."""
    command, given = COMMANDS[name], before[len(name.split()) :]
    if command.folder and not given:
        yield from _folders(current, command.folder)
        return
    match command.takes:
        case "names":
            yield from search.choices("recipe")
        case "sides":
            yield from search.choices("recipe")
            yield from _folders(current, RUN)
        case "shell":
            yield from SCRIPTS
        case "group":
            yield from ("recipe", *SECTIONS)
        case "key" if not [w for w in given if "=" not in w] and "=" not in current:
            yield from _keys(current, end="")
            yield from (*_codes(), "recipe=")
        case "words" | "key" | "changes":
            yield from _words(command, current, search, is_swept=is_swept)
        case "sweep":
            yield from _sweep_words(command, current, search)


def _folders(current: str, mark: str) -> Iterator[str]:
    """Folders that hold a file: where they are made, and in the folder that is typed so far."""
    for place in {HOMES[mark], current.rpartition("/")[0]} - {""}:
        with suppress(OSError):  # there is none, or it can't be read
            names = [child.name for child in Path(place).iterdir() if (child / mark).is_file()]
            yield from (f"{place}/{name}" for name in names if name.split() == [name])


def _sweep_words(command: Completed, current: str, search: SearchPath) -> Iterator[str]:
    """Words of a sweep that goes on."""
    key, equals, _ = current.partition("=")
    if equals:
        yield from (f"{key}={one}" for one in _values(key, search))
        return
    yield from (f"{one}=" for one in command.own)
    yield from (
        w for w in _keys(current, model=SweepSpec, prefix="sweep.") if w.strip("=")[len("sweep.") :] not in KEPT
    )


def _words(command: Completed, current: str, search: SearchPath, *, is_swept: bool) -> Iterator[str]:
    """`key=value` words."""
    key, equals, value = current.partition("=")
    if equals:
        listed = value.rpartition(",")[0]
        start = f"{key}={listed}," if listed else f"{key}="
        yield from (f"{start}{one}" for one in _values(key.lstrip("+"), search))
        return
    if key.startswith("~"):
        yield from (f"~{one}" for one in _keys(key[1:], end=""))
        return
    yield from (
        f"{one}=" for one in ("recipe", *SECTIONS, *command.own) if command.takes != "changes" or one != "recipe"
    )
    yield from _keys(current)
    if is_swept:
        yield from _keys(current, model=SweepSpec, prefix="sweep.")


def _keys(current: str, *, end: str = "=", model: type[Frozen] = Recipe, prefix: str = "") -> Iterator[str]:
    """The keys that begin with a word, up to their next dot."""
    fields = [field for field in fields_of(model) if ENTRY not in field.path]
    for field in fields:
        path = f"{prefix}{field.path}"
        if path.startswith(current):
            next_dot = path.find(".", len(current))
            yield path[: next_dot + 1] if next_dot >= 0 else f"{path}{'.' if field.models else end}"


def _values(key: str, search: SearchPath) -> Iterator[str]:
    """What a key may be, where that is a fixed word."""
    if key == "recipe" or key in SECTIONS:
        yield from search.choices(key)
    yield from OWN.get(key, ())
    is_of_sweep = key.startswith("sweep.")
    path, model = (key.removeprefix("sweep."), SweepSpec) if is_of_sweep else (key, Recipe)
    for field in fields_of(model):
        if field.path == path:
            yield from field.literals


def _codes() -> tuple[str, ...]:
    # only `explain` needs them: importing every rule would slow the key in all other commands
    from megaspec.commands.codes import CODES
    from megaspec.rules.table import RULES

    return (*RULES, *CODES)
