"""One writer per run folder. Torch-free.

    lock/00000003.json      who holds the lock; 3 is the fencing token
    lock/00000003.beat      a counter that the holder raises twice a second
    lock/00000003.released  the record after the holder let go
    lock/flock              held with flock(2) where the file system knows it
    lock/spare              room for the next record: an earlier one, under this name

Whoever has the highest token is the holder. The next token is claimed by link(2), which fails when the name exists, on
network file systems too, so two claims never both succeed. A holder counts as dead when its process is gone (same
machine), when the kernel has dropped its flock (same machine, another container), or when its counter stood still for
`stale_seconds` of the observer's own monotonic clock; no two clocks are ever compared.

Note "Full disks". A run whose folder has no room may save elsewhere (fallback.py), and has to be started again all the
same. So a holder keeps the blocks of the one before it: that one's counter becomes its own, and that one's record the
spare, which the next holder writes over in place. Only file systems that write elsewhere what is changed (copy on
write) need room for that.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import psutil

from megaspec.checkpoint.files import (
    UnreadableError,
    open_folder,
    pwrite_all,
    read_limited,
    sync_folder,
    write_durably,
    write_failure,
)
from megaspec.core.errors import CheckpointError, RunLockedError, WriteError
from megaspec.core.regular_files import NO_ROOM, make_folder_inside, open_inside, read_inside

LOCK_FOLDER = "lock"
SPARE = "spare"
BEAT_SECONDS = 0.5
STALE_SECONDS = 30.0
# So long a disk that fails for a moment is waited for before each new try to say that a lock is let go.
RELEASE_WAITS_SECONDS = (0.1, 1.0)

_RECORD = re.compile(r"([0-9]{8,18})\.(json|released)")
_RECORD_LIMIT = 4096
# More than a record has; the file system gives a whole block.
_SPARE_BYTES = 1024
_NO_FLOCK = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}
_NO_LINK = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}


@dataclass(frozen=True)
class Holder:
    """Who holds a lock. `boot` and `pid_space` say in which machine and container `pid` means something."""

    host: str
    pid: int
    started: str
    since: str
    boot: str
    pid_space: str
    flock: bool
    nonce: str

    def encode(self) -> bytes:
        """As a line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"


def decode_holder(data: bytes) -> Holder | None:
    """The holder in a record; None when the record is damaged."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if type(raw) is not dict:
        return None
    types = {field.name: field.type for field in fields(Holder)}
    if {name: type(value) for name, value in raw.items()} != types:
        return None
    return Holder(**raw)


def boot_id() -> str:
    """Names this boot of this machine; the same in all its containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{socket.gethostname()} {psutil.boot_time():.0f}"


