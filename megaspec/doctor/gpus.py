"""GPUs as their driver tells of them through NVML: errors of memory, clocks, MIG, links. Torch-free."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

try:
    import pynvml  # the extra `gpu`
except ImportError:
    pynvml = None

from megaspec.core.errors import HardwareError, RecipeError
from megaspec.core.units import GIB, bytes_in_words
from megaspec.doctor.finding import Finding, error, ok, warn

CODE = HardwareError.exit_code
# Bits of the driver's word for why clocks are lower than they could be: those that no load explains.
SLOWED = {
    "hardware slowdown": "nvmlClocksEventReasonHwSlowdown",
    "too hot (hardware)": "nvmlClocksEventReasonHwThermalSlowdown",
    "power brake from outside": "nvmlClocksEventReasonHwPowerBrakeSlowdown",
    "too hot (software)": "nvmlClocksEventReasonSwThermalSlowdown",
    "clocks that somebody has set": "nvmlClocksEventReasonApplicationsClocksSetting",
}
HARDWARE_SLOWED = ("hardware slowdown", "too hot (hardware)", "power brake from outside")
# Bytes of a GPU that may be in use without anybody training on it.
IN_USE = GIB
MOST_LINKS = 18


@dataclass(frozen=True)
class Gpu:
    """One GPU. None: the driver does not say."""

    number: int
    name: str
    uncorrected: int | None = None
    """Errors of memory that ECC found and could not correct, since the driver was loaded."""
    ecc: bool | None = None
    """Whether ECC is on."""
    remap_pending: bool | None = None
    """Rows of memory are bad and will be replaced when the GPU is reset."""
    remap_failed: bool | None = None
    """Rows are bad, and there are none left to replace them."""
    slowed: tuple[str, ...] = ()
    """Why its clocks are lower than they could be: of SLOWED."""
    celsius: int | None = None
    mig: bool | None = None
    """It is divided into instances."""
    persistence: bool | None = None
    """The driver stays loaded while nobody uses it."""
    used: int | None = None
    """Bytes of its memory in use."""
    links: int | None = None
    """NVLinks that are up; None where it has none."""
    links_down: int | None = None
    """NVLinks that are down."""
    link_errors: int | None = None
    """CRC and replay errors that its links have counted."""
    lanes: int | None = None
    """Of PCIe, in use."""
    most_lanes: int | None = None
    """Of PCIe, that both sides could use."""


@dataclass(frozen=True)
class Driver:
    """What NVML says of all."""

    version: str
    cuda: tuple[int, int]
    gpus: tuple[Gpu, ...]


def read_driver() -> Driver | None:
    """Through NVML; None where it is not installed, or finds no driver."""
    if pynvml is None:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        # 13000 for 13.0
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        gpus = []
        for number in range(pynvml.nvmlDeviceGetCount()):
            gpus.append(_read(number))
        return Driver(str(pynvml.nvmlSystemGetDriverVersion()), (cuda // 1000, cuda % 1000 // 10), tuple(gpus))
    finally:
        pynvml.nvmlShutdown()


def _read(number: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(number)
    remapped = _asked(pynvml.nvmlDeviceGetRemappedRows, handle)
    mig = _asked(pynvml.nvmlDeviceGetMigMode, handle)
    ecc = _asked(pynvml.nvmlDeviceGetEccMode, handle)
    memory = _asked(pynvml.nvmlDeviceGetMemoryInfo, handle)
    persistence = _asked(pynvml.nvmlDeviceGetPersistenceMode, handle)
    volatile = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    links, down, errors = _links(handle)
    return Gpu(
        number=number,
        name=str(pynvml.nvmlDeviceGetName(handle)),
        uncorrected=_asked(pynvml.nvmlDeviceGetTotalEccErrors, handle, *volatile),
        ecc=None if ecc is None else bool(ecc[0]),
        # correctable, uncorrectable, pending, failure
        remap_pending=None if remapped is None else bool(remapped[2]),
        remap_failed=None if remapped is None else bool(remapped[3]),
        slowed=_slowed(_asked(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0),
        celsius=_asked(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        mig=None if mig is None else bool(mig[0]),
        persistence=None if persistence is None else bool(persistence),
        used=None if memory is None else int(memory.used),
        links=links,
        links_down=down,
        link_errors=errors,
        lanes=_asked(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        most_lanes=_asked(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
    )


def _asked(ask: Callable[..., Any], *words: Any) -> Any:
    """The driver's answer; None where this GPU, or this driver, has none."""
    try:
        return ask(*words)
    except pynvml.NVMLError:
        return None


def _slowed(reasons: int) -> tuple[str, ...]:
    return tuple(words for words, name in SLOWED.items() if reasons & getattr(pynvml, name))


def _links(handle: Any) -> tuple[int | None, int | None, int | None]:
    """NVLinks that are up, that are down, and errors of those that are up."""
    states = []
    errors = 0
    kinds = (pynvml.NVML_NVLINK_ERROR_DL_REPLAY, pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT)
    for link in range(MOST_LINKS):
        state = _asked(pynvml.nvmlDeviceGetNvLinkState, handle, link)
        if state is None:
            continue
        states.append(bool(state))
        for kind in kinds:
            errors += _asked(pynvml.nvmlDeviceGetNvLinkErrorCounter, handle, link, kind) or 0
    if not states:
        return None, None, None
    return sum(states), states.count(False), errors


