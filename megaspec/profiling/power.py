"""A GPU's clock and power while something runs, by NVML. Torch-free.

NVML comes with the driver. nvidia-ml-py, the extra `gpu`, is Python's way to it; where it is not installed the library
is called directly. Either way a reading takes no time of the GPU.
"""

import ctypes
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

try:
    import pynvml  # the extra `gpu`
except ImportError:
    pynvml = None

EVERY_SECONDS = 0.1
_LIBRARY = "libnvidia-ml.so.1"
# nvml.h: NVML_CLOCK_SM
_SM_CLOCK = 1


class NoReadings(Exception):
    """Why clock and power can't be told."""


@dataclass(frozen=True)
class Reading:
    """One moment of a GPU."""

    clock_mhz: int
    """Of the SMs."""
    power_watts: float


@dataclass(frozen=True)
class ClockAndPower:
    """A GPU over some time; without readings, why there are none."""

    readings: int
    clock_mhz: float | None = None
    """Mean; the next two are the lowest and the highest."""
    clock_mhz_lowest: float | None = None
    clock_mhz_highest: float | None = None
    power_watts: float | None = None
    """Mean."""
    power_limit_watts: float | None = None
    why_none: str = ""


class Gauge(Protocol):
    """What reads one GPU."""

    def read(self) -> Reading:
        """Now. NoReadings: the GPU does not tell."""

    def limit_watts(self) -> float | None:
        """The most that the GPU may take; None where it does not tell."""


class PynvmlGauge:
    """By nvidia-ml-py."""

    def __init__(self, uuid: str):
        """NoReadings: there is no driver, or no such GPU."""
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError as error:
            raise NoReadings(f"NVML: {error}") from None

    def read(self) -> Reading:
        """Now."""
        try:
            clock = pynvml.nvmlDeviceGetClockInfo(self._handle, pynvml.NVML_CLOCK_SM)
            return Reading(int(clock), pynvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3)
        except pynvml.NVMLError as error:
            raise NoReadings(f"NVML: {error}") from None

    def limit_watts(self) -> float | None:
        """As NVML enforces it."""
        try:
            return pynvml.nvmlDeviceGetEnforcedPowerLimit(self._handle) / 1e3
        except pynvml.NVMLError:
            return None


class LibraryGauge:
    """By the driver's library."""

    def __init__(self, uuid: str, library: ctypes.CDLL | None = None):
        """NoReadings: there is no driver, or no such GPU."""
        if library is None:
            try:
                library = ctypes.CDLL(_LIBRARY)
            except OSError:
                raise NoReadings(f"{_LIBRARY}, which comes with the driver, is not here") from None
        self._library = library
        self._handle = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._handle))

    def read(self) -> Reading:
        """Now."""
        clock = ctypes.c_uint()
        milliwatts = ctypes.c_uint()
        self._call("nvmlDeviceGetClockInfo", self._handle, ctypes.c_int(_SM_CLOCK), ctypes.byref(clock))
        self._call("nvmlDeviceGetPowerUsage", self._handle, ctypes.byref(milliwatts))
        return Reading(clock.value, milliwatts.value / 1e3)

    def limit_watts(self) -> float | None:
        """As NVML enforces it."""
        milliwatts = ctypes.c_uint()
        try:
            self._call("nvmlDeviceGetEnforcedPowerLimit", self._handle, ctypes.byref(milliwatts))
        except NoReadings:
            return None
        return milliwatts.value / 1e3

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise NoReadings(f"NVML: {name} failed with {code}")


def gauge_of(uuid: str) -> Gauge:
    """Reads the GPU that NVML knows by `GPU-...`. NoReadings: it can't be read."""
    if pynvml is not None:
        return PynvmlGauge(uuid)
    return LibraryGauge(uuid)


class Meter:
    """While entered: a thread that reads a GPU ten times a second, and once at each end.

    `uuid` None: there is no GPU to read.
    """

    def __init__(self, uuid: str | None, gauge: Gauge | None = None):
        self._readings: list[Reading] = []
        self._why_none = ""
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._gauge = gauge
        if gauge is None and uuid is None:
            self._why_none = "there is no GPU"
        elif gauge is None:
            try:
                self._gauge = gauge_of(uuid)
            except NoReadings as error:
                self._why_none = str(error)

    def __enter__(self) -> "Meter":
        if self._gauge is not None:
            self._read()
            self._thread = threading.Thread(target=self._watch, name="clock and power", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._read()

    def found(self) -> ClockAndPower:
        """Of all readings so far."""
        if not self._readings:
            return ClockAndPower(0, why_none=self._why_none or "nothing was read")
        clocks = [reading.clock_mhz for reading in self._readings]
        watts = [reading.power_watts for reading in self._readings]
        return ClockAndPower(
            readings=len(self._readings),
            clock_mhz=sum(clocks) / len(clocks),
            clock_mhz_lowest=min(clocks),
            clock_mhz_highest=max(clocks),
            power_watts=sum(watts) / len(watts),
            power_limit_watts=None if self._gauge is None else self._gauge.limit_watts(),
        )

    def _watch(self) -> None:
        while not self._stopped.wait(EVERY_SECONDS):
            self._read()

    def _read(self) -> None:
        if self._why_none or self._gauge is None:
            return
        try:
            self._readings.append(self._gauge.read())
        except NoReadings as error:
            self._why_none = str(error)
