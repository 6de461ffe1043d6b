"""File operations below chosen folders are recorded, or one of them fails. Python imports this module by itself in
every process that finds its folder in PYTHONPATH: the command, its launcher, ranks, and the writer of checkpoints.

The plan is a JSON file that MEGASPEC_TEST_FILE_OPERATIONS names; it is read anew in each process, also behind a fork:

    {"roots": [folders], "log": a file that gets a line for each operation, or null,
     "fail": {"kind", "site", "nth", "errno", "lasts", "once": a file that is made when it has failed} or null}

A site is where the project's code stands, as `file:function` of its innermost frames, and the name of the file.
"""

import builtins
import fcntl
import io
import json
import os
import re
import sys

VARIABLE = "MEGASPEC_TEST_FILE_OPERATIONS"
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
OURS = (os.path.join(ROOT, "megaspec") + os.sep, os.path.join(ROOT, "launchers") + os.sep)
FRAMES = 3

_open, _write, _close, _readlink, _getcwd = os.open, os.write, os.close, os.readlink, os.getcwd
_plan = None
_of_process = 0
_seen = 0
_has_failed = False
_is_busy = False


def plan():
    global _plan, _of_process, _seen, _has_failed
    if _of_process != os.getpid():
        _of_process = os.getpid()
        _seen = 0
        _has_failed = False
        _plan = None
        try:
            fd = _open(os.environ[VARIABLE], os.O_RDONLY)
        except (OSError, KeyError):
            return None
        with _FileIO(fd) as file:
            _plan = json.loads(_read_all(file))
    return _plan


_FileIO = io.FileIO
_read_all = io.FileIO.readall


def full_path(path, dir_fd=None):
    """None: no path below a root."""
    try:
        if isinstance(path, int):
            return _readlink(f"/proc/self/fd/{path}")
        path = os.fsdecode(path)
        if not path.startswith("/"):
            above = _getcwd() if dir_fd is None else _readlink(f"/proc/self/fd/{dir_fd}")
            path = f"{above}/{path}"
    except (OSError, TypeError, ValueError):
        return None
    return os.path.normpath(path)


def site_of(path, roots):
    """Where the project's code is, innermost first, and what it asks for, without what differs from run to run."""
    frames = []
    frame = sys._getframe(3)
    while frame is not None and len(frames) < FRAMES:
        name = frame.f_code.co_filename
        if name.startswith(OURS):
            frames.append(f"{os.path.relpath(name, ROOT)}:{frame.f_code.co_name}")
        frame = frame.f_back
    for root in roots:
        if path == root or path.startswith(root + "/"):
            path = f"<{os.path.basename(root)}>{path[len(root) :]}"
    path = re.sub(r"[0-9a-f]{6,}|\d+", "N", path)
    return f"{path} @ {' < '.join(frames)}"