def gpu_findings(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """What is wrong with GPUs, a line for each thing; one where a GPU is well."""
    for gpu in gpus:
        found = list(_of_one(gpu))
        if not found:
            found = [ok(_area(gpu), _in_words(gpu))]
        yield from found
    names = {gpu.name for gpu in gpus}
    if len(names) > 1:
        why = "all ranks wait for the slowest, and plans take them to be alike"
        yield warn(
            "gpus", f"{len(names)} kinds: {', '.join(sorted(names))}", why=why, do="choose with CUDA_VISIBLE_DEVICES"
        )
    counts = {gpu.links for gpu in gpus if gpu.links is not None}
    if len(counts) > 1:
        why = "a ring is as fast as its slowest link"
        do = "look which links are down: nvidia-smi nvlink --status; reset the GPU or hand the node back"
        what = f"GPUs have {', '.join(map(str, sorted(counts)))} NVLinks up"
        yield error("links", what, why=why, do=do, code=CODE)


def _of_one(gpu: Gpu) -> Iterator[Finding]:
    area = _area(gpu)
    if gpu.uncorrected:
        what = f"{gpu.uncorrected} uncorrected errors of memory since the driver was loaded"
        why = "what was read there was wrong: weights or gradients may be"
        do = "go on from a checkpoint that is older, drain the node, reset the GPU: nvidia-smi --gpu-reset"
        yield error(area, what, why=why, do=do, code=CODE)
    if gpu.remap_failed:
        why = "bad rows of memory are left in use"
        yield error(area, "no spare rows are left for bad ones", why=why, do="have the GPU replaced", code=CODE)
    if gpu.remap_pending:
        why = "bad rows of memory stay in use until the GPU is reset"
        do = "drain the node and reset the GPU: nvidia-smi --gpu-reset"
        yield error(area, "rows of memory wait to be replaced", why=why, do=do, code=CODE)
    hardware = [words for words in gpu.slowed if words in HARDWARE_SLOWED]
    if hardware:
        what = f"clocks are held down: {', '.join(hardware)}{_heat(gpu)}"
        why = "every rank waits for this one"
        yield error(area, what, why=why, do="look at cooling and power of the node, or hand it back", code=CODE)
    software = [words for words in gpu.slowed if words not in HARDWARE_SLOWED]
    if software:
        what = f"clocks are lower than they could be: {', '.join(software)}{_heat(gpu)}"
        do = "nvidia-smi --reset-applications-clocks; look at the cooling of the node"
        yield warn(area, what, why="every rank waits for this one", do=do)
    if gpu.ecc is False:
        why = "a flipped bit of memory stays unseen"
        yield warn(area, "ECC is off", why=why, do="nvidia-smi --ecc-config=1, then reset the GPU")
    if gpu.mig:
        why = "an instance has a part of the GPU, and NCCL joins none of them"
        yield warn(area, "MIG is on", why=why, do="train on one instance alone, or nvidia-smi -mig 0")
    if gpu.persistence is False:
        why = "the driver is loaded anew by each start, which takes seconds, and forgets its counters of errors"
        yield warn(area, "persistence mode is off", why=why, do="nvidia-smi -pm 1, or start nvidia-persistenced")
    if gpu.links_down:
        what = f"{gpu.links_down} of {gpu.links_down + (gpu.links or 0)} NVLinks are down"
        do = "nvidia-smi nvlink --status; reset the GPU or hand the node back"
        yield error(area, what, why="collectives are as fast as the slowest link", do=do, code=CODE)
    if gpu.link_errors:
        why = "each is sent again, which costs time; a link that collects them is about to fail"
        yield warn(
            area, f"{gpu.link_errors} errors on its NVLinks", why=why, do="watch it: nvidia-smi nvlink --errorcounters"
        )
    if gpu.lanes and gpu.most_lanes and gpu.lanes < gpu.most_lanes:
        why = "offload, checkpoints and network cards behind the same switch have that part of the rate"
        what = f"PCIe has {gpu.lanes} of {gpu.most_lanes} lanes"
        yield warn(area, what, why=why, do="have the card seated anew, or the node handed back")
    if gpu.used is not None and gpu.used > IN_USE:
        why = "a run that is planned to fit may not"
        do = "nvidia-smi shows whose it is; end it, or choose other GPUs with CUDA_VISIBLE_DEVICES"
        yield warn(area, f"{bytes_in_words(gpu.used)} of its memory are in use", why=why, do=do)


def _area(gpu: Gpu) -> str:
    return f"gpu {gpu.number}"


def _heat(gpu: Gpu) -> str:
    return "" if gpu.celsius is None else f", {gpu.celsius} °C"


def _in_words(gpu: Gpu) -> str:
    parts = [gpu.name]
    if gpu.uncorrected is not None:
        parts.append("no errors of memory")
    if gpu.links:
        parts.append(f"{gpu.links} NVLinks")
    return ", ".join(parts) + _heat(gpu)


def count_finding(driver: Driver | None, visible: int) -> Finding:
    """How many GPUs there are, and how many this process may use."""
    there = 0 if driver is None else len(driver.gpus)
    if there and not visible:
        why = "ranks would train on the CPU"
        do = "unset CUDA_VISIBLE_DEVICES, or name GPUs in it"
        what = f"none of the {there} GPUs is visible to this process"
        return error("gpus", what, why=why, do=do, code=RecipeError.exit_code)
    if not visible:
        return ok("gpus", "none: what trains here trains on the CPU")
    return ok("gpus", f"{visible} of {max(there, visible)} visible")