def pid_space() -> str:
    """Names the process-id namespace."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "one"


def process_start(pid: int) -> str | None:
    """When a process of this namespace started, in a form that only compares; None when it is gone or a zombie."""
    try:
        # proc(5): pid (name) state ...; the name may hold brackets and spaces. Field 3 is the state (Z: zombie, X:
        # dead), field 22 the start in clock ticks since boot.
        _, _, after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        fields_from_3 = after_name.split()
        if fields_from_3[0] in "ZX":
            return None
        return fields_from_3[22 - 3]
    except (FileNotFoundError, ProcessLookupError):
        if os.path.exists("/proc/self/stat"):
            return None
    # a machine without /proc
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return f"{process.create_time():.2f}"
    except psutil.NoSuchProcess:
        return None


class RunLock:
    """The right to write to a run folder. Use as a context manager, or `acquire` and `release`.

    `acquire` raises RunLockedError, which names the holder, and WriteError. A live holder of the same machine is
    refused at once, one of another machine as soon as its counter moves; a dead one is taken over at once, or after
    `stale_seconds`.
    """

    def __init__(
        self, run_dir: Path | str, *, beat_seconds: float = BEAT_SECONDS, stale_seconds: float = STALE_SECONDS
    ):
        self.run_dir = Path(run_dir)
        self.folder = self.run_dir / LOCK_FOLDER
        self._beat_seconds = beat_seconds
        self._stale_seconds = stale_seconds
        self._token = 0
        self._record = b""
        self._pid = 0
        self._flock_fd: int | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def held(cls, run_dir: Path | str, token: int) -> Self:
        """The lock of a run that this process's launcher holds under `token`: to `check`, not to
        release. WriteError."""
        lock = cls(run_dir)
        lock._token = token
        try:
            lock._record = lock._record_of(token)
        except OSError as error:
            raise write_failure(lock.folder, error) from None
        return lock

    @property
    def token(self) -> int:
        """The fencing token: higher than that of every earlier holder. 0 while the lock is not held."""
        return self._token

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self) -> Self:
        """Take the lock or raise; see the class."""
        assert not self._token, f"{self.folder}: this lock is held already, token={self._token}"
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            make_folder_inside(self.run_dir, LOCK_FOLDER)
            while not self._try_acquire():
                pass
        except OSError as error:
            self._withdraw()
            raise write_failure(self.folder, error) from None
        except UnreadableError as error:
            self._withdraw()
            raise WriteError(f"whether another job writes to run_dir={self.run_dir} can't be told: {error}") from None
        self._pid = os.getpid()
        self._stop.clear()
        self._thread = threading.Thread(target=self._beat, name="run-lock-heartbeat", daemon=True)
        self._thread.start()
        return self

    def is_held(self) -> bool:
        """Whether somebody who lives holds the lock; takes nothing. A holder elsewhere is watched as in `acquire`.

        OSError, UnreadableError: that can't be told.
        """
        token, kind = self._highest()
        if kind != "json":
            return False
        try:
            has_flock = self._take_flock()
        except OSError:  # a folder that may only be read
            has_flock = False
        self._drop_flock()
        return self._lives(token, decode_holder(self._read(f"{token:08d}.json")), has_flock)

    def check(self) -> None:
        """Raise RunLockedError when another job has taken the lock over; to be called right before publishing.

        WriteError: the folder is not where it was, or a failing disk doesn't let it be read.
        """
        assert self._token, f"{self.folder}: the lock was released, or never acquired"
        try:
            token, kind = self._highest()
            if token == self._token and kind == "json" and self._record_of(token) == self._record:
                return
        except OSError as error:
            # nobody is known to have taken it over, but nothing is published on trust
            raise write_failure(self.folder, error) from None
        raise self._lost()

    def is_ours(self) -> bool:
        """Whether the run is still this job's, by one read: to be asked before each line that is written.

        A new holder removes the records of those before it when it begins. A record that can't be read now (a network
        file system that is away) decides nothing.
        """
        try:
            return (
                read_inside(self.run_dir, f"{LOCK_FOLDER}/{self._token:08d}.json", limit=_RECORD_LIMIT) == self._record
            )
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def _record_of(self, token: int) -> bytes:
        """The record of a holder; empty when there is none that could be one. OSError: it can't be read."""
        try:
            return read_inside(self.run_dir, f"{LOCK_FOLDER}/{token:08d}.json", limit=_RECORD_LIMIT)
        except FileNotFoundError:
            return b""
        except OSError as error:
            if error.errno == errno.EOVERFLOW:
                return b""
            raise

    def check_line(self) -> None:
        """As `check`, but by `is_ours`."""
        if not self.is_ours():
            raise self._lost()

    def _lost(self) -> RunLockedError | WriteError:
        """Why the run is no longer this job's."""
        try:
            return self._lost_to()
        except OSError as error:
            return write_failure(self.folder, error)

    def _lost_to(self) -> RunLockedError | WriteError:
        """OSError: that can't be seen."""
        nothing_more = "nothing more is written there"
        if not self.run_dir.is_dir():
            return WriteError(
                f"run_dir={self.run_dir} was moved or removed while the run was under way; {nothing_more}; "
                "megaspec resume with the folder's new name goes on"
            )
        if not self.folder.is_dir():
            return WriteError(f"{self.folder} was moved or removed while the run was under way; {nothing_more}")
        token, _ = self._highest()
        record = self._record_of(token)
        return RunLockedError(
            f"run_dir={self.run_dir} is no longer this job's: {_who(decode_holder(record))} took it over "
            f"(lock token {token}, this job's was {self._token}); {nothing_more}"
        )

    def release(self) -> None:
        """Let go. Does nothing in a forked child, or when the lock is not held."""
        if not self._token or self._pid != os.getpid():
            return
        self._stop.set()
        if self._thread:
            self._thread.join()
        # Nothing of a new holder's is touched: only a record that is still ours is renamed. The flock goes last, so
        # that nobody finds the record of a holder whose flock is free.
        try:
            for wait_seconds in (0.0, *RELEASE_WAITS_SECONDS):
                time.sleep(wait_seconds)
                if self._has_let_go():
                    break
        finally:
            self._token = 0
            self._drop_flock()

    def _has_let_go(self) -> bool:
        """Whether there is no record of ours any more, which is renamed here. False: a failing disk didn't let it be. A
        process that lives on, as a supervisor does, would seem to hold the run."""
        try:
            self.check()
        except RunLockedError:
            return True
        except WriteError:
            return self._is_gone()
        return self._rename_record()

    def _is_gone(self) -> bool:
        """Whether the lock's folder is known to be gone. False, too, where a failing disk doesn't say."""
        try:
            os.lstat(self.folder)
        except OSError as error:
            return error.errno in (errno.ENOENT, errno.ENOTDIR)
        return False

    def _rename_record(self) -> bool:
        """Says that this holder has let go. -> whether that could be said: if not, the lock is stale once this process
        is gone."""
        stem = self.folder / f"{self._token:08d}"
        try:
            os.rename(stem.with_suffix(".json"), stem.with_suffix(".released"))
        except OSError:
            return False
        return True

    def _withdraw(self) -> None:
        """Lets go of what `acquire` has got so far."""
        if self._token:
            self._rename_record()
        self._token = 0
        self._drop_flock()

    def _try_acquire(self) -> bool:
        """True: the lock is ours. False: somebody else claimed it meanwhile, look again."""
        # The flock before the record: the holder takes them in this order, too, so whoever gets the flock here knows
        # that the holder of the record, where it had a flock, is dead.
        has_flock = self._take_flock()
        token, kind = self._highest()
        if kind == "json":
            record = self._read(f"{token:08d}.json")
            holder = decode_holder(record)
            if self._lives(token, holder, has_flock):
                self._drop_flock()
                raise RunLockedError(
                    f"run_dir={self.run_dir} is in use by {_who(holder)} (lock token {token}); "
                    "stop that job, wait until it ends, or set another run_dir"
                )
            # watching its counter may have taken half a minute, in which others look at the lock as well
            if self._highest() != (token, kind):
                return False
        record = Holder(
            host=socket.gethostname(),
            pid=os.getpid(),
            started=process_start(os.getpid()) or "",
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            boot=boot_id(),
            pid_space=pid_space(),
            flock=has_flock,
            nonce=secrets.token_hex(8),
        ).encode()
        try:
            if not self._claim(token + 1, record):
                return False
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            # another start may have taken the spare, and is about to have the lock
            time.sleep(0.2)
            if self._highest() != (token, kind):
                return False
            raise
        self._token = token + 1
        self._record = record
        # An earlier holder that lives on after all finds its record gone, see `is_ours`.
        self._take_over_older()
        self._write_beat(1)
        self._keep_spare()
        return True

    def _claim(self, token: int, record: bytes) -> bool:
        """Publish a record under a token that nobody has; False when somebody was first."""
        target = self.folder / f"{token:08d}.json"
        claim = self.folder / f".claim-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            # written whole under a name of its own and then linked: nobody reads half a record
            self._write_claim(claim, record)
            os.link(claim, target)
        except FileExistsError:
            # A network file system may have answered a repeated request: two links mean that the first one worked.
            if os.stat(claim).st_nlink != 2:
                return False
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            # without link(2), a file that must not exist yet (O_EXCL)
            try:
                write_durably(target, record)
            except FileExistsError:
                return False
        finally:
            # one that stays is in nobody's way
            with contextlib.suppress(OSError):
                claim.unlink(missing_ok=True)
        try:
            sync_folder(self.folder)
        except OSError:
            # a record that is told as a failure is not to keep others out, this process among them
            with contextlib.suppress(OSError):
                target.unlink()
            raise
        return True

    def _write_claim(self, claim: Path, record: bytes) -> None:
        """A new file, or, where there is no room for one, the spare written over. Raises OSError."""
        try:
            write_durably(claim, record)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            # as much of it as there was room for
            claim.unlink(missing_ok=True)
            if not self._write_over_spare(claim, record):
                raise

    def _write_over_spare(self, claim: Path, record: bytes) -> bool:
        """-> False where there is none, or none of this folder's alone. Raises OSError."""
        try:
            os.rename(self.folder / SPARE, claim)
        except FileNotFoundError:
            return False
        fd = open_inside(self.run_dir, f"{LOCK_FOLDER}/{claim.name}", os.O_WRONLY)
        try:
            # a folder that was copied by hard links shares its files with the other one
            if os.fstat(fd).st_nlink != 1:
                return False
            pwrite_all(fd, memoryview(record), 0)
            # last, since what is cut off may be another's at once
            os.ftruncate(fd, len(record))
            os.fsync(fd)
        except OSError:
            # for the next holder, when there may be room
            os.rename(claim, self.folder / SPARE)
            raise
        finally:
            os.close(fd)
        return True

    def _has_spare(self) -> bool:
        """One without bytes has no room: who made it met a full disk, or was killed."""
        try:
            return os.lstat(self.folder / SPARE).st_size > 0
        except FileNotFoundError:
            return False

    def _keep_spare(self) -> None:
        """Makes one where no earlier holder has left any. A disk without room does without."""
        if self._has_spare():
            return
        spare = self.folder / SPARE
        try:
            spare.unlink(missing_ok=True)
            write_durably(spare, b" " * _SPARE_BYTES)
        except OSError:
            with contextlib.suppress(OSError):
                spare.unlink(missing_ok=True)

    def _lives(self, token: int, holder: Holder | None, has_flock: bool) -> bool:
        """Whether a holder lives, by the surest way there is. `has_flock`: we have just taken the lock's flock."""
        if holder and holder.boot == boot_id():
            if holder.pid_space == pid_space():
                return process_start(holder.pid) == holder.started
            if holder.flock:
                return not has_flock
        return self._counter_moves(token)

    def _counter_moves(self, token: int) -> bool:
        """Watch the counter of a holder that can't be asked in another way.

        UnreadableError: it could not be read until the end, as when a file server is away. A counter that nobody can
        see has not stood still.
        """
        first: bytes | None = None
        unreadable: UnreadableError | None = None
        give_up = time.monotonic() + self._stale_seconds
        while time.monotonic() < give_up:
            try:
                seen = self._read(f"{token:08d}.beat")
                unreadable = None
                if first is None:
                    first = seen
                if seen != first:
                    return True
            except UnreadableError as error:
                unreadable = error
            time.sleep(min(0.1, self._stale_seconds / 10))
            if self._highest() != (token, "json"):
                return False
        if unreadable is not None:
            raise unreadable
        return False

    def _highest(self) -> tuple[int, str]:
        """The highest token with the ending of its record; (0, "released") when there is none."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.folder):
                if match := _RECORD.fullmatch(name):
                    found.append((int(match[1]), match[2]))
        # of one token "released" is the larger
        return max(found, default=(0, "released"))

    def _read(self, name: str) -> bytes:
        """A file of the lock folder; empty when there is none, or none that could be one. UnreadableError: a failing
        disk or missing rights don't let it be read, which says nothing of who holds the lock."""
        try:
            fd = open_folder(self.folder)
            try:
                return read_limited(self.folder, fd, name, limit=_RECORD_LIMIT)
            finally:
                os.close(fd)
        except UnreadableError:
            raise
        except CheckpointError:
            return b""

    def _beat(self) -> None:
        count = 1
        while not self._stop.wait(self._beat_seconds):
            count += 1
            # A missed beat is no reason to stop: `check` decides whether the lock is still ours.
            with contextlib.suppress(OSError):
                self._write_beat(count)

    def _write_beat(self, count: int) -> None:
        """Raise the counter in place: opening, writing and closing is what network file systems pass on at once."""
        flags = os.O_WRONLY
        # made once, so that a holder whose files were removed doesn't bring them back
        if count == 1:
            flags |= os.O_CREAT
        fd = open_inside(self.run_dir, f"{LOCK_FOLDER}/{self._token:08d}.beat", flags)
        try:
            os.pwrite(fd, f"{count:020d}\n".encode(), 0)
        finally:
            os.close(fd)

    def _take_over_older(self) -> None:
        """Removes what earlier holders left, but for a counter, which becomes this one's, and a record, which becomes
        the spare. See the note "Full disks"."""
        older = []
        for name in os.listdir(self.folder):
            stem = name.partition(".")[0]
            if stem.isdigit() and int(stem) < self._token:
                older.append(name)
        counter = self.folder / f"{self._token:08d}.beat"
        for name in sorted(older, reverse=True):
            path = self.folder / name
            if name.endswith(".beat"):
                target = counter
                is_wanted = not os.path.lexists(counter)
            else:
                target = self.folder / SPARE
                is_wanted = not self._has_spare()
            # one with another name besides is another folder's as well, which was copied by hard links
            if is_wanted and os.lstat(path).st_nlink == 1:
                os.rename(path, target)
            else:
                path.unlink(missing_ok=True)

    def _take_flock(self) -> bool:
        """Whether the lock's flock is ours now; False where another has it or the file system knows none."""
        self._drop_flock()
        fd = open_inside(self.run_dir, f"{LOCK_FOLDER}/flock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno not in _NO_FLOCK | {errno.EWOULDBLOCK, errno.EACCES}:
                raise
            return False
        self._flock_fd = fd
        return True

    def _drop_flock(self) -> None:
        if self._flock_fd is not None:
            os.close(self._flock_fd)
            self._flock_fd = None


def _who(holder: Holder | None) -> str:
    if holder is None:
        return "an unknown job"
    return f"pid {holder.pid} on host {holder.host} since {holder.since}"
