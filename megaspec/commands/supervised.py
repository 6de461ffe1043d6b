"""`train --supervise` and `resume --supervise`: one command that keeps a run alive, attempt after attempt.

The supervisor prepares the run, so that what is wrong with it is told at once, and then has a process of its own make
each attempt: it survives when that one is killed, and leaves nothing behind when it ends. Before an attempt it reads
which devices may be used; the attempt takes the first layout that fits them, and goes on from the newest good
checkpoint. Never imports torch.
"""

import fcntl
import json
import os
import random
import selectors
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from megaspec.checkpoint.fallback import file_elsewhere
from megaspec.checkpoint.lock import RunLock
from megaspec.commands.attempt import Setup
from megaspec.commands.layouts import LayoutOption, first_that_fits, layout_options, resolve_layout, room, specs_of_list
from megaspec.commands.starting import Prepared, record_environment
from megaspec.compose.compose import Composed, recompose
from megaspec.core.errors import (
    HardwareError,
    MegaspecError,
    Preempted,
    Problem,
    RecipeError,
    RunLockedError,
    WriteError,
    printable,
)
from megaspec.core.regular_files import open_inside
from megaspec.data.urls import RemoteData
from megaspec.estimate.target import Target, detect_target, gpu_identifiers
from megaspec.launcher import exit_file
from megaspec.launcher.attempts import (
    ATTEMPTS,
    AttemptEnd,
    AttemptStart,
    last_step,
    read_attempts,
    tell_attempt,
)
from megaspec.launcher.devices import named_devices, usable_devices
from megaspec.launcher.heartbeat import read_heartbeat
from megaspec.launcher.spec import LauncherSpec
from megaspec.launcher.suspects import (
    AVOIDED,
    HOST_FAILURES,
    Avoided,
    avoid,
    read_avoided,
    read_suspects,
    read_whole_avoided,
)
from megaspec.log.sinks import METRICS
from megaspec.plugins import loaded
from megaspec.resolve.gather import gather_facts
from megaspec.run_folder import newest_step, read_run, refused
from megaspec.spec import Spec
from megaspec_launchers.attempt_process import AttemptProcess, AttemptResult, adopt_orphans, end_orphans, watch_attempt
from megaspec_launchers.local import ENTRY
from megaspec_launchers.restarts import HARDWARE, Ended, Verdict, decide
from megaspec_launchers.signals import StopRequests

INTERRUPTED = 130
SUPERVISE_HELP = "start the run again after failures, on the devices left (launcher.restarts, launcher.layouts)"
_CUDA = "CUDA_VISIBLE_DEVICES"
# Devices that the console names.
_MOST_SHOWN = 16

Prepare = Callable[[Target, LayoutOption], Prepared]


def refuse_other_starters(launcher: LauncherSpec) -> None:
    """RecipeError: something else starts the ranks, or starts them again."""
    if "RANK" in os.environ:
        text = "--supervise starts the ranks of this machine itself, and torchrun has started this one (RANK is set);"
        text += " start megaspec without torchrun, or give --max-restarts to torchrun in place of --supervise"
        raise RecipeError([Problem("", text, code="supervise")])
    if launcher.max_restarts:
        text = f"launcher.max_restarts={launcher.max_restarts} is for runs without --supervise, which starts them again"
        text += " by launcher.restarts; drop it"
        raise RecipeError([Problem("launcher.max_restarts", text, code="supervise")])


def refuse_avoided_host(place: Path) -> None:
    """HardwareError: the run keeps away from this host. RecipeError: see `read_avoided`."""
    host = socket.gethostname()
    why = read_avoided(place).hosts.get(host)
    if why is None:
        return
    text = f"host {host} failed this run {HOST_FAILURES} times ({why}); start it on another one, or delete the line of"
    raise HardwareError(f"{text} {host} in {place / AVOIDED} once it is mended")


