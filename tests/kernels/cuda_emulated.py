"""Kernels in CUDA C++ without a GPU: a plain C++ compiler builds them on top of cuda_on_cpu/, and they take tensors on
the CPU."""

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
from torch import Tensor

from megaspec_kernels.fp8_cast import cuda
from megaspec_kernels.fp8_cast.tiles import CUDA_BEST, CudaTile
from megaspec_kernels.nvcc import Source

HEADERS = Path(__file__).parent / "cuda_on_cpu"
# Shared memory is read in words of several sizes.
FLAGS = ("-std=c++17", "-O1", "-fno-strict-aliasing", "-shared", "-fPIC", "-Wall", "-Werror", "-Wno-unknown-pragmas")


def compiled(source: Source, out: Path, *, text: str | None = None) -> Path:
    """The library of a source, or of another text in its place."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    defines = [f"-D{name}={value}" for name, value in source.defines]
    command = [compiler, *FLAGS, *defines, "-I", str(HEADERS), "-x", "c++", "-", "-o", str(out)]
    done = subprocess.run(command, input=text or source.path.read_text(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


@cache
def library(tile: CudaTile = CUDA_BEST) -> ctypes.CDLL:
    """cuda.library on a CPU."""
    with tempfile.TemporaryDirectory() as folder:
        # what is loaded stays when its file is gone
        return cuda.opened(compiled(cuda.source(tile), Path(folder) / "cast.so"))


def cast(*arguments, **options) -> tuple[Tensor | None, Tensor | None]:
    """cuda.cast of tensors on the CPU."""
    with patch.object(cuda, "library", library), patch.object(cuda, "queue_of", lambda x: (0, 0)):
        return cuda.cast(*arguments, **options)
