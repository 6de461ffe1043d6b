"""`megaspec checkpoint fetch URL --out RUN`: a run folder from the copies that checkpoint.copy_to made."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaspec.checkpoint.lock import RunLock
from megaspec.checkpoint.remote import SPEC, Remote
from megaspec.core.bounded_json import MAX_BYTES, parse_json
from megaspec.core.errors import CheckpointError, WriteError, printable
from megaspec.core.regular_files import read_inside
from megaspec.rules.belonging import in_words, unlike


class MixedError(CheckpointError):
    """A copy of one run, and the spec.json of another."""


def add_parser(commands: Any) -> None:
    """The parser of `checkpoint fetch`."""
    text = "bring the newest copy at a URL of checkpoint.copy_to into a run folder, every byte checked"
    command = commands.add_parser("fetch", help=text, description=text)
    command.add_argument("url", metavar="URL", help="what checkpoint.copy_to said")
    command.add_argument("--out", metavar="RUN", type=Path, required=True, help="folder of the run, new or there")
    command.add_argument("--step", metavar="N", type=int, help="of the copy; default: the newest that is good")


def run(args: argparse.Namespace) -> int:
    """Download, verify, publish. -> 0. CheckpointError: no copy is good, or it is another run's than the spec.json that
    it would lie beside; WriteError: it can't be written here."""
    remote = Remote(args.url, name="", error=CheckpointError)
    steps = remote.steps()
    if args.step is not None:
        steps = [step for step in steps if step == args.step]
    if not steps:
        wanted = "" if args.step is None else f" of step {args.step}"
        raise CheckpointError(f"{args.url} holds no whole copy of a checkpoint{wanted}")
    problems: list[str] = []
    with RunLock(args.out):
        where, spec = _spec_beside(args.out, remote)
        for step in reversed(steps):
            try:
                if spec is not None:
                    _refuse_mix(remote, step, where, spec)
                path = remote.download(args.out, step)
            except (WriteError, MixedError):
                raise
            except CheckpointError as error:
                problems += [str(problem) for problem in error.problems]
                print(printable(f"megaspec: step {step} is not good: {error}", keep="\n"), file=sys.stderr)
                continue
            print(printable(f"{path}: step {step} of {args.url}; megaspec resume {args.out} goes on"))
            return 0
    raise CheckpointError([f"{args.url}: no copy is good", *problems])


def _spec_beside(out: Path, remote: Remote) -> tuple[str, dict[str, Any] | None]:
    """Where the spec.json is that a checkpoint will lie beside, and what it says: that of the folder, or, since it is
    brought as well, the one at the URL. CheckpointError: it is damaged."""
    if not (out / SPEC).exists():
        return f"{remote.url}/{SPEC}", remote.run_spec()
    try:
        spec = parse_json(read_inside(out, SPEC, limit=MAX_BYTES))
    except OSError as error:
        raise CheckpointError(f"{out / SPEC} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{out / SPEC} is damaged: {error}") from None
    if not isinstance(spec, dict):
        raise CheckpointError(f"{out / SPEC} is damaged: it holds no object")
    return str(out / SPEC), spec


def _refuse_mix(remote: Remote, step: int, where: str, spec: Mapping[str, Any]) -> None:
    """MixedError: the copy of a step is of another run than the Spec that was found `where`. CheckpointError: its
    manifest is damaged."""
    copy = remote.identity(step)
    if copy is None:
        return
    changes = unlike(copy, spec)
    if changes:
        text = (
            f"step {step} of {remote.url} is of {copy.spec.get('name')} ({copy.spec.get('run_dir')}), and {where} of "
        )
        text += f"{spec.get('name')}: {in_words(changes)}; nothing goes on from one with the other"
        raise MixedError(f"{text}; take --step N of a copy that is its own, or another --out")
