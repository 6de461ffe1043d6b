"""The ranks of one node of a job of several: `python -P -m megaspec_launchers.node OPTIONS -- train WORDS`.

A batch script or manifest starts it once on each node. It starts the node's ranks with the variables that torchrun
would set, passes requests to stop on, and ends with the run's own exit code, which torchrun turns into 1. Where a job
has one node alone it becomes `megaspec train`, whose own launcher does all that and more. Never imports torch.
"""

from megaspec.launcher.stop import REQUESTS, STACKS, leave_on_request

if __name__ == "__main__":
    leave_on_request(["train"])  # first of all: before what follows is imported nobody else hears a request

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megaspec.core.errors import HardwareError, RecipeError, printable
from megaspec.core.standard_error import survive_full_disk
from megaspec.launcher.exit_file import Exit, read_exit
from megaspec.launcher.memory_kills import memory_kills
from megaspec_launchers.job_hosts import JobHosts
from megaspec_launchers.outcome import CAUSES, HANG, INTERNAL, PREEMPTED, RankEnd, judge
from megaspec_launchers.signals import StopRequests

# How long the other ranks may go on after one has failed: they can't finish a step without it.
AFTER_FAILURE_SECONDS = 5.0
# How long another node may take to say in the run's folder why the run ended.
CAUSE_SECONDS = 5.0
POLL_SECONDS = 0.1
# Kubeflow's training operator takes an exit code from 128 on for a failure after which a pod is started again.
RETRYABLE = 128
RESTARTED = (HANG, PREEMPTED)
# Of another world, or of a scheduler's controller: they are not those of this node's ranks.
WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Node:
    """A node's place in its job."""

    rank: int
    """0 on the node that the others meet on."""
    nodes: int
    ranks: int
    """Ranks of each node."""
    host: str
    """Name or address of node 0."""
    port: int
    """Of the store where ranks meet."""
    job: str
    """The same on all nodes, and another in each start of the job."""

    def environment(self, local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables of one rank. See megaspec_launchers/environment.py, which reads them."""
        made = without_world(environ)
        made |= {
            "RANK": str(self.rank * self.ranks + local_rank),
            "WORLD_SIZE": str(self.nodes * self.ranks),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "GROUP_RANK": str(self.rank),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RUN_ID": self.job,
        }
        made.setdefault("OMP_NUM_THREADS", str(_threads(self.ranks)))
        return made


def without_world(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which no world is."""
    return {name: value for name, value in environ.items() if name not in WORLD and not name.startswith("TORCHELASTIC")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a node. -> the run's exit code (core/errors.py)."""
    options, words = _parsed(list(sys.argv[1:] if arguments is None else arguments))
    command = [sys.executable, "-P", "-m", "megaspec.cli", *words]
    try:
        # the only node that is left of several stays one of theirs: its ranks find their layout as all of them do
        if options.nodes == 1 and options.job_dir is None:
            return _told(_alone(command, options.retryable), options.retryable)
        node = Node(
            rank=_node_rank(options, os.environ),
            nodes=options.nodes,
            ranks=options.ranks,
            host=options.host,
            port=options.port,
            job=options.job,
        )
        hosts = _hosts_of_job(options, node, os.environ)
    except RecipeError as error:
        _say(str(error))
        return RecipeError.exit_code
    code = run_node(node, command, run_dir=options.run_dir, grace_seconds=options.grace, hosts=hosts)
    return _told(code, options.retryable)


def run_node(
    node: Node, command: Sequence[str], *, run_dir: Path, grace_seconds: float, hosts: JobHosts | None = None
) -> int:
    """Starts `command` once for each rank of a node, and returns when all have ended. -> the run's exit code.

    SIGTERM, SIGINT, SIGHUP or SIGUSR1 here reaches every rank as SIGTERM; ranks that still run `grace_seconds` later,
    or at a second request, are killed. When a rank fails the others are stopped. SIGUSR2 makes ranks write stacks.
    `hosts`: those of a job whose scheduler is told which to leave out. None is started where the run keeps away from
    one of them.
    """
    suspicions = 0
    if hosts is not None:
        try:
            suspicions = hosts.begin()
        except (HardwareError, RecipeError) as error:
            if node.rank == 0:
                _say(str(error))  # the other nodes found the same
            return error.exit_code
    before = read_exit(run_dir)
    killed_before = memory_kills()
    with StopRequests() as stop:
        attempt = _Ranks(node, stop, grace_seconds)
        try:
            for local_rank in range(node.ranks):
                attempt.start(local_rank, command)
            is_stop_noted = False
            while attempt.running:
                attempt.look()
                if hosts is not None and attempt.requests and not is_stop_noted:
                    is_stop_noted = True
                    hosts.note_stop()
                time.sleep(POLL_SECONDS)
        finally:
            attempt.kill()
    killed = None
    now = memory_kills()
    if now is not None and killed_before is not None:
        killed = now - killed_before
    outcome = judge(attempt.ends, memory_kills=killed or 0)
    if outcome.cause is not None:
        _say(f"node {node.rank} of {node.nodes}: {outcome.cause}")
    if hosts is not None:
        hosts.note_end(outcome, was_asked=attempt.requests > 0)
    code = outcome.code
    if code in (HANG, INTERNAL):
        # ranks of another node may know why these missed one of theirs
        code = _cause_elsewhere(run_dir, before, code)
    if hosts is not None:
        hosts.leave_out(code, suspicions=suspicions)
    return code


@dataclass
class _Ranks:
    """The rank processes of a node."""

    node: Node
    stop: StopRequests
    grace_seconds: float
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    """By rank."""
    ends: list[RankEnd] = field(default_factory=list)
    signalled: dict[int, float] = field(default_factory=dict)
    """What they were sent to end them, and when first (monotonic seconds)."""
    requests: int = 0
    """Requests to stop that were passed on."""
    stacks: int = 0
    deadline: float = float("inf")

    def start(self, local_rank: int, command: Sequence[str]) -> None:
        environment = self.node.environment(local_rank, os.environ)
        # requests wait until the rank can hear them: megaspec.cli takes them up in its first lines
        former = signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
        try:
            # a session of its own: what it starts ends with it, and no signal reaches it past this process
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
        self.running[int(environment["RANK"])] = process

    def look(self) -> None:
        """Takes in which ranks have ended, passes signals on, and kills ranks whose time is over."""
        for rank, process in list(self.running.items()):
            status = process.poll()
            if status is not None:
                self._ended(rank, process, status)
        if self.stop.stacks > self.stacks:
            self.stacks = self.stop.stacks
            self._signal(STACKS)
        if self.stop.count > self.requests:
            self.requests = self.stop.count
            if self.requests == 1:
                _say(f"{self.stop.last}: ranks finish their step and save, within {self.grace_seconds:g} s")
                self._signal(signal.SIGTERM)
                self._not_later_than(self.grace_seconds)
            else:
                self.kill()
        elif time.monotonic() >= self.deadline:
            self.kill()

    def _ended(self, rank: int, process: subprocess.Popen[bytes], status: int) -> None:
        del self.running[rank]
        self._kill_group(process)  # what a rank has started and left behind
        now = time.monotonic()
        if status >= 0:
            end = RankEnd(rank, status, ended_at=now)
        else:
            by_us = self.signalled.get(-status, float("inf")) <= now
            end = RankEnd(rank, None, -status, by_us, ended_at=now)
        self.ends.append(end)
        if not end.is_clean and self.running and self.deadline == float("inf"):
            self._signal(signal.SIGTERM)
            self._not_later_than(min(self.grace_seconds, AFTER_FAILURE_SECONDS))

    def _not_later_than(self, seconds: float) -> None:
        self.deadline = min(self.deadline, time.monotonic() + seconds)

    def _signal(self, number: int) -> None:
        for process in self.running.values():
            if number != STACKS:
                self.signalled.setdefault(number, time.monotonic())
            process.send_signal(number)

    def kill(self) -> None:
        """Ends every rank that is left, with all that it has started."""
        for process in self.running.values():
            self.signalled.setdefault(signal.SIGKILL, time.monotonic())
            self._kill_group(process)
            process.kill()

    def _kill_group(self, process: subprocess.Popen[bytes]) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _alone(command: Sequence[str], retryable: bool) -> int:
    """`megaspec train` on the only node: in place of this process, unless its exit code is to be told otherwise."""
    environment = without_world(os.environ)
    if not retryable:
        os.execve(command[0], list(command), environment)
    with StopRequests() as stop:
        process = subprocess.Popen(command, env=environment)
        sent = 0
        stacks = 0
        while (status := process.poll()) is None:
            if stop.count > sent:
                sent = stop.count
                process.send_signal(signal.SIGTERM)
            if stop.stacks > stacks:
                stacks = stop.stacks
                process.send_signal(STACKS)
            time.sleep(POLL_SECONDS)
    if status < 0:
        return HANG
    return status


def _told(code: int, retryable: bool) -> int:
    """The exit code as the scheduler reads it."""
    if retryable and code in RESTARTED:
        return RETRYABLE + code
    return code


def _cause_elsewhere(run_dir: Path, before: Exit | None, code: int) -> int:
    """The exit code that a rank of any node wrote into the run's folder since `before`, where it names a cause."""
    give_up = time.monotonic() + CAUSE_SECONDS
    while time.monotonic() < give_up:
        said = read_exit(run_dir)
        if said is not None and said != before and said.code in CAUSES:
            return said.code
        time.sleep(POLL_SECONDS)
    return code


def _hosts_of_job(options: argparse.Namespace, node: Node, environ: Mapping[str, str]) -> JobHosts | None:
    """The hosts of a job whose scheduler can leave some out; None where it can't. RecipeError: this one has no name."""
    if options.job_dir is None:
        return None
    name = environ.get(options.host_from, "")
    if not name or "/" in name:
        raise RecipeError(f"{options.host_from}={name} must be the name of this node; the scheduler sets it")
    return JobHosts(
        folder=options.job_dir,
        run_dir=options.run_dir,
        start=options.job,
        restarts=options.restarts,
        name=name,
        node=node.rank,
        ranks=node.ranks,
        lost=options.lost,
    )


def _node_rank(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """The number of this node, which the scheduler says. RecipeError: it does not."""
    text = environ.get(options.rank_from, "")
    if not text.isascii() or not text.isdigit() or len(text) > 7 or int(text) >= options.nodes:
        raise RecipeError(
            f"{options.rank_from}={text} must be the number of this node, from 0 to {options.nodes - 1}; "
            "start this once on each node of the job, by its scheduler"
        )
    return int(text)


def _threads(ranks: int) -> int:
    """The cores that this process may use, shared out."""
    if not hasattr(os, "sched_getaffinity"):
        return 1
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def _parsed(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and behind `--` the words of megaspec."""
    parser = argparse.ArgumentParser(prog="megaspec_launchers.node", allow_abbrev=False)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True, help="of each node")
    parser.add_argument("--rank-from", default="NODE_RANK", metavar="VARIABLE", help="which says this node's number")
    parser.add_argument("--host", default="127.0.0.1", help="name or address of node 0")
    parser.add_argument("--port", type=int, default=29500)
    parser.add_argument("--job", default="job", help="the same on all nodes, another in each start")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--grace", type=float, default=120.0, help="seconds to save when asked to stop")
    parser.add_argument("--job-dir", type=Path, help="where the script of the job reads which hosts to leave out")
    parser.add_argument(
        "--host-from", default="SLURMD_NODENAME", metavar="VARIABLE", help="which says this node's name"
    )
    parser.add_argument("--restarts", type=int, default=0, help="how often the job was started before")
    parser.add_argument("--lost", default="", help="START HOST, of one that was lost in the start before")
    parser.add_argument("--retryable", action="store_true", help="end with 128 more where another start goes on")
    if "--" not in arguments:
        parser.error("the words of megaspec stand behind --")
    where = arguments.index("--")
    return parser.parse_args(arguments[:where]), arguments[where + 1 :]


def _say(text: str) -> None:
    print(printable(f"megaspec: {text}"), file=sys.stderr, flush=True)


if __name__ == "__main__":
    survive_full_disk()
    sys.exit(main())
