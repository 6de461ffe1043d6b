"""Versions that fit each other: driver, CUDA, torch, NCCL, Triton and what kernels are made of. Torch-free: it has to
answer where torch can't be imported."""

import importlib.metadata
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from megaspec.core.errors import RecipeError
from megaspec.doctor.finding import Finding, error, ok, warn

AREA = "software"
CODE = RecipeError.exit_code
# What pyproject.toml asks for; a test compares them.
TORCH = ">=2.11,<2.14"
LEAST = {"transformer-engine": "2.20", "flash-attn-4": "4.0.0b36", "nvidia-cudnn-frontend": "1.18"}
# The oldest driver of Linux on which programs of a CUDA release run (CUDA toolkit release notes, table 3).
LEAST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
LOOKED_AT = (
    "torch",
    "triton",
    "transformer-engine",
    "transformer-engine-cu12",
    "transformer-engine-cu13",
    "transformer-engine-torch",
    "flash-attn",
    "flash-attn-4",
    "nvidia-cudnn-frontend",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "nvidia-ml-py",
)


@dataclass(frozen=True)
class Software:
    """Versions, as far as they can be told without importing anything."""

    packages: Mapping[str, str] = field(default_factory=dict)
    """Of LOOKED_AT those that are installed."""
    torch_cuda: str | None = None
    """CUDA that torch was built for; None: a CPU build, or no torch."""
    torch_triton: str | None = None
    """What torch asks of Triton, such as `==3.7.1`."""
    driver: str | None = None
    """Of NVIDIA; None where there is none."""
    driver_cuda: tuple[int, int] | None = None
    """The newest CUDA that the driver knows."""
    gpus: int = 0
    """GPUs of this machine."""
    sm: int = 0
    """Their compute capability, 90 for Hopper."""


def installed(*, driver: str | None, driver_cuda: tuple[int, int] | None, gpus: int, sm: int) -> Software:
    """What is installed here."""
    packages = {}
    for name in LOOKED_AT:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Software(packages, torch_cuda(), _torch_triton(packages), driver, driver_cuda, gpus, sm)


