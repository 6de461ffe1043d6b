"""Commands and scripts in processes of their own that need not load torch and the project first: they are forked from
the server that tests' ranks are forked from (ranks.py), which has both.

What such a process changes of itself (plug-ins, the environment, its folder) is gone with it. The ranks that a command
launches are forked as well, as those of megaspec_launchers.rank_factory are, without a server that loads torch anew.
For what has to be shown of a process that begins with nothing, start one.
"""

import gc
import io
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from megaspec.launcher.loopback import loopback_variables
from megaspec_launchers import rank_server
from megaspec_launchers.rank_factory import RankFactory
from tests.ranks import forks
from tests.source_patch import Patch, install

ROOT = Path(__file__).parents[1]
CLIENT = Path(__file__).with_name("warm_client.py")


def warm_command(
    words: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float = 120.0
) -> subprocess.CompletedProcess:
    """`python -P -m megaspec WORDS`."""
    return _in_process(_command, list(words), cwd=cwd, env=env, timeout=timeout)


def warm_script(
    text: str, words: Sequence[str] = (), *, cwd: Path, env: Mapping[str, str], timeout: float = 120.0
) -> subprocess.CompletedProcess:
    """`python -P -c TEXT WORDS`."""
    return _in_process(_script, text, list(words), cwd=cwd, env=env, timeout=timeout)


class WarmFactory(RankFactory):
    """Forks ranks of a process that is forked itself, from the server of these tests. `patches` change the source of
    the project there."""

    def __init__(self, *arguments: Any, patches: Sequence[Patch] = (), **more: Any):
        super().__init__(*arguments, **more)
        self._patches = tuple(patches)

    def open(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        ours, theirs = socket.socketpair()
        environment = {"OMP_NUM_THREADS": str(self._threads)} | dict(os.environ) | loopback_variables()
        process = forks().Process(target=_serve_ranks, args=(theirs, environment, self._patches))
        process.start()
        theirs.close()
        self._process = _Watched(process)
        self._socket = ours
        path = [os.path.abspath(one) for one in sys.path if one]
        self._send({"do": "prepare", "path": path, "modules": self._modules})


def rank_servers_are_forks() -> None:
    """From now on the launchers of this process, which is warm, need not start one."""
    RankFactory.open = _open_by_fork


class _Watched:
    """A process of multiprocessing, of subprocess.Popen what is asked for here."""

    def __init__(self, process: Any):
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a fork", timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class WarmProcess(_Watched):
    """A process under way, in a session of its own; of subprocess.Popen what tests ask for that send it signals.

    `file`: a script, `python -P FILE WORDS`; without one, `python -P -m megaspec WORDS`. The processes that a
    supervisor starts for its attempts are forks of it. `log`: the end of this file gets all that it writes.
    """

    def __init__(
        self, words: Sequence[str], *, env: Mapping[str, str], file: Path | None = None, log: Path | None = None
    ):
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        self._said = Path(self._folder.name) / "err"
        files = {1: os.devnull, 2: str(self._said)}
        if log is not None:
            files = {1: str(log), 2: str(log)}
        places = (os.getcwd(), dict(env), _search_path(env), files)
        task: Callable[..., int] = _command
        arguments: tuple = (list(words),)
        if file is not None:
            task = _file
            arguments = (str(file), *arguments)
        super().__init__(forks().Process(target=_in_session, args=(places, task, arguments)))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    @property
    def stderr(self) -> io.StringIO:
        """What it has written so far."""
        if not self._said.exists():
            return io.StringIO()
        return io.StringIO(self._said.read_text(errors="replace"))

    def communicate(self, timeout: float | None = None) -> tuple[None, str]:
        self.wait(timeout)
        return None, self.stderr.read()


def warm_point(
    run: Path, log: Path, *, gpus: Sequence[str], threads: int | None, words: Sequence[str] = ()
) -> WarmProcess:
    """In the place of megaspec.sweep.child.start."""
    environment = dict(os.environ)
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if threads is not None:
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(one) for one in sys.path if one)
    return WarmProcess(["resume", str(run), *words], env=environment, log=log)


@contextmanager
def warm_program() -> Iterator[str]:
    """A command for shells that is `python -P -m megaspec`: a process that asks another for a warm one, hands on its
    files, its environment and what it is sent, and ends as that one ends."""
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        place = str(Path(folder) / "socket")
        server = forks().Process(target=_listen, args=(place, _search_path({})), daemon=False)
        server.start()
        while not os.path.exists(place):
            server.join(0.01)
            assert server.exitcode is None
        try:
            yield f"{sys.executable} -I -S {CLIENT} {place}"
        finally:
            server.kill()
            server.join()


