"""Commands and scripts in processes of their own that need not load torch and the project first: they are forked from
the server that tests' ranks are forked from (ranks.py), which has both.

What such a process changes of itself (plug-ins, the environment, its folder) is gone with it. The ranks that a command
launches are forked as well, as those of megaspec_launchers.rank_factory are, without a server that loads torch anew.
For what has to be shown of a process that begins with nothing, start one.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.ranks import forks

ROOT = Path(__file__).parents[1]


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


def _in_process(
    task: Any, *arguments: Any, cwd: Path, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess:
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        places = (str(cwd), dict(env), _search_path(env), str(out), str(err))
        process = forks().Process(target=_begin, args=(places, task, arguments))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired([str(one) for one in arguments], timeout, out.read_bytes(), err.read_bytes())
        said, told = out.read_text(errors="replace"), err.read_text(errors="replace")
        return subprocess.CompletedProcess([str(one) for one in arguments], process.exitcode, said, told)


def _search_path(env: Mapping[str, str]) -> list[str]:
    """Where such a process finds modules: what its environment says, then Python's own."""
    named = [one for one in env.get("PYTHONPATH", "").split(os.pathsep) if one]
    ours = {os.path.realpath(ROOT / room) for room in ("", "kernels", "launchers")}
    return [*named, *(one for one in sys.path if os.path.realpath(one) not in ours)]


def _begin(places: tuple, task: Any, arguments: tuple) -> NoReturn:
    """Makes of a fork what was asked for, and ends it as the interpreter would."""
    import torch

    from megaspec_launchers.rank_factory import RankFactory

    cwd, env, path, out, err = places
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = path
    for number, name in ((1, out), (2, err)):
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(fd, number)
        os.close(fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", "1")))
    RankFactory.open = _open_by_fork
    code = 1
    try:
        code = task(*arguments)
    except SystemExit as error:
        code = error.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    _leave(code or 0)


def _leave(code: int) -> NoReturn:
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


class _Fork:
    """Of subprocess.Popen what a RankFactory asks for."""

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
        """As long as it takes: `timeout` is there for a server that is stopped, which no test of these does."""
        if self._code is None:
            _, status = os.waitpid(self.pid, 0)
            self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _open_by_fork(factory: Any) -> None:
    """RankFactory.open, with a fork of this process in the place of a server that is started."""
    from megaspec.launcher.loopback import loopback_variables
    from megaspec_launchers import rank_server

    if factory._process is not None and factory._process.poll() is None:
        return
    factory.close()
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        ours.close()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.setdefault("OMP_NUM_THREADS", str(factory._threads))
        os.environ.update(loopback_variables())
        signal.pthread_sigmask(signal.SIG_BLOCK, rank_server.HELD_BACK)
        job = rank_server.serve(theirs)
        rank_server.leave(0 if job is None else rank_server.run(job))
    theirs.close()
    factory._process = _Fork(pid)
    factory._socket = ours
    path = [os.path.abspath(one) for one in sys.path if one]
    factory._send({"do": "prepare", "path": path, "modules": factory._modules})