def supervise(
    composed: Composed,
    prepare: Prepare,
    *,
    place: Path,
    memory: str,
    config_dirs: Sequence[str] = (),
    entry: str = ENTRY,
    known: Sequence[RemoteData] = (),
) -> int:
    """Trains a run to its end, through failures. -> exit code.

    `prepare` makes the run, or finds it, in a layout. `place`: where its folder is to be; what devices it may use may
    stand there already. `entry`: of ranks. `known`: see `gather_facts`, of a run that goes on. RecipeError: the run
    can't start, or a layout of its list is wrong, or a file of its folder that names devices. HardwareError: it keeps
    away from this host. RunLockedError: it has a supervisor, or another job has it.
    """
    refuse_other_starters(composed.recipe.launcher)
    options = layout_options(composed, config_dirs)
    try:
        refuse_avoided_host(place)
        devices = machine_devices(place)
    except OSError as error:
        raise refused(error) from None
    target = target_with(detect_target(), devices)
    specs_of_list(options, target, gather_facts(composed.recipe, known))
    _, prepared = first_that_fits(options, target, lambda option: prepare(target, option))
    assert prepared.lock is not None, "a run without its lock"
    if prepared.is_finished:
        prepared.lock.release()
        return 0
    try:
        record_environment(prepared.folder)
    finally:
        # an attempt takes it, each in its turn
        prepared.lock.release()
    meeting_folder = tempfile.TemporaryDirectory(prefix="megaspec-", ignore_cleanup_errors=True)
    with only_supervisor(prepared.folder), meeting_folder as meeting:
        setup = Setup(
            run_dir=str(prepared.folder),
            memory=memory,
            config_dirs=tuple(config_dirs),
            plugins=loaded(),
            meeting=meeting,
            entry=entry,
        )
        adopt_orphans()
        with StopRequests() as stop:
            return Supervisor(setup, prepared.folder, prepared.spec, stop).run()


def machine_devices(run_dir: Path) -> tuple[str, ...] | None:
    """Identifiers of the devices that a run may use now; None where nothing limits them. RecipeError: see
    `named_devices` and `read_avoided`. OSError: a file of the run's folder can't be read."""
    host = socket.gethostname()
    avoided = [one.device for one in read_avoided(run_dir).entries if one.host == host]
    return usable_devices(gpu_identifiers(), named_devices(run_dir), avoided)


def target_with(target: Target, devices: tuple[str, ...] | None) -> Target:
    """This machine with the devices that a run may use."""
    if devices is None:
        return target
    if target.device == "cuda":
        return target.model_copy(update={"gpus": len(devices)})
    return target.model_copy(update={"places": len(devices)})


