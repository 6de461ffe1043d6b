"""Which GPUs launch a kernel while the one before it runs."""

from dataclasses import dataclass

import pytest

from megaspec_kernels import dependent_launch

triton = pytest.importorskip("triton", reason="triton has no wheel for this platform")
pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="Triton interprets in this process")


@dataclass(frozen=True)
class Driver:
    backend: str
    arch: int

    def get_current_device(self) -> int:
        # of no other test
        return 1000 + self.arch

    def get_current_target(self) -> object:
        return triton.backends.compiler.GPUTarget(self.backend, self.arch, 32)


@pytest.mark.parametrize(("arch", "has_it"), [(80, False), (89, False), (90, True), (100, True), (120, True)])
def test_it_begins_with_hopper(arch: int, has_it: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver("cuda", arch))
    assert dependent_launch.has_dependent_launch() == has_it


def test_no_other_maker_s_gpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver("hip", 942))
    assert not dependent_launch.has_dependent_launch()


def test_the_interpreter_launches_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependent_launch, "INTERPRETED", True)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver("cuda", 90))
    assert not dependent_launch.has_dependent_launch()