def _listen(place: str, path: list[str]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{place}.new")
        listening.listen()
        os.rename(f"{place}.new", place)
        while True:
            asked, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                _answer(asked, path)
            asked.close()


def _answer(asked: socket.socket, path: list[str]) -> NoReturn:
    """Begins the command that a client asks for, and watches over it: it ends with its client."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, files, _, _ = socket.recv_fds(asked, 8, 3)
    data = b""
    while len(data) < int(size):
        data += asked.recv(1 << 16)
    words, cwd, env = json.loads(data)
    named = [one for one in env.get("PYTHONPATH", "").split(os.pathsep) if one]
    pid = os.fork()
    if pid == 0:
        os.setsid()
        asked.close()
        places = (cwd, env, [*named, *path], dict(enumerate(files)))
        _begin(places, _command, (words,))
    for fd in files:
        os.close(fd)
    with selectors.DefaultSelector() as selector:
        ended = os.pidfd_open(pid)
        selector.register(ended, selectors.EVENT_READ)
        selector.register(asked, selectors.EVENT_READ)
        while True:
            ready = [key.fd for key, _ in selector.select()]
            if ended in ready:
                break
            sent = asked.recv(64)
            if not sent:
                os.kill(pid, signal.SIGKILL)
                selector.unregister(asked)
            for number in sent:
                os.kill(pid, number)
    _, status = os.waitpid(pid, 0)
    # a client that was killed asks for nothing more
    with suppress(OSError):
        asked.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _in_process(
    task: Any, *arguments: Any, cwd: Path, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess:
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        places = (str(cwd), dict(env), _search_path(env), {1: str(out), 2: str(err)})
        process = forks().Process(target=_begin, args=(places, task, arguments))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(
                [str(one) for one in arguments], timeout, out.read_bytes(), err.read_bytes()
            )
        said, told = out.read_text(errors="replace"), err.read_text(errors="replace")
        return subprocess.CompletedProcess([str(one) for one in arguments], process.exitcode, said, told)


def _search_path(env: Mapping[str, str]) -> list[str]:
    """Where such a process finds modules: what its environment says, then Python's own."""
    named = [one for one in env.get("PYTHONPATH", "").split(os.pathsep) if one]
    ours = {os.path.realpath(ROOT / room) for room in ("", "kernels", "launchers")}
    return [*named, *(one for one in sys.path if os.path.realpath(one) not in ours)]


def _in_session(places: tuple, task: Any, arguments: tuple) -> NoReturn:
    os.setsid()
    _begin(places, task, arguments)


def _begin(places: tuple, task: Any, arguments: tuple) -> NoReturn:
    """Makes of a fork what was asked for, and ends it as the interpreter would."""
    import torch

    _keep_shared()
    cwd, env, path, files = places
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    # it may have been asked for, with another environment
    tempfile.tempdir = None
    sys.path[:] = path
    for number, file in files.items():
        fd = file
        if isinstance(file, str):
            fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(fd, number)
        os.close(fd)
    # those of the server know whether its own files can be sought in
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), errors="backslashreplace", write_through=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", "1")))
    rank_servers_are_forks()
    _finish(task, *arguments)


def _keep_shared() -> None:
    """No collection of garbage looks through what the server has loaded: it takes a third of a second, most of it for
    pages that are copied."""
    gc.freeze()


def _finish(task: Callable[..., Any], *arguments: Any, **more: Any) -> NoReturn:
    """Does it, and ends this process as the interpreter would."""
    code: Any = 1
    try:
        code = task(*arguments, **more)
    except SystemExit as error:
        code = error.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    if not isinstance(code, int):
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _command(words: list[str]) -> int:
    from megaspec.__main__ import main

    sys.argv = ["megaspec", *words]
    return main()


def _script(text: str, words: list[str]) -> int:
    sys.argv = ["-c", *words]
    exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})
    return 0


def _file(file: str, words: list[str]) -> int:
    from megaspec_launchers import attempt_process

    attempt_process.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": _start_by_fork})
    sys.argv = [file, *words]
    runpy.run_path(file, run_name="__main__")
    return 0


def _start_by_fork(
    command: Sequence[str],
    *,
    pass_fds: Sequence[int],
    stdin: int,
    start_new_session: bool,
    env: Mapping[str, str],
    preexec_fn: Callable[[], None],
) -> "_Fork":
    """Of subprocess.Popen what an AttemptProcess asks for: a module of the project, `python -P -m MODULE WORDS`."""
    assert (stdin, start_new_session) == (subprocess.DEVNULL, True)
    _, _, _, module, *words = command
    # what this one is sent from here on is the other's
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return _Fork(pid)
    os.setsid()
    preexec_fn()
    _keep_files(*pass_fds)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [module, *words]
    _finish(runpy.run_module, module, run_name="__main__", alter_sys=True)


def _keep_files(*fds: int) -> None:
    """Closes all others of this process but for its output, as in a process that is started."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    kept = sorted({0, 1, 2, *fds})
    for this, after in pairwise([*kept, os.sysconf("SC_OPEN_MAX")]):
        os.closerange(this + 1, after)


class _Fork:
    """Of subprocess.Popen what a RankFactory and an AttemptProcess ask for."""

    def __init__(self, pid: int):
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        end = None
        if timeout is not None:
            end = time.monotonic() + timeout
        while self.poll() is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.005)
        return self.poll()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _serve_ranks(control: socket.socket, env: dict[str, str], patches: Sequence[Patch] = ()) -> NoReturn:
    """What rank_server.py does as a process of its own."""
    _keep_shared()
    install(patches)
    if os.getsid(0) != os.getpid():
        os.setsid()
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    signal.pthread_sigmask(signal.SIG_BLOCK, rank_server.HELD_BACK)
    job = rank_server.serve(control)
    rank_server.leave(0 if job is None else rank_server.run(job))


def _open_by_fork(factory: Any) -> None:
    """RankFactory.open, with a fork of this process in the place of a server that is started."""
    if factory._process is not None and factory._process.poll() is None:
        return
    factory.close()
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        _keep_files(theirs.fileno())
        _serve_ranks(theirs, {"OMP_NUM_THREADS": str(factory._threads)} | dict(os.environ) | loopback_variables())
    theirs.close()
    factory._process = _Fork(pid)
    factory._socket = ours
    path = [os.path.abspath(one) for one in sys.path if one]
    factory._send({"do": "prepare", "path": path, "modules": factory._modules})
