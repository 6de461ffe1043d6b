"""The machine that a run is resolved for. `Target` is plain data; only `detect_target` looks at this machine."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

try:
    import pynvml  # the extra `gpu`; nvidia-smi answers where it is not installed
except ImportError:
    pynvml = None

from pydantic import Field

from megaspec.core.frozen import Frozen, NonNegativeInt, PositiveInt
from megaspec.estimate.cpu_memory import available_memory
from megaspec.estimate.hardware import hardware_of
from megaspec_kernels.catalog import PACKAGES as KERNEL_PACKAGES

_PACKAGES = (
    "megaspec",
    "torch",
    "numpy",
    "pydantic",
    "safetensors",
    "tokenizers",
    "triton",
    "tensorboard",
    "wandb",
    "mlflow-skinny",
    "trackio",
    # what implementations of kernels may need
    *KERNEL_PACKAGES,
)


class DetectedGpu(NamedTuple):
    """A GPU as its driver describes it."""

    name: str
    sm: int
    """Compute capability, 90 for Hopper."""
    memory: int
    """Bytes."""


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
    memory: NonNegativeInt = 0
    """Bytes of this machine's own memory that processes could still take when it was looked at; 0 where it is not
    known."""
    world_size: PositiveInt | None = None
    """Ranks that torchrun has started. None: the launcher starts them."""
    local_ranks: PositiveInt | None = None
    """Ranks that torchrun has started on this machine."""
    places: NonNegativeInt | None = None
    """Ranks that a supervisor has room for on a machine without GPUs. None: nothing says how many."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Version by package; what is not installed is not listed."""

    @property
    def device(self) -> str:
        """`cuda` where there are GPUs and a torch that can use them, else `cpu`."""
        if self.gpus and "+cpu" not in self.versions.get("torch", ""):
            return "cuda"
        return "cpu"

    def peak_flops(self, precision: str) -> float | None:
        """Peak of one GPU in FLOP/s for a precision's matrix products; None where it is not known."""
        if self.device != "cuda":
            return None
        hardware = hardware_of(self)
        if hardware is None:
            return None
        return hardware.peak.get(precision)


def detect_target(environment: Mapping[str, str] | None = None) -> Target:
    """This machine. Imports no torch: GPUs are asked through NVML or nvidia-smi, cores through the scheduler,
    memory through the kernel."""
    if environment is None:
        environment = os.environ
    found: dict[str, object] = {"cores": _cores(), "memory": available_memory(), "versions": _versions()}
    gpus = _visible(_gpus_by_nvml() or _gpus_by_command(), environment.get("CUDA_VISIBLE_DEVICES"))
    if gpus:
        # those of one machine are taken to be alike
        first = gpus[0]
        found |= {"gpus": len(gpus), "gpu": first.name, "sm": first.sm, "gpu_memory": first.memory}
    in_torchrun = "RANK" in environment and "WORLD_SIZE" in environment
    if in_torchrun:
        found["world_size"] = int(environment["WORLD_SIZE"])
    if in_torchrun and "LOCAL_WORLD_SIZE" in environment:
        found["local_ranks"] = int(environment["LOCAL_WORLD_SIZE"])
    return Target(**found)


def gpu_identifiers(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Identifiers (GPU-...) of the GPUs that this process may use, in the order of their numbers: those stay when
    another GPU is gone, and numbers don't. () without a GPU."""
    if environment is None:
        environment = os.environ
    found = _identifiers_by_nvml() or _identifiers_by_command()
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(found)
    chosen = []
    for part in visible.split(","):
        entry = part.strip()
        if entry.isdigit() and int(entry) < len(found):
            chosen.append(found[int(entry)])
        elif entry.startswith(("GPU-", "MIG-")):
            # CUDA takes the beginning of an identifier for the whole
            whole = [name for name in found if name.startswith(entry)]
            chosen += whole[:1] or [entry]
        elif entry:
            break
    return tuple(dict.fromkeys(chosen))


def _identifiers_by_nvml() -> list[str]:
    if pynvml is None:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    found = []
    for number in range(pynvml.nvmlDeviceGetCount()):
        identifier = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(number))
        if isinstance(identifier, bytes):
            identifier = identifier.decode()
        found.append(identifier)
    pynvml.nvmlShutdown()
    return found


def _identifiers_by_command() -> list[str]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in lines if line.strip().startswith("GPU-")]


def _gpus_by_nvml() -> list[DetectedGpu]:
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
        memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
        found.append(DetectedGpu(str(name), major * 10 + minor, memory))
    pynvml.nvmlShutdown()
    return found


def _gpus_by_command() -> list[DetectedGpu]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpu_lines(lines)


def parse_gpu_lines(lines: list[str]) -> list[DetectedGpu]:
    """`name, capability, MiB` lines of nvidia-smi; a line that can't be read is left out."""
    found = []
    for line in lines:
        # a name may hold a comma
        parts = [p.strip() for p in line.rsplit(",", 2)]
        if len(parts) == 3 and parts[1].replace(".", "").isdigit() and parts[2].isdigit():
            found.append(DetectedGpu(parts[0], int(parts[1].replace(".", "")), int(parts[2]) * 2**20))
    return found


def _visible(gpus: list[DetectedGpu], visible: str | None) -> list[DetectedGpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves: numbers or identifiers, up to the first that does not exist."""
    if visible is None:
        return gpus
    chosen = []
    for part in visible.split(","):
        entry = part.strip()
        if not entry:
            continue
        if entry.isdigit() and int(entry) < len(gpus):
            chosen.append(gpus[int(entry)])
        elif entry.startswith(("GPU-", "MIG-")) and gpus:
            # which one it is makes no difference among GPUs that are alike
            chosen.append(gpus[0])
        else:
            break
    return chosen


def _cores() -> int:
    """Cores of this process, or the control group's quota where that is lower."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    # "200000 100000": microseconds of CPU time in each period; "max 100000" without a limit
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
