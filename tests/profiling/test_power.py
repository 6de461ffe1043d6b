"""Clock and power of a GPU that is made up, and where there is none."""

import ctypes
import threading
import time

import pytest

from megaspec.profiling import power
from megaspec.profiling.power import ClockAndPower, LibraryGauge, Meter, NoReadings, Reading


class Library:
    """As much of NVML as is called; `codes` by function."""

    def __init__(self, **codes: int):
        self.codes = codes
        self.asked: list[str] = []

    def __getattr__(self, name: str):
        def call(*arguments):
            self.asked.append(name)
            amounts = {
                "nvmlDeviceGetClockInfo": 1505,
                "nvmlDeviceGetPowerUsage": 691_500,
                "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            }
            if name in amounts:
                arguments[-1]._obj.value = amounts[name]
            if name == "nvmlDeviceGetClockInfo":
                assert arguments[1].value == 1  # of the SMs, not of graphics
            if name == "nvmlDeviceGetHandleByUUID":
                assert arguments[0] == b"GPU-1"
            return self.codes.get(name, 0)

        return call


def test_the_drivers_library_is_read_in_mhz_and_watts():
    gauge = LibraryGauge("GPU-1", Library())
    assert gauge.read() == Reading(1505, 691.5)
    assert gauge.limit_watts() == 700.0


@pytest.mark.parametrize("name", ["nvmlInit_v2", "nvmlDeviceGetHandleByUUID"])
def test_what_the_library_refuses_is_told(name):
    with pytest.raises(NoReadings, match=f"{name} failed with 9"):
        LibraryGauge("GPU-1", Library(**{name: 9}))


def test_without_a_driver_the_reason_is_told(monkeypatch):
    def absent(name):
        raise OSError(name)

    monkeypatch.setattr(power, "pynvml", None)
    monkeypatch.setattr(ctypes, "CDLL", absent)
    with Meter("GPU-1") as meter:
        pass
    assert meter.found() == ClockAndPower(0, why_none="libnvidia-ml.so.1, which comes with the driver, is not here")
    with Meter(None) as meter:
        pass
    assert meter.found().why_none == "there is no GPU"


def test_a_meter_reads_ten_times_a_second_and_at_both_ends():
    read_four_times = threading.Event()

    class Rising:
        clock = 1000

        def read(self):
            self.clock += 10
            if self.clock == 1040:
                read_four_times.set()
            return Reading(self.clock, 500.0)

        def limit_watts(self):
            return None

    begun = time.monotonic()
    with Meter("GPU-1", Rising()) as meter:
        assert read_four_times.wait(60)
    found = meter.found()
    # the first, those after each tenth of a second, the last: a busy machine may have left some out
    assert power.EVERY_SECONDS == 0.1
    assert 5 <= found.readings <= 2 + (time.monotonic() - begun) / 0.1
    assert found.clock_mhz_lowest == 1010
    assert found.clock_mhz_highest == 1000 + 10 * found.readings
    assert found.clock_mhz == pytest.approx((found.clock_mhz_lowest + found.clock_mhz_highest) / 2)
    assert (found.power_watts, found.power_limit_watts) == (500.0, None)