@contextmanager
def only_supervisor(folder: Path) -> Iterator[None]:
    """While entered, no other supervisor keeps this run. RunLockedError: one does. WriteError."""
    try:
        fd = open_inside(folder, ATTEMPTS, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise WriteError(f"{folder / ATTEMPTS}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunLockedError(f"run_dir={folder} has a supervisor already; stop that one first") from None
        except OSError:
            pass  # a file system without it: the run's own lock lets one attempt train
        yield
    finally:
        os.close(fd)


@dataclass
class Supervisor:
    """Makes attempts until the run is done, is asked to stop, or is given up."""

    setup: Setup
    folder: Path
    spec: Spec
    """With which it began."""
    stop: StopRequests
    process: AttemptProcess | None = None
    ends: list[Ended] = field(default_factory=list)
    devices: tuple[str, ...] | None = None
    """What the attempt under way may use."""
    seen: tuple[str, ...] | None = None
    """What could be used at the last look."""
    judged: tuple[str, ...] | None = None
    """What could be used when it was last asked whether the attempt should go on."""
    told: str = ""
    """Why devices can't be read, as it was said last."""
    newest: int = 0
    """The newest step that was ever saved."""

    def run(self) -> int:
        """-> exit code."""
        self.newest = newest_step(self.folder)
        attempt = 0
        why = ""
        before = read_attempts(self.folder).attempts
        if before:
            attempt = before[-1].start.attempt + 1
            why = _what_was_before(before[-1].end)
        try:
            while True:
                result = self._attempt(attempt, why)
                verdict = self._judge(attempt, result)
                if not verdict.again:
                    return self._end(verdict)
                if not self._wait(verdict.wait_seconds):
                    return self._stopped()
                why = f"attempt {attempt} ended: {result.why or exit_file.MEANINGS.get(result.code, result.code)}"
                attempt += 1
        finally:
            self._close_process()

    def _attempt(self, attempt: int, why: str) -> AttemptResult:
        self.devices = self._look_at_devices()
        self.seen = self.devices
        self.judged = self.devices
        start = AttemptStart(attempt, socket.gethostname(), os.getpid(), self.devices, why)
        self._note(start)
        if why:
            _say(f"attempt {attempt} begins{self._on_devices()}")
        process = self._process_for_devices()
        places = None
        if self.devices is not None:
            places = len(self.devices)
        if not process.send({"attempt": attempt, "why": why, "places": places, "device": self.spec.device}):
            result = process.ended()
        else:
            result = watch_attempt(
                process,
                self.stop,
                look=self._changed_devices,
                look_seconds=self.spec.launcher.restarts.look_seconds,
                grace_seconds=self.spec.launcher.grace_seconds,
                is_silent=lambda: self._is_silent(attempt, process.pid),
                timeout_seconds=self.spec.launcher.timeout_seconds,
            )
        if result.has_no_layout and self.ends:
            # there were devices enough when this supervisor started
            result = replace(result, code=HARDWARE, why=f"devices were lost, or are avoided: {result.why}")
        return result

    def _is_silent(self, attempt: int, launcher: int) -> bool:
        """Whether the heartbeats of an attempt are missed. Before its ranks are started it has none."""
        beat = read_heartbeat(self.folder)
        return beat is not None and (beat.attempt, beat.pid) == (attempt, launcher) and beat.is_missed()

    def _process_for_devices(self) -> AttemptProcess:
        """The process that makes attempts, started where there is none, or where it would use other devices."""
        environment = {"PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path if path)}
        if self.devices is not None and gpu_identifiers():
            environment[_CUDA] = ",".join(self.devices)
        if self.process is not None and self.process.environment == environment and self.process.is_alive():
            return self.process
        self._close_process()
        setup = json.dumps(asdict(self.setup))
        self.process = AttemptProcess([sys.executable, "-P", "-m", "megaspec.commands.attempt", setup], environment)
        return self.process

    def _close_process(self) -> None:
        """Ends the process of attempts, where there is one, and what it and its ranks left behind."""
        if self.process is not None:
            self.process.close()
            end_orphans()

    def _look_at_devices(self) -> tuple[str, ...] | None:
        """Those that may be used now; what they were where the file that names them can't be read."""
        try:
            found = machine_devices(self.folder)
        except (RecipeError, OSError) as error:
            if str(error) != self.told:
                self.told = str(error)
                _say(f"{error}; the devices stay as they were")
            return self._without_avoided(self.devices)
        self.told = ""
        if found is None and self.spec.device == "cuda":
            # no GPU answers any more; a run on GPUs does not go on on the CPU
            return ()
        return found

    def _without_avoided(self, devices: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """Devices less those that whole lines of the file say to keep away from: the last attempt may have added one,
        whatever else is damaged there."""
        if devices is None:
            return None
        host = socket.gethostname()
        try:
            entries = read_whole_avoided(self.folder).entries
        except OSError:
            return devices
        avoided = [one.device for one in entries if one.host == host]
        return usable_devices((), devices, avoided)

    def _changed_devices(self) -> str:
        """Why the attempt under way is to be ended for others; "" where it goes on, also since the files of the run
        can't be read now."""
        try:
            return self._why_others()
        except WriteError as error:
            _say(f"{error}; the devices stay as they were")
            return ""

    def _why_others(self) -> str:
        """As `_changed_devices`. WriteError: a failing disk."""
        now = self._look_at_devices()
        before = self.seen
        self.seen = now
        # a driver that does not answer once is no reason: two looks in a row have to see the same
        if now != before or now == self.judged:
            return ""
        self.judged = now
        spec = read_run(self.folder).spec
        if self.devices is not None and now is not None:
            # ranks take the first of them
            gone = [name for name in self.devices[: spec.world_size] if name not in now]
            if gone:
                return f"device {', '.join(gone)} may not be used any more"
        target = target_with(detect_target(), now)
        if room(target) is not None and room(target) <= spec.world_size:
            return ""
        composed = recompose(read_run(self.folder).recipe, "recipe.json", (), self.setup.config_dirs)
        facts = gather_facts(composed.recipe, spec.remote)
        try:
            _, resolved = first_that_fits(
                layout_options(composed, self.setup.config_dirs),
                target,
                lambda option: resolve_layout(option, target, facts),
            )
        except RecipeError:
            return ""
        if resolved.world_size <= spec.world_size:
            return ""
        return f"devices came back: {resolved.world_size} ranks in place of {spec.world_size}"

    def _judge(self, attempt: int, result: AttemptResult) -> Verdict:
        """What follows an attempt; it is written down."""
        saved, spec = self._look_at_run()
        if result.code == HARDWARE and not result.has_no_layout:
            self._avoid_suspects(attempt)
        self.ends.append(Ended(time.monotonic(), result.code, saved > self.newest, result.is_planned))
        from_step = self.newest
        self.newest = max(self.newest, saved)
        if self.stop.count:
            verdict = Verdict(False, result.code, f"{self.stop.last} asked the supervisor to stop")
        elif result.has_no_layout:
            verdict = Verdict(False, result.code, "no layout fits the devices that are left")
        elif result.code == HARDWARE and socket.gethostname() in read_whole_avoided(self.folder).hosts:
            why = f"host {socket.gethostname()} failed {HOST_FAILURES} times; start the run on another one"
            verdict = Verdict(False, HARDWARE, why)
        else:
            verdict = decide(self.ends, spec.launcher.restarts, spread=random.random())
        elsewhere = file_elsewhere(spec.checkpoint.fallback_dir, self.folder, METRICS)
        end = AttemptEnd(
            attempt=attempt,
            code=result.code,
            reason=result.why,
            layout=result.layout,
            world_size=result.world_size,
            from_step=from_step,
            step=max(saved, last_step(self.folder, METRICS, elsewhere=elsewhere)),
            saved=saved,
            next=verdict.why,
        )
        self._note(end)
        if verdict.again:
            _say(f"attempt {attempt} ended with {result.code} ({result.why}), step {saved} is saved; {verdict.why}")
        return verdict

    def _look_at_run(self) -> tuple[int, Spec]:
        """The newest step that is saved, and the Spec. What a failing disk doesn't let be read now is as it was:
        whether the run can go on is for the next attempt to find."""
        try:
            return newest_step(self.folder), read_run(self.folder).spec
        except MegaspecError as error:
            _say(f"{error}; step {self.newest} is the newest that was seen")
            return self.newest, self.spec

    def _avoid_suspects(self, attempt: int) -> None:
        """Keeps the devices of suspected ranks away from what follows."""
        suspects = read_suspects(self.folder, attempt)
        named = self.devices or ()
        host = socket.gethostname()
        for rank, why in suspects.items():
            if rank < len(named):
                _say(f"device {named[rank]} (rank {rank}) is not used again: {why}")
                self._avoid(Avoided(host, named[rank], attempt, why))
        if any(rank < len(named) for rank in suspects):
            return
        # no device that could be kept away from: it counts against the host
        avoided = read_whole_avoided(self.folder).entries
        of_devices = {one.attempt for one in avoided if one.device is not None}
        failures = 1
        for one in read_attempts(self.folder).attempts:
            is_here = one.start.host == host and one.start.attempt not in of_devices
            if is_here and one.end is not None and one.end.code == HARDWARE:
                failures += 1
        if failures >= HOST_FAILURES:
            why = "; ".join(suspects.values()) or "suspected hardware"
            self._avoid(Avoided(host, None, attempt, why))

    def _avoid(self, what: Avoided) -> None:
        try:
            avoid(self.folder, what)
        except OSError as error:
            name = what.device or what.host
            raise WriteError(f"{self.folder / AVOIDED}: {error.strerror}; {name} is suspected") from None

    def _wait(self, seconds: float) -> bool:
        """-> False where a request to stop came meanwhile."""
        until = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.stop, selectors.EVENT_READ)
            while not self.stop.count:
                left = until - time.monotonic()
                if left <= 0:
                    return True
                selector.select(left)
                self.stop.clear()
        return False

    def _stopped(self) -> int:
        """A request to stop came while no attempt was under way."""
        self._end_for_good(Preempted.exit_code, f"{self.stop.last} while no attempt was under way")
        _say(f"{self.stop.last} while no attempt was under way: step {self.newest} is saved, start again to go on")
        if self.stop.last == "SIGINT":
            return INTERRUPTED
        return Preempted.exit_code

    def _end(self, verdict: Verdict) -> int:
        if verdict.code in (0, Preempted.exit_code):
            return verdict.code
        meaning = exit_file.MEANINGS.get(verdict.code, exit_file.MEANINGS[MegaspecError.exit_code])
        if self.stop.count:
            # ranks did not end in time, or were killed: as without a supervisor
            self._end_for_good(verdict.code, meaning)
            return verdict.code
        self._end_for_good(verdict.code, f"{meaning}; the supervisor starts it no more: {verdict.why}")
        _say(f"given up with exit code {verdict.code}: {verdict.why}; step {self.newest} is saved")
        _say(f"every attempt and its reason: {self.folder / ATTEMPTS}")
        return verdict.code

    def _end_for_good(self, code: int, meaning: str) -> None:
        """Says it in exit_code.json, unless another job has the run by now."""
        try:
            with RunLock(self.folder):
                exit_file.end_for_good(self.folder, code, meaning, step=self.newest)
        except (RunLockedError, WriteError):
            return

    def _note(self, what: AttemptStart | AttemptEnd) -> None:
        """A full disk costs the line, never the run."""
        try:
            tell_attempt(self.folder, what)
        except OSError as error:
            _say(f"{self.folder / ATTEMPTS}: {error.strerror}; the run goes on")

    def _on_devices(self) -> str:
        if self.devices is None:
            return ""
        text = ", ".join(self.devices[:_MOST_SHOWN])
        if len(self.devices) > _MOST_SHOWN:
            text += f" and {len(self.devices) - _MOST_SHOWN} more"
        return f" with devices {text}"


def _what_was_before(end: AttemptEnd | None) -> str:
    """What the first attempt of a supervisor follows, where the run had attempts before."""
    if end is None:
        return "the supervisor before this one ended without a word"
    return f"attempt {end.attempt} ended: {end.reason or exit_file.MEANINGS.get(end.code, end.code)}"


def _say(text: str) -> None:
    print(printable(f"megaspec: {text}"), file=sys.stderr, flush=True)
