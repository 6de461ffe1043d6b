"""One cuDNN in a process: torch's, all of it, before another package looks for parts of it."""

import ctypes
import os
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import pytest
import torch

from megaspec_kernels import cudnn_library
from megaspec_kernels.cudnn_library import cudnn_of_torch, loaded_cudnn

MAPS = """\
55d0c0a00000-55d0c0a01000 r--p 00000000 fd:01 131 /usr/bin/python3.12
7f10a0000000-7f10a0021000 rw-p 00000000 00:00 0
7f10a1000000-7f10a1002000 r--p 00000000 fd:01 881 /site packages/nvidia/cudnn/lib/libcudnn.so.9
7f10a1002000-7f10a1003000 r-xp 00002000 fd:01 881 /site packages/nvidia/cudnn/lib/libcudnn.so.9
7f10a2000000-7f10a2002000 r--p 00000000 fd:01 990 /lib/x86_64-linux-gnu/libcudnn.so.9.12.0
"""


def test_the_first_one_is_found_whatever_its_folder_is_called() -> None:
    assert loaded_cudnn(MAPS) == Path("/site packages/nvidia/cudnn/lib/libcudnn.so.9")
    assert loaded_cudnn(MAPS.splitlines()[-1]) == Path("/lib/x86_64-linux-gnu/libcudnn.so.9.12.0")
    others = "7f10a1000000-7f10a1002000 r--p 00000000 fd:01 881 /lib/libcudnn_graph.so.9\n"
    assert loaded_cudnn(others) is None


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """torch has cuDNN, and nothing is loaded: -> the files that would have been."""
    files: list[str] = []
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91501)
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: files.append(name))
    return files


def fail_to_import(folder: Path) -> None:
    with cudnn_of_torch("CUDNN_HOME"):
        assert os.environ["CUDNN_HOME"] == str(folder)
        raise ImportError("by the package")


@pytest.mark.parametrize("before", [None, "/opt/cudnn"])
@pytest.mark.parametrize("version", ["9", "9.12.0"])
def test_those_beside_it_are_loaded_and_looked_for_first(
    version: str, before: str | None, opened: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (f"libcudnn.so.{version}", f"libcudnn_cnn.so.{version}", f"libcudnn_graph.so.{version}"):
        (tmp_path / name).touch()
    (tmp_path / "libcudnn_graph.so.8").touch()
    maps = tmp_path / "maps"
    maps.write_text(f"7f10-7f11 r--p 00000000 fd:01 881 {tmp_path}/libcudnn.so.{version}\n")
    monkeypatch.setattr(cudnn_library, "_MAPS", maps)
    monkeypatch.delenv("CUDNN_HOME", raising=False)
    if before is not None:
        monkeypatch.setenv("CUDNN_HOME", before)
    with pytest.raises(ImportError, match="by the package"):
        fail_to_import(tmp_path)
    assert opened == [f"{tmp_path}/libcudnn_cnn.so.{version}", f"{tmp_path}/libcudnn_graph.so.{version}"]
    # what the user has set stands again, whatever became of the import
    assert os.environ.get("CUDNN_HOME") == before


def test_a_torch_that_holds_it_itself_leaves_the_choice(
    opened: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f10-7f11 r--p 00000000 fd:01 881 /usr/lib/libtorch_cuda.so\n")
    monkeypatch.setattr(cudnn_library, "_MAPS", maps)
    monkeypatch.setenv("CUDNN_HOME", "/opt/cudnn")
    with cudnn_of_torch("CUDNN_HOME"):
        assert os.environ["CUDNN_HOME"] == "/opt/cudnn"
    assert opened == []


def test_without_cudnn_there_is_nothing_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    monkeypatch.setenv("CUDNN_HOME", "/opt/cudnn")
    with cudnn_of_torch("CUDNN_HOME"):
        assert os.environ["CUDNN_HOME"] == "/opt/cudnn"


@pytest.mark.gpu
def test_one_version_is_in_a_process() -> None:
    """Each library of cuDNN that is loaded behind all packages that use it lies in one folder."""
    packages = []
    for module in ("cudnn", "transformer_engine"):
        found = subprocess.run([sys.executable, "-P", "-c", f"import {module}"], capture_output=True)
        if found.returncode == 0:
            packages.append(module)
    if not packages:
        pytest.skip("neither nvidia-cudnn-frontend nor transformer-engine is installed")
    code = """
import torch
from megaspec_kernels import te_package
from megaspec_kernels.attention.packages import require

q = torch.randn(1, 4, 256, 64, device="cuda", dtype=torch.bfloat16)
with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
    torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
for package in PACKAGES:
    if package == "cudnn":
        require("cudnn").create_handle()
    else:
        assert te_package.missing() is None, te_package.missing()
lines = open("/proc/self/maps").read().splitlines()
print({line.split(maxsplit=5)[5].rpartition("/")[0] for line in lines if "/libcudnn" in line and ".so.9" in line})
"""
    for order in permutations(packages):
        run = subprocess.run(
            [sys.executable, "-P", "-c", code.replace("PACKAGES", repr(order))], capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        assert run.stdout.count("'") == 2, f"{order}: of several folders: {run.stdout}"