def meet(kind, path, dir_fd=None):
    """Records an operation, or fails in its place."""
    global _seen, _has_failed, _is_busy
    if _is_busy:
        return
    now = plan()
    if now is None:
        return
    path = full_path(path, dir_fd)
    if path is None or not any(path == root or path.startswith(root + "/") for root in now["roots"]):
        return
    _is_busy = True
    try:
        site = site_of(path, now["roots"])
        if now["log"]:
            fd = _open(now["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            _write(fd, f"{kind}\t{site}\n".encode())
            _close(fd)
        fail = now["fail"]
        if fail is None or kind != fail["kind"] or site != fail["site"]:
            return
        _seen += 1
        if _has_failed and fail["lasts"]:
            raise OSError(fail["errno"], os.strerror(fail["errno"]), path)
        if _seen < fail["nth"]:
            return
        try:
            _close(_open(fail["once"], os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            if not fail["lasts"]:
                return
        _has_failed = True
        raise OSError(fail["errno"], os.strerror(fail["errno"]), path)
    finally:
        _is_busy = False


def is_for_writing(flags):
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))


def wrapped(function, look):
    def call(*args, **keywords):
        look(*args, **keywords)
        return function(*args, **keywords)

    call.__name__ = function.__name__
    for supports in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
        if function in supports:
            supports.add(call)
    return call


class WatchedFile(io.FileIO):
    """What `open` is built on here; it counts as written or read when bytes move."""

    def write(self, data):
        meet("write", self.fileno())
        return super().write(data)

    def read(self, *args):
        meet("read", self.fileno())
        return super().read(*args)

    def readinto(self, buffer):
        meet("read", self.fileno())
        return super().readinto(buffer)

    def readall(self):
        meet("read", self.fileno())
        return super().readall()


_python_open = io.open


def open_watched(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, closefd=True, opener=None):
    path = full_path(file) if plan() is not None else None
    now = plan()
    if path is None or not any(path == root or path.startswith(root + "/") for root in now["roots"]):
        return _python_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
    if not isinstance(file, int) and opener is None:
        meet("open to write" if set(mode) & set("wax+") else "open to read", file)
    raw = WatchedFile(file, mode.replace("b", "").replace("t", ""), closefd=closefd, opener=opener)
    if buffering == 0:
        return raw
    if "+" in mode:
        buffered = io.BufferedRandom(raw)
    elif set(mode) & set("wax"):
        buffered = io.BufferedWriter(raw)
    else:
        buffered = io.BufferedReader(raw)
    if "b" in mode:
        return buffered
    text = io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)
    text.mode = mode
    return text


def install():
    """Once in a process."""
    if getattr(os, "_megaspec_test_watched", False):
        return
    os._megaspec_test_watched = True

    def with_dir(kind):
        return lambda path=".", *args, dir_fd=None, **keywords: meet(kind, path, dir_fd)

    os.open = wrapped(
        os.open,
        lambda path, flags, mode=0o777, *, dir_fd=None: meet(
            "open to write" if is_for_writing(flags) else "open to read", path, dir_fd
        ),
    )
    for name in ("mkdir", "rmdir", "unlink", "remove"):
        kind = "mkdir" if name == "mkdir" else "unlink"
        setattr(os, name, wrapped(getattr(os, name), with_dir(kind)))
    for name in ("listdir", "scandir"):
        setattr(os, name, wrapped(getattr(os, name), with_dir("list")))
    for name in ("stat", "lstat", "access", "utime", "chmod", "statvfs"):
        setattr(os, name, wrapped(getattr(os, name), with_dir("stat")))
    os.fstat = wrapped(os.fstat, lambda fd: meet("stat", fd))
    for name in ("rename", "replace", "link"):
        setattr(
            os,
            name,
            wrapped(
                getattr(os, name),
                lambda source, target, *, src_dir_fd=None, dst_dir_fd=None, **_: meet("rename", target, dst_dir_fd),
            ),
        )
    for name in ("fsync", "fdatasync"):
        setattr(
            os, name, wrapped(getattr(os, name), lambda fd: meet("fsync", fd if isinstance(fd, int) else fd.fileno()))
        )
    for name in ("write", "pwrite", "writev", "pwritev", "ftruncate", "truncate", "posix_fallocate"):
        setattr(os, name, wrapped(getattr(os, name), lambda fd, *args: meet("write", fd)))
    os.sendfile = wrapped(os.sendfile, lambda out, *args, **_: meet("write", out))
    for name in ("read", "pread", "readv", "preadv"):
        setattr(os, name, wrapped(getattr(os, name), lambda fd, *args: meet("read", fd)))
    fcntl.flock = wrapped(fcntl.flock, lambda fd, *args: meet("lock", fd if isinstance(fd, int) else fd.fileno()))
    fcntl.lockf = wrapped(fcntl.lockf, lambda fd, *args: meet("lock", fd if isinstance(fd, int) else fd.fileno()))
    io.open = builtins.open = open_watched


if VARIABLE in os.environ:
    install()
