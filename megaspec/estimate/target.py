"""The machine that a run is resolved for. `Target` is plain data; only `detect_target` looks at this machine."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

try:
    import pynvml  # the extra `gpu`; nvidia-smi answers where it is not installed
except ImportError:
    pynvml = None

from pydantic import Field

from megaspec.core.frozen import Frozen, NonNegativeInt, PositiveInt
from megaspec.estimate.hardware import hardware_of

_PACKAGES = ("megaspec", "torch", "numpy", "pydantic", "safetensors", "tokenizers", "triton", "tensorboard")


class Target(Frozen):
    """Devices and versions. JSON both ways: kept in the run folder as target.json."""

    gpus: NonNegativeInt = 0
    """GPUs of this machine that the run may use."""
    gpu: str | None = None
    """Name of the GPUs."""
    sm: NonNegativeInt = 0
    """Compute capability, 90 for Hopper; 0 without a GPU."""
    gpu_memory: NonNegativeInt = 0
    """Memory of one GPU in bytes."""
    cores: PositiveInt = 1
    """CPU cores that the run may use."""
    world_size: PositiveInt | None = None
    """Ranks that torchrun has started. None: the launcher starts them."""
    local_ranks: PositiveInt | None = None
    """Ranks that torchrun has started on this machine."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Version by package; a package that is not installed is not listed."""

    @property
    def device(self) -> str:
        """`cuda` where there are GPUs and a torch that can use them, else `cpu`."""
        return "cuda" if self.gpus and "+cpu" not in self.versions.get("torch", "") else "cpu"

    def peak_flops(self, precision: str) -> float | None:
        """Peak of one GPU in FLOP/s for a precision's matrix products; None where it is not known."""
        hardware = hardware_of(self) if self.device == "cuda" else None
        return None if hardware is None else hardware.peak.get(precision)


def detect_target(environment: Mapping[str, str] | None = None) -> Target:
    """This machine. Imports no torch: GPUs are asked through NVML or nvidia-smi, cores through the scheduler."""
    environment = os.environ if environment is None else environment
    gpus = _visible(_gpus_by_nvml() or _gpus_by_command(), environment.get("CUDA_VISIBLE_DEVICES"))
    in_torchrun = "RANK" in environment and "WORLD_SIZE" in environment
    name, sm, memory = gpus[0] if gpus else (None, 0, 0)
    return Target(
        gpus=len(gpus),
        gpu=name,
        sm=sm,
        gpu_memory=memory,
        cores=_cores(),
        world_size=int(environment["WORLD_SIZE"]) if in_torchrun else None,
        local_ranks=int(environment["LOCAL_WORLD_SIZE"]) if in_torchrun and "LOCAL_WORLD_SIZE" in environment else None,
        versions=_versions(),
    )


def _gpus_by_nvml() -> list[tuple[str, int, int]]:
    if pynvml is None:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    found = []
    for number in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(number)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        name = pynvml.nvmlDeviceGetName(handle)
        found.append((str(name), major * 10 + minor, int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)))
    pynvml.nvmlShutdown()
    return found


def _gpus_by_command() -> list[tuple[str, int, int]]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpu_lines(lines)


def parse_gpu_lines(lines: list[str]) -> list[tuple[str, int, int]]:
    """`name, capability, MiB` lines of nvidia-smi -> (name, sm, bytes); a line that can't be read is left out."""
    found = []
    for line in lines:
        parts = [p.strip() for p in line.rsplit(",", 2)]
        if len(parts) == 3 and parts[1].replace(".", "").isdigit() and parts[2].isdigit():
            found.append((parts[0], int(parts[1].replace(".", "")), int(parts[2]) * 2**20))
    return found


def _visible(gpus: list[tuple[str, int, int]], visible: str | None) -> list[tuple[str, int, int]]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves: numbers or identifiers, up to the first that does not exist."""
    if visible is None:
        return gpus
    chosen = []
    for entry in filter(None, (e.strip() for e in visible.split(","))):
        if entry.isdigit() and int(entry) < len(gpus):
            chosen.append(gpus[int(entry)])
        elif entry.startswith(("GPU-", "MIG-")) and gpus:
            chosen.append(gpus[0])
        else:
            break
    return chosen


def _cores() -> int:
    """Cores of this process, or the control group's quota where that is lower."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota_file = Path("/sys/fs/cgroup/cpu.max")
    if quota_file.is_file():
        quota, _, period = quota_file.read_text().strip().partition(" ")
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            cores = min(cores, max(1, int(quota) // int(period)))
    return max(1, cores)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
