"""Kernels in CUDA C++: found and compiled once, told where they can't be, and never at import."""

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import inf
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megaspec.core.errors import RecipeError, WriteError
from megaspec.estimate import target
from megaspec_kernels import nvcc, sources
from megaspec_kernels.catalog import CATALOG, unmet
from megaspec_kernels.fp8_cast import cuda, reference
from megaspec_kernels.fp8_cast.tiles import CUDA_TILES
from megaspec_kernels.nvcc import Source, built, cache_folder, command
from tests.kernels import cuda_emulated

# Says its version, writes what it was asked with, and counts its calls.
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "Cuda compilation tools, release 13.0, V13.0.88"; exit; fi
echo call >> "$(dirname "$0")/calls"
for word; do out="$last"; last="$word"; done
echo half > "$last"
sleep 0.2
echo "$@" > "$last"
"""
FAILS = """#!/bin/sh
if [ "$1" = --version ]; then echo "release 12.9, V12.9.1"; exit; fi
echo half > /dev/null
echo "one.cu(3): error: what is this" >&2
exit 2
"""
HOW = {"key": "kernels.x=cuda", "way_out": "set kernels.x=triton"}


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """A cache of its own, and no compiler that was found before."""
    monkeypatch.setenv(nvcc.CACHE_VARIABLE, str(tmp_path / "kept"))
    forget()
    yield
    forget()


def forget() -> None:
    nvcc.nvcc.cache_clear()
    nvcc.nvcc_version.cache_clear()


def compiler(monkeypatch, home: Path, text: str | None) -> Path:
    """Makes this the only nvcc that there is; None: there is none."""
    (home / "bin").mkdir(parents=True, exist_ok=True)
    if text is not None:
        (home / "bin" / "nvcc").write_text(text)
        (home / "bin" / "nvcc").chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(nvcc.shutil, "which", lambda name: None)
    monkeypatch.setattr(nvcc, "_TOOLKIT", home / "nowhere")
    forget()
    return home / "bin" / "nvcc"


@pytest.fixture
def one(tmp_path) -> Source:
    path = tmp_path / "op" / "one.cu"
    path.parent.mkdir()
    path.write_text("// one")
    return Source(path, (("WIDTH", 4),))


def test_where_libraries_are_kept(monkeypatch):
    assert cache_folder({nvcc.CACHE_VARIABLE: "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/megaspec/kernels")
    monkeypatch.setenv("HOME", "/c")
    assert cache_folder({}) == Path("/c/.cache/megaspec/kernels")


def test_a_source_is_compiled_once_and_again_when_it_changes(monkeypatch, tmp_path, one):
    found = compiler(monkeypatch, tmp_path / "cuda", COMPILER)
    first = built(one, **HOW)
    assert re.fullmatch(r"op-one-[0-9a-f]{16}-sm_90a-cuda13\.0\.so", first.name)
    assert first.parent == tmp_path / "kept"
    said = first.read_text().split()
    assert {"-gencode=arch=compute_90a,code=sm_90a", "-DWIDTH=4", str(one.path)} <= set(said)
    assert built(one, **HOW) == first
    calls = found.parent / "calls"
    assert calls.read_text().count("call") == 1
    others = {first, built(one._replace(defines=(("WIDTH", 8),)), **HOW)}
    others.add(built(one._replace(architecture="sm_100a"), **HOW))
    one.path.write_text("// two")
    others.add(built(one, **HOW))
    compiler(monkeypatch, tmp_path / "cuda", COMPILER.replace("13.0", "13.1"))
    others.add(built(one, **HOW))
    assert len(others) == calls.read_text().count("call") == 5
    # nothing half made stays
    assert set((tmp_path / "kept").iterdir()) == others


def test_two_that_compile_the_same_at_once_both_get_it_whole(monkeypatch, tmp_path, one):
    found = compiler(monkeypatch, tmp_path / "cuda", COMPILER)
    # before there are two threads
    assert nvcc.nvcc_version() == "13.0"
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: built(one, **HOW).read_text(), range(2)))
    assert (found.parent / "calls").read_text().count("call") == 2
    assert all(text.startswith("-gencode") for text in both)
    assert len(list((tmp_path / "kept").iterdir())) == 1


def test_without_nvcc_the_way_out_is_told(monkeypatch, tmp_path, one):
    compiler(monkeypatch, tmp_path / "cuda", None)
    with pytest.raises(RecipeError) as told:
        built(one, **HOW)
    assert str(told.value) == (
        f"kernels.x=cuda needs nvcc, which is neither in CUDA_HOME={tmp_path / 'cuda'} nor on the PATH: install CUDA's"
        " toolkit, or set CUDA_HOME to where it is; or set kernels.x=triton"
    )
    assert not (tmp_path / "kept").exists()


def test_what_another_machine_compiled_of_the_same_source_serves_without_nvcc(monkeypatch, tmp_path, one):
    compiler(monkeypatch, tmp_path / "cuda", COMPILER)
    there = built(one, **HOW)
    compiler(monkeypatch, tmp_path / "without", None)
    assert built(one, **HOW) == there
    with pytest.raises(RecipeError, match="needs nvcc"):
        built(one._replace(defines=()), **HOW)


def test_what_does_not_compile_is_told_with_what_nvcc_says(monkeypatch, tmp_path, one):
    compiler(monkeypatch, tmp_path / "cuda", FAILS)
    with pytest.raises(RecipeError, match=r"can't compile .*one\.cu; set kernels\.x=triton.*what is this"):
        built(one, **HOW)
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_folder_that_can_t_be_written_is_told(monkeypatch, tmp_path, one):
    compiler(monkeypatch, tmp_path / "cuda", COMPILER)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(nvcc.CACHE_VARIABLE, str(tmp_path / "file" / "below"))
    with pytest.raises(WriteError, match=f"set {nvcc.CACHE_VARIABLE} to another folder, or set kernels.x=triton"):
        built(one, **HOW)


def test_an_import_compiles_nothing(tmp_path):
    program = "import megaspec_kernels.registry, megaspec_kernels.sources"
    subprocess.run([sys.executable, "-P", "-c", program], check=True)
    assert not Path(os.environ[nvcc.CACHE_VARIABLE]).exists()


def test_what_runs_it_is_a_target_with_nvcc(monkeypatch, tmp_path):
    compiler(monkeypatch, tmp_path / "cuda", COMPILER)
    assert target.detect_target({}).versions["nvcc"] == "13.0"
    compiler(monkeypatch, tmp_path / "without", None)
    versions = target.detect_target({}).versions
    assert "nvcc" not in versions
    hopper = {"device": "cuda", "sm": 90}
    assert unmet("fp8_cast", "cuda", **hopper, packages={"nvcc"}) is None
    assert unmet("fp8_cast", "cuda", **hopper, packages=versions) == (
        "needs the package nvcc, which is not installed (install CUDA's toolkit, or set CUDA_HOME to where it is)"
    )
    assert unmet("fp8_cast", "cuda", device="cuda", sm=100, packages={"nvcc"}) == ("runs up to sm90, this GPU is sm100")


def test_make_kernels_compiles_all_that_there_are(monkeypatch, tmp_path, capsys):
    files = {source.path for source in sources.sources().values()}
    assert files == set(Path(nvcc.__file__).parent.rglob("*.cu"))
    names = {f"kernels.{op}={name}" for op, one in CATALOG.items() for name in one.implementations if name == "cuda"}
    assert set(sources.sources()) == names
    compiler(monkeypatch, tmp_path / "cuda", COMPILER)
    assert sources.main() == 0
    assert len(list((tmp_path / "kept").iterdir())) == len(files)
    compiler(monkeypatch, tmp_path / "cuda", FAILS)
    assert sources.main() == RecipeError.exit_code
    assert "go on without it" in capsys.readouterr().err


@pytest.mark.parametrize("tile", CUDA_TILES.values(), ids=list(CUDA_TILES))
def test_every_tile_compiles_for_hopper_and_spills_nothing(tile, tmp_path):
    if nvcc.nvcc_version() is None:
        pytest.skip("no nvcc")
    words = [*command(cuda.source(tile), tmp_path / "cast.so"), "-Xptxas", "-v"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    spilled = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", done.stderr)
    assert len(spilled) >= 8
    assert set(spilled) == {("0", "0")}
    # what is called is exported
    library = ctypes.CDLL(str(tmp_path / "cast.so"))
    assert library.megaspec_fp8_cast
    assert library.megaspec_cuda_error


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        # a line of the column layout, the places in shared memory, a record, what waits for whom
        ("cast.columns + (here.k + first)", "cast.columns + (here.k + (first ^ 1))"),
        ("(threadIdx.x + i * kThreads) ^ (column / 8 % 8)", "(threadIdx.x + i * kThreads)"),
        ("__byte_perm(row[2], row[3], 0x7362)", "__byte_perm(row[3], row[2], 0x7362)"),
        ("top & 0xFFFFu, top >> 16", "top & 0xFFFFu, top & 0xFFFFu"),
        ("first * 0.0f", "0.0f"),
        ("is_odd = __syncthreads_or(is_odd);", ""),
        ("if (step + 1 < kSteps) __syncthreads();", ""),
    ],
)
def test_a_planted_bug_is_seen_on_a_cpu(right, wrong, tmp_path):
    """So that the emulated kernel is worth something: each of these is caught by what holds the kernel to its bits."""
    tile = CUDA_TILES["128x64, 4 steps"]
    text = cuda.source(tile).path.read_text()
    assert text.count(right) == 1
    out = cuda_emulated.compiled(cuda.source(tile), tmp_path / "cast.so", text=text.replace(right, wrong))
    library = cuda.opened(out)
    x = torch.randn(272, 144, generator=torch.Generator().manual_seed(1)).bfloat16()
    # the largest one is the second of a pair
    x[0, 1] = 7.0
    differ = []
    for bad in (1.0, inf):
        x[5, 6] = bad
        with patch.object(cuda_emulated, "library", lambda _: library):
            try:
                mine = everything(partial(cuda_emulated.cast, tile=tile), x)
            except RuntimeError as error:
                # threads wait for others that do not come
                mine = [str(error)]
        differ.append(mine != everything(reference.cast, x))
    assert any(differ)


def everything(cast: Callable[..., tuple[Tensor, Tensor]], x: Tensor) -> list[list]:
    """All that a cast makes and records."""
    seen = torch.zeros(1)
    pair = cast(x, torch.ones(1, 1), block=(None, None), dtype=torch.float8_e4m3fn, columns=True, seen=seen)
    return [*(part.view(torch.uint8).tolist() for part in pair), seen.tolist()]
