"""Kernels in CUDA C++: compiled by nvcc at their first use, or ahead of it by `make kernels`; never at import.
Torch-free.

Note "Cache". What was compiled lies in a folder of the user, under the source's digest, the architecture and the
version of CUDA: a change of any of them compiles again, and nothing is ever replaced. A file gets its name once it is
whole, so processes that compile the same at once do not disturb each other. Where there is no nvcc, what an nvcc made
of the same source serves.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from megaspec.core.errors import RecipeError, WriteError

CACHE_VARIABLE = "MEGASPEC_KERNEL_CACHE"
"""The environment variable that names another folder."""
# Of Hopper, with the instructions that no other GPU has.
HOPPER = "sm_90a"
_TOOLKIT = Path("/usr/local/cuda")
_LARGEST_REPORT = 2000


class Source(NamedTuple):
    """What is compiled to one library."""

    path: Path
    defines: tuple[tuple[str, int], ...] = ()
    """Macros and their values."""
    architecture: str = HOPPER


@cache
def nvcc() -> Path | None:
    """The compiler of CUDA_HOME (or CUDA_PATH), of the PATH, or of where CUDA installs itself; None: there is none."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(variable)
        if home and (Path(home) / "bin" / "nvcc").is_file():
            return Path(home) / "bin" / "nvcc"
    on_path = shutil.which("nvcc")
    if on_path is not None:
        return Path(on_path)
    if (_TOOLKIT / "bin" / "nvcc").is_file():
        return _TOOLKIT / "bin" / "nvcc"
    return None


@cache
def nvcc_version() -> str | None:
    """The version of CUDA that nvcc is of, such as 13.0; None: there is none, or it does not run."""
    compiler = nvcc()
    if compiler is None:
        return None
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"release (\d+\.\d+)", done.stdout)
    return found.group(1) if found is not None else None


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Where libraries are kept."""
    if environment is None:
        environment = os.environ
    named = environment.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    of_user = environment.get("XDG_CACHE_HOME")
    if of_user:
        return Path(of_user) / "megaspec" / "kernels"
    return Path.home() / ".cache" / "megaspec" / "kernels"


def built(source: Source, *, key: str, way_out: str) -> Path:
    """The library of a source, compiled where it is not in the cache yet. `key`: the setting that asks for it.
    `way_out`: what to set instead. RecipeError: it can't be compiled. WriteError: there is no place for it."""
    folder = cache_folder()
    version = nvcc_version()
    if version is None:
        # of whichever version, newest last by name
        there = sorted(folder.glob(_name(source, "*")))
        if there:
            return there[-1]
        raise RecipeError(
            f"{key} needs nvcc, which is neither in CUDA_HOME={os.environ.get('CUDA_HOME', '')} nor on the PATH:"
            f" install CUDA's toolkit, or set CUDA_HOME to where it is; or {way_out}"
        )
    library = folder / _name(source, version)
    if not library.is_file():
        _compile(source, library, key=key, way_out=way_out)
    return library


def command(source: Source, out: Path) -> list[str]:
    """How nvcc is called."""
    number = source.architecture.removeprefix("sm_")
    defines = [f"-D{name}={value}" for name, value in source.defines]
    return [
        str(nvcc()),
        # one architecture: nvcc adds code for older GPUs otherwise
        f"-gencode=arch=compute_{number},code=sm_{number}",
        "-O3",
        "-std=c++17",
        "-shared",
        "-Xcompiler=-fPIC",
        *defines,
        str(source.path),
        "-o",
        str(out),
    ]


def _name(source: Source, version: str) -> str:
    """A library's file. What compiles it is part of what it is."""
    digest = sha256(source.path.read_bytes())
    digest.update(repr((source.defines, command(source._replace(path=Path()), Path())[1:])).encode())
    title = f"{source.path.parent.name}-{source.path.stem}"
    return f"{title}-{digest.hexdigest()[:16]}-{source.architecture}-cuda{version}.so"


def _compile(source: Source, library: Path, *, key: str, way_out: str) -> None:
    folder = library.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=folder, prefix=f"{library.name}.", suffix=".part")
        os.close(number)
    except OSError as error:
        raise WriteError(
            f"{key} keeps what nvcc compiles in {folder}, which can't be written: {error.strerror};"
            f" set {CACHE_VARIABLE} to another folder, or {way_out}"
        ) from None
    part = Path(name)
    try:
        done = subprocess.run(command(source, part), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            report = (done.stdout + done.stderr).strip()[-_LARGEST_REPORT:]
            raise RecipeError(f"{key}: {nvcc()} can't compile {source.path}; {way_out}. It says: {report}")
        # mkstemp lets nobody else read it
        part.chmod(0o755)
        # whole at once, also where another process has made the same
        part.replace(library)
    finally:
        part.unlink(missing_ok=True)
