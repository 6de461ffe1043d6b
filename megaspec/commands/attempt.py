"""A supervised run's attempts, one after the other: `python -P -m megaspec.commands.attempt JSON FD`.

Started by `megaspec train --supervise`, never by hand. FD is a socket; a JSON object a line: an attempt to make, and
what it came to (megaspec_launchers/attempt_process.py). It holds the run's lock while an attempt is under way, and
keeps the process that ranks are forked from warm between two.
"""

import sys

from megaspec.launcher.stop import leave_on_request

if __name__ == "__main__":
    leave_on_request(["resume"])  # first of all: what follows takes seconds to import

import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaspec.commands.layouts import NO_LAYOUT
from megaspec.commands.starting import prepare_layout, start_ranks, step_saved
from megaspec.core.errors import MegaspecError, RecipeError, WriteError, printable
from megaspec.core.regular_files import disk_failures_told
from megaspec.core.standard_error import survive_full_disk
from megaspec.estimate.target import detect_target
from megaspec.launcher import exit_file
from megaspec.plugins import load
from megaspec_launchers.local import ENTRY, PRELOADED, threads_of_a_rank
from megaspec_launchers.outcome import Outcome
from megaspec_launchers.rank_factory import RankFactory
from megaspec_launchers.restarts import HARDWARE


@dataclass(frozen=True)
class Setup:
    """What is the same for all attempts."""

    run_dir: str
    memory: str = "check"
    config_dirs: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    meeting: str | None = None
    """A folder of the supervisor's, in which ranks meet."""
    entry: str = ENTRY
    """Of ranks; another one in tests."""


@dataclass
class Attempts:
    """What is kept from one attempt to the next."""

    setup: Setup
    factory: RankFactory | None = None
    ranks: int = 0
    """Ranks that the factory's threads are shared out for."""
    shown: dict[str, Any] = field(default_factory=dict)
    """The layout whose plan was printed last."""
    outcome: Outcome = field(default_factory=lambda: Outcome(0, None))

    def make(self, job: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
        """One attempt: {"attempt", "why", "places", "device"}. Tells its layout, {"layout", "world_size"}, once it has
        one, and in the end {"code", "why", "has_no_layout"}."""
        target = detect_target()
        if target.device != job["device"]:
            why = f"the run is on {job['device']}, and there is none that answers"
            print(printable(f"megaspec: {why}"), file=sys.stderr, flush=True)
            tell({"code": HARDWARE, "why": why, "has_no_layout": True})
            return
        if target.device != "cuda":
            target = target.model_copy(update={"places": job["places"]})
        try:
            taken, prepared = prepare_layout(
                Path(self.setup.run_dir), target, memory=self.setup.memory, config_dirs=self.setup.config_dirs
            )
        except MegaspecError as error:
            tell(_failed(error))
            return
        layout = {"layout": taken.option.name, "world_size": prepared.spec.world_size}
        tell(layout)
        folder = prepared.folder
        self._warm_up(prepared.spec.world_size)
        self.outcome = Outcome(0, None)
        try:
            code = start_ranks(
                prepared,
                target,
                record=lambda: exit_file.begin(folder, step=step_saved(folder)),
                is_shown=layout != self.shown,
                gives_up=False,
                arguments={"why": job["why"]},
                entry=self.setup.entry,
                max_restarts=0,
                factory=self.factory,
                first_attempt=job["attempt"],
                meeting=self.setup.meeting,
                heard=self._hear,
            )
        except MegaspecError as error:
            tell(_failed(error))
            return
        self.shown = layout
        tell({"code": code, "why": str(self.outcome), "has_no_layout": False})

    def _hear(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def _warm_up(self, ranks: int) -> None:
        """A process that forks ranks, with the threads of so many."""
        # a number that the environment says is the same for any number of ranks
        is_same = self.ranks == ranks or "OMP_NUM_THREADS" in os.environ
        if self.factory is not None and is_same:
            return
        self.close()
        module, _, _ = self.setup.entry.partition(":")
        self.factory = RankFactory((*PRELOADED, module), threads=threads_of_a_rank(ranks))
        self.ranks = ranks

    def close(self) -> None:
        """Ends the process that forks ranks."""
        if self.factory is not None:
            self.factory.close()
            self.factory = None


def _failed(error: MegaspecError) -> dict[str, Any]:
    """What an attempt came to that ended before its ranks had started; told on stderr as the command line does."""
    text = str(error)
    separator = "\n" if "\n" in text else " "
    print(printable(f"megaspec:{separator}{text}", keep="\n"), file=sys.stderr, flush=True)
    has_no_layout = isinstance(error, RecipeError) and any(p.code == NO_LAYOUT for p in error.problems)
    return {"code": error.exit_code, "why": error.problems[0].message, "has_no_layout": has_no_layout}


def serve(setup: Setup, control: socket.socket) -> None:
    """Makes attempts until the supervisor is gone."""
    attempts = Attempts(setup)

    def tell(message: dict[str, Any]) -> None:
        sys.stdout.flush()
        control.sendall(json.dumps(message).encode() + b"\n")

    try:
        with control, control.makefile("rb") as jobs:
            for line in jobs:
                try:
                    with disk_failures_told():
                        attempts.make(json.loads(line), tell)
                except WriteError as error:
                    tell(_failed(error))
    except (BrokenPipeError, ConnectionResetError):
        pass  # the supervisor is gone
    finally:
        attempts.close()


def setup_of(text: str) -> Setup:
    """What the supervisor wrote."""
    fields = json.loads(text)
    for name in ("config_dirs", "plugins"):
        fields[name] = tuple(fields[name])
    return Setup(**fields)


if __name__ == "__main__":
    survive_full_disk()
    given = setup_of(sys.argv[1])
    load(given.plugins)
    serve(given, socket.socket(fileno=int(sys.argv[2])))