def torch_cuda() -> str | None:
    """The CUDA that torch was built for, read from its version.py without importing it."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return None
    file = Path(found.origin).with_name("version.py")
    if not file.is_file():
        return None
    match = re.search(r"^cuda\b.*=\s*'(\d+\.\d+)'", file.read_text(errors="replace"), re.MULTILINE)
    return None if match is None else match[1]


def _torch_triton(packages: Mapping[str, str]) -> str | None:
    if "torch" not in packages:
        return None
    for line in importlib.metadata.requires("torch") or []:
        try:
            needed = Requirement(line)
        except InvalidRequirement:
            continue
        if needed.name == "triton":
            return str(needed.specifier)
    return None


def software_findings(found: Software) -> Iterator[Finding]:
    """What of it does not fit."""
    yield from _torch(found)
    yield from _driver(found)
    yield from _triton(found)
    yield from _nccl(found)
    yield from _kernel_packages(found)
    if found.gpus and "nvidia-ml-py" not in found.packages:
        why = (
            "without it this machine's GPUs are asked through nvidia-smi alone: errors of memory and clocks stay unseen"
        )
        yield warn(AREA, "nvidia-ml-py is not installed", why=why, do="pip install 'megaspec[gpu]'")


def _torch(found: Software) -> Iterator[Finding]:
    version = found.packages.get("torch")
    if version is None:
        why = "ranks are made of it"
        do = "make install, or pip install torch from the index of your CUDA"
        yield error(AREA, "torch is not installed", why=why, do=do, code=CODE)
        return
    if not _within(version, TORCH):
        what = f"torch {version}, outside of {TORCH}"
        do = f"pip install 'torch{TORCH}'"
        yield error(AREA, what, why="other versions were not tried and lack operations", do=do, code=CODE)
        return
    if found.gpus and found.torch_cuda is None:
        what = f"torch {version} is built for CPUs, and there are {found.gpus} GPUs"
        do = "install torch from an index with CUDA: pip install torch --index-url https://download.pytorch.org/whl/cu130"
        yield error(AREA, what, why="ranks would train on the CPU", do=do, code=CODE)
        return
    built = "CPUs" if found.torch_cuda is None else f"CUDA {found.torch_cuda}"
    yield ok(AREA, f"torch {version}, built for {built}")


def _driver(found: Software) -> Iterator[Finding]:
    if found.driver is None:
        if found.torch_cuda is not None and not found.gpus:
            why = "torch is built for CUDA and sees no driver: what trains here trains on the CPU"
            do = "install NVIDIA's driver; in a container start it with --gpus all, or --nv"
            yield warn(AREA, "no NVIDIA driver", why=why, do=do)
        return
    if found.torch_cuda is None:
        yield ok(AREA, f"driver {found.driver}")
        return
    major = int(found.torch_cuda.partition(".")[0])
    least = LEAST_DRIVER.get(major)
    what = f"driver {found.driver}, torch is built for CUDA {found.torch_cuda}"
    if least is not None and _older(found.driver, least):
        why = f"CUDA {major} needs driver {least} or newer: torch can't use the GPUs"
        do = f"update the driver to {least} or newer, or install torch for CUDA {major - 1}"
        yield error(AREA, what, why=why, do=do, code=CODE)
    elif found.driver_cuda is not None and found.driver_cuda < _pair(found.torch_cuda):
        knows = ".".join(map(str, found.driver_cuda))
        why = f"the driver knows CUDA {knows}: kernels that are compiled at run time for a newer one may not load"
        yield warn(AREA, what, why=why, do="update the driver, or install torch for an older CUDA")
    else:
        yield ok(AREA, what)


def _triton(found: Software) -> Iterator[Finding]:
    version = found.packages.get("triton")
    if version is None:
        if found.gpus:
            why = "norms, gates, rotations, AdamW and torch.compile are made with it"
            do = f"pip install 'triton{found.torch_triton or ''}', or set kernels=reference"
            yield error(AREA, "triton is not installed", why=why, do=do, code=CODE)
        return
    if found.torch_triton and not _within(version, found.torch_triton):
        what = f"triton {version}, torch asks for triton{found.torch_triton}"
        why = "torch.compile is written for the one that it asks for"
        yield warn(AREA, what, why=why, do=f"pip install 'triton{found.torch_triton}'")
    else:
        yield ok(AREA, f"triton {version}")


def _nccl(found: Software) -> Iterator[Finding]:
    names = [name for name in found.packages if name.startswith("nvidia-nccl-")]
    if len(names) > 1:
        why = "both put a libnccl.so.2 into one folder, and which one is loaded depends on which was installed last"
        do = f"pip uninstall {' '.join(names)}, then install torch again"
        yield warn(AREA, " and ".join(f"{name} {found.packages[name]}" for name in names), why=why, do=do)
        return
    for name in names:
        what = f"{name} {found.packages[name]}"
        if found.torch_cuda is not None and name.removeprefix("nvidia-nccl-cu") != found.torch_cuda.partition(".")[0]:
            why = f"torch is built for CUDA {found.torch_cuda}: it loads another NCCL than this, or none"
            yield warn(AREA, what, why=why, do="pip install --force-reinstall torch, which brings its own")
        else:
            yield ok(AREA, what)


def _kernel_packages(found: Software) -> Iterator[Finding]:
    for name, least in LEAST.items():
        version = found.packages.get(name)
        if version is None:
            continue
        if _older(version, least):
            why = "older ones lack what our kernels call: kernels.*=te, fa4 or cudnn would fail in the first step"
            yield warn(AREA, f"{name} {version}, older than {least}", why=why, do=f"pip install '{name}>={least}'")
        else:
            yield ok(AREA, f"{name} {version}")
    for name in ("transformer-engine-cu12", "transformer-engine-cu13"):
        if name not in found.packages or found.torch_cuda is None:
            continue
        if name[-2:] != found.torch_cuda.partition(".")[0]:
            what = f"{name} {found.packages[name]}, torch is built for CUDA {found.torch_cuda}"
            why = "its libraries are linked to another CUDA runtime: importing it fails"
            do = "pip install the transformer-engine of torch's CUDA, or drop kernels.linear=te"
            yield error(AREA, what, why=why, do=do, code=CODE)
    if "transformer-engine" in found.packages and "transformer-engine-torch" not in found.packages:
        why = "its part for torch is missing, which is compiled at installation"
        do = "pip install --no-build-isolation 'transformer-engine[pytorch]'"
        yield warn(AREA, "transformer-engine without transformer-engine-torch", why=why, do=do)
    if "flash-attn-4" in found.packages and 0 < found.sm < 90:
        why = f"FlashAttention-4 needs sm90, these GPUs are sm{found.sm}"
        do = "kernels.attention=sdpa, or flash-attn 2"
        yield warn(AREA, f"flash-attn-4 {found.packages['flash-attn-4']}", why=why, do=do)
    if "flash-attn" in found.packages:
        yield ok(AREA, f"flash-attn {found.packages['flash-attn']}")


def _within(version: str, wanted: str) -> bool:
    try:
        # what stands behind a + is a build of the same version
        public = Version(version).public
        return Requirement(f"x{wanted}").specifier.contains(public, prereleases=True)
    except (InvalidVersion, InvalidRequirement):
        return True


def _older(version: str, least: str) -> bool:
    try:
        return Version(version) < Version(least)
    except InvalidVersion:
        return False


def _pair(version: str) -> tuple[int, int]:
    major, _, minor = version.partition(".")
    return int(major), int(minor or 0)
