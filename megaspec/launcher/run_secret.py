"""The secret of a job, by which its ranks know what another rank of theirs wrote in a store that anybody may write to.

torch's TCP store asks nobody who they are: whoever reaches its port reads and sets any key. So what decides something
is signed (HMAC-SHA256, RFC 2104), with its key's name, the attempt and a sequence number in the message: a value that
was signed for another place, or for another attempt, is refused as one that was never signed.

Where the secret is from, the first that is there:

    MEGASPEC_RUN_SECRET_FILE   a file that holds it, readable by its owner alone: Kubernetes, SLURM
    MEGASPEC_RUN_SECRET        itself
    nothing                    with all ranks on this machine: a file in a folder that only this user can enter, made
                               by the first rank that looks; ranks on several machines are refused

It stands in no recipe, spec, log or checkpoint, and is taken out of the environment that children get. Torch-free.
"""

import hashlib
import hmac
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

import psutil

from megaspec.core.errors import RecipeError
from megaspec.core.regular_files import open_regular

VALUE_VARIABLE = "MEGASPEC_RUN_SECRET"
FILE_VARIABLE = "MEGASPEC_RUN_SECRET_FILE"
LEAST_BYTES = 16
_MOST_BYTES = 4096
_DOMAIN = b"megaspec store 1"
_REMEDY = f"export {VALUE_VARIABLE}=$(openssl rand -hex 32) for all of them, or {FILE_VARIABLE}=PATH"


class UntrustedError(RecipeError):
    """What another rank should have written was not written by one that has the job's secret."""


class RunSecret:
    """Signs and checks. Neither str nor repr shows it."""

    def __init__(self, value: bytes):
        assert len(value) >= LEAST_BYTES, f"a secret of {len(value)} bytes"
        self._value = value

    def __repr__(self) -> str:
        return "RunSecret(hidden)"

    def sign(self, name: str, value: str, *, attempt: str, sequence: int) -> bytes:
        """What goes into the store in place of `value`: its signature, a space, and the value."""
        return self._signature(name, value, attempt, sequence).encode() + b" " + value.encode()

    def open(self, name: str, data: bytes, *, attempt: str, sequence: int) -> str:
        """The value of what `sign` made for the same place. UntrustedError: it is another's, or for another place."""
        signature, _, value = data.partition(b" ")
        text = value.decode(errors="replace")
        expected = self._signature(name, text, attempt, sequence).encode()
        if not hmac.compare_digest(signature, expected):
            raise UntrustedError(
                f"the store's key {name!r} was not written by a rank of this job: either somebody else wrote it, "
                f"or ranks have different secrets; {_REMEDY}, and see that nobody else reaches the store's port"
            )
        return text

    def token(self, name: str) -> str:
        """A part of keys' names that nobody can guess who has not got the secret."""
        return hmac.new(self._value, _message(b"token", name), hashlib.sha256).hexdigest()[:32]

    def _signature(self, name: str, value: str, attempt: str, sequence: int) -> str:
        message = _message(_DOMAIN, name, attempt, str(sequence), value)
        return hmac.new(self._value, message, hashlib.sha256).hexdigest()


def _message(domain: bytes, *parts: str) -> bytes:
    """Each with its length before it, so that no two lists of parts read alike."""
    data = domain
    for part in parts:
        encoded = part.encode(errors="surrogateescape")
        data += b"%d:" % len(encoded) + encoded
    return data


def take_secret(environ: MutableMapping[str, str], *, world_size: int, job: str) -> RunSecret:
    """The job's secret; `environ` does not hold it any more. `job`: names this job among others of this machine.

    RecipeError: it is too short, its file can't be read or can be by others, or ranks are on several machines without
    one.
    """
    path = environ.pop(FILE_VARIABLE, "")
    value = environ.pop(VALUE_VARIABLE, "")
    if path:
        return RunSecret(_checked(_read(path), f"{FILE_VARIABLE}={path}"))
    if value:
        return RunSecret(_checked(value.encode(errors="surrogateescape").strip(), VALUE_VARIABLE))
    if not is_one_machine(environ, world_size):
        raise RecipeError(
            f"ranks on several machines meet over a network, where anybody may tell them what to do, and neither "
            f"{VALUE_VARIABLE} nor {FILE_VARIABLE} is set; {_REMEDY}"
        )
    return RunSecret(_shared_here(job))


def is_one_machine(environ: Mapping[str, str], world_size: int) -> bool:
    """Whether all ranks are on this machine, as far as whoever started them says."""
    local = environ.get("LOCAL_WORLD_SIZE", "")
    if local:
        return local == str(world_size)
    return world_size == 1 or environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost", "::1")


def job_of_parent(name: str) -> str:
    """Names the job of the process that started this one, and all others of its ranks."""
    parent = os.getppid()
    with suppress(psutil.Error):
        # a number is another process's later
        return f"{name} {parent} {psutil.Process(parent).create_time()}"
    return f"{name} {parent}"


def _read(path: str) -> bytes:
    try:
        # Kubernetes mounts a secret's file as a link
        fd = os.open(os.path.realpath(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            mode = os.fstat(fd).st_mode
            if not stat.S_ISREG(mode):
                raise RecipeError(f"{FILE_VARIABLE}={path} is no regular file; write the secret into one")
            if mode & 0o007:
                raise RecipeError(f"{FILE_VARIABLE}={path} can be read by everybody; chmod 600 it, and make a new one")
            return file.read(_MOST_BYTES + 1).strip()
    except OSError as error:
        raise RecipeError(f"{FILE_VARIABLE}={path} can't be read: {error.strerror}; {_REMEDY}") from None


def _checked(value: bytes, where: str) -> bytes:
    """RecipeError without the value in it."""
    if not LEAST_BYTES <= len(value) <= _MOST_BYTES:
        text = f"{where} holds {len(value)} bytes, and has to hold {LEAST_BYTES} to {_MOST_BYTES}; {_REMEDY}"
        raise RecipeError(text)
    return value


def _shared_here(job: str) -> bytes:
    """A secret that the processes of this user share on this machine, made by the first that asks for it."""
    folder = Path(tempfile.gettempdir(), f"megaspec-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    about = os.lstat(folder)
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise RecipeError(f"{folder} must be a folder that only this user can enter; remove it, or {_REMEDY}")
    path = folder / hashlib.sha256(job.encode()).hexdigest()[:32]
    if not path.exists():
        _forget_old(folder)
        # whole at once: another rank may look meanwhile
        temporary = folder / f".{os.getpid()}-{secrets.token_hex(8)}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(secrets.token_hex(32).encode())
        with suppress(FileExistsError):
            os.link(temporary, path)
        temporary.unlink()
    with open(open_regular(path), "rb") as file:
        return _checked(file.read(_MOST_BYTES), str(path))


def _forget_old(folder: Path) -> None:
    """Removes what jobs of more than 30 days ago have left."""
    for path in folder.iterdir():
        with suppress(OSError):
            if re.fullmatch(r"[0-9a-f]{32}", path.name) and time.time() - path.stat().st_mtime > 30 * 86400:
                path.unlink()
