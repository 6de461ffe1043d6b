"""The command line: parse, call, print. `plan` and everything else before ranks start runs without torch."""

import sys

from megaspec.launcher.stop import leave_on_request

if __name__ == "__main__":
    leave_on_request(sys.argv[1:])  # first of all: what follows takes seconds to import

import argparse
import json
import os
import re
from collections.abc import Sequence
from io import TextIOWrapper
from types import ModuleType
from typing import Any, NoReturn

from megaspec import __version__
from megaspec.commands import (
    bench,
    check,
    checkpoint,
    completion,
    data,
    diff,
    doctor,
    evaluate,
    explain,
    from_megatron,
    generate,
    hf,
    plan,
    recipes,
    report,
    resume,
    schema,
    show,
    sweep,
    train,
    tune,
    verify,
)
from megaspec.core.errors import MegaspecError, RecipeError, WriteError
from megaspec.core.problems import did_you_mean
from megaspec.core.regular_files import DISK_ERRORS, disk_failure
from megaspec.core.standard_error import survive_full_disk
from megaspec.plugins import load, take_flags

INTERRUPTED_EXIT = 130
_SWEEP = "only `megaspec train` runs several points"
_SHOW = "megaspec show prints the composed recipe, one section of it with its name, with --resolved every auto"
# What users of Hydra reach for.
_HYDRA_FLAGS = {"-m": _SWEEP, "--multirun": _SWEEP, "--cfg": _SHOW, "-c": _SHOW, "-p": _SHOW}

# Each command stands in a file of its own: `add_parser(commands)` adds the parser of that name, `run(args)` runs it.
COMMANDS: dict[str, ModuleType] = {
    "train": train,
    "resume": resume,
    "generate": generate,
    "hf": hf,
    "eval": evaluate,
    "tune": tune,
    "plan": plan,
    "show": show,
    "verify": verify,
    "data": data,
    "checkpoint": checkpoint,
    "from-megatron": from_megatron,
    "bench": bench,
    "diff": diff,
    "report": report,
    "doctor": doctor,
    "explain": explain,
    "check": check,
    "recipes": recipes,
    "schema": schema,
    "completion": completion,
    "sweep": sweep,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. -> exit code (core/errors.py); 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that can't show a letter shows a question mark
    words = list(sys.argv[1:]) if arguments is None else list(arguments)
    asks_json = _asks_json(words)
    code = 0
    try:
        packages, words = take_flags(words)
        load(packages)
        args = parse(words)
        code = COMMANDS[args.command].run(args)
        # here, where it can be told, and not when the interpreter ends
        sys.stdout.flush()
        return code
    except MegaspecError as error:
        text = str(error)
        # several problems stand below each other, a single one behind the name
        separator = "\n" if "\n" in text else " "
        print(f"megaspec:{separator}{text}", file=sys.stderr)
        if asks_json:
            print(json.dumps({"problems": [problem.as_json() for problem in error.problems]}, indent=1))
        codes = dict.fromkeys(p.code for p in error.problems if p.code)
        if codes and sys.stderr.isatty():
            print(f"more about it: megaspec explain {' | '.join(codes)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("megaspec: stopped by Ctrl-C", file=sys.stderr)
        return INTERRUPTED_EXIT
    except BrokenPipeError:
        # whoever read our output has gone
        _drop_output()
        return code or INTERRUPTED_EXIT
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        # commands tell of their own files: what has no name is behind `> FILE`
        failure = disk_failure(error)
        if error.filename is None:
            _drop_output()
            failure = WriteError(f"its output can't be written: {error.strerror}")
        print(f"megaspec: {failure}", file=sys.stderr)
        return code or WriteError.exit_code


def _asks_json(words: Sequence[str]) -> bool:
    """True where --json stands among our own words: those behind `--` are of another program."""
    for word in words:
        if word == "--":
            return False
        if word == "--json":
            return True
    return False


def _drop_output() -> None:
    """Keeps the interpreter from complaining when it flushes what can't be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        raise RecipeError(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """RecipeError: a command that does not exist, with the nearest one."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            hint = did_you_mean(value, action.choices)
            if not hint:
                hint = f"choose from {', '.join(map(repr, action.choices))}"
            raise RecipeError(f"{value}: no command of {self.prog}; {hint}")
        super()._check_value(action, value)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command and its words. Overrides may stand anywhere; an unknown flag is an error. Raises RecipeError."""
    parser = _Parser(prog="megaspec", description="Declarative training of large transformers.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"megaspec {__version__}")
    # taken out before: here for the help only
    parser.add_argument("--plugin", action="append", metavar="PACKAGE", help="add what a package offers; anywhere")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for module in COMMANDS.values():
        module.add_parser(commands)
    args, rest = parser.parse_known_args(arguments)
    flags = [r for r in rest if r.startswith("-")]
    if flags or (rest and not hasattr(args, "words")):
        raise RecipeError(_unknown_words(flags or rest, commands.choices[args.command]))
    if rest:
        args.words = [*args.words, *rest]
    return args


def _unknown_words(words: list[str], command: argparse.ArgumentParser) -> str:
    """Why the first of these words is refused, and what to write."""
    written = words[0]
    flag = written.partition("=")[0]
    hint = _HYDRA_FLAGS.get(flag)
    if not hint:
        known = sorted(set(re.findall(r"--[a-z][a-z-]*", command.format_help())))
        names = [name.removeprefix("--") for name in known]
        hint = did_you_mean(flag.lstrip("-"), names).replace("mean ", "mean --")
    if command.prog.endswith("from-megatron"):
        hint = "the flags of pretrain_gpt.py stand after --"
    if not hint and "=" in written:
        hint = f"settings have no dashes: {written.lstrip('-')}"
    if not hint and written.startswith("--") and "a.b=c" in command.format_usage():
        hint = f"settings have no dashes: {written.lstrip('-')}=VALUE"
    if not hint:
        hint = f"see megaspec {command.prog.split()[-1]} --help"
    return f"{written}: unknown; {hint}"


if __name__ == "__main__":
    survive_full_disk()
    sys.exit(main())
