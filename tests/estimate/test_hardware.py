"""The hardware table: what a user names, what the driver names, and numbers that hang together."""

import pytest

from megaspec.core.errors import RecipeError
from megaspec.estimate.hardware import HARDWARE, hardware_named, hardware_of
from megaspec.estimate.target import Target


def target(gpu: str, memory: int = 0) -> Target:
    return Target(gpus=1, gpu=gpu, gpu_memory=memory)


@pytest.mark.parametrize("word", ["H200", "h200", "A100-40", "a100-80gb", "gb200"])
def test_names_in_any_case(word):
    assert hardware_named(word).name == word.upper().removesuffix("GB")


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("a100", ["hardware=a100 may be one of several", "A100-40 or A100-80"]),
        ("H20O", ["hardware=H20O is not known", "did you mean H200"]),
        ("tpu", ["hardware=tpu is not known", "choose A100-40, A100-80, H100, H200, B200 or GB200"]),
        ("", ["hardware= is not known"]),
    ],
)
def test_wrong_names_are_told_with_the_choices(word, told):
    with pytest.raises(RecipeError) as error:
        hardware_named(word)
    assert [problem.key for problem in error.value.problems] == ["hardware"]
    assert all(part in str(error.value) for part in told), str(error.value)


@pytest.mark.parametrize(
    ("gpu", "memory", "name"),
    [
        ("NVIDIA H200", 143771 * 2**20, "H200"),
        ("NVIDIA H100 80GB HBM3", 85520809984, "H100"),
        ("NVIDIA A100-SXM4-40GB", 40960 * 2**20, "A100-40"),
        ("NVIDIA A100-SXM4-80GB", 81920 * 2**20, "A100-80"),
        ("NVIDIA A100-SXM4-80GB", 0, "A100-80"),
        ("NVIDIA B200", 183359 * 2**20, "B200"),
        ("NVIDIA GB200", 189471 * 2**20, "GB200"),
        ("NVIDIA GH200 480GB", 97871 * 2**20, "H100"),
    ],
)
def test_the_drivers_names(gpu, memory, name):
    found = hardware_of(target(gpu, memory))
    assert found.name == name
    assert found.memory == (memory or HARDWARE[name].memory)


def test_a_planned_machine_finds_its_own_entry():
    for one in HARDWARE.values():
        assert hardware_of(target(one.name, one.memory)) == one


def test_no_entry():
    assert hardware_of(Target()) is None
    assert hardware_of(target("NVIDIA GeForce RTX 4090", 24564 * 2**20)) is None
    assert hardware_of(target("NVIDIA H20", 97871 * 2**20)) is None


@pytest.mark.parametrize("one", HARDWARE.values(), ids=HARDWARE)
def test_numbers_hang_together(one):
    """Independent of the table: an A100 has 312 TFLOP/s in bf16, each generation more; fp8 doubles bf16 from sm 89."""
    assert set(one.peak) == {"fp64", "fp32", "bf16", "fp16"} | ({"fp8"} if one.sm >= 89 else set())
    assert one.peak["bf16"] == one.peak["fp16"]
    if one.sm >= 89:
        assert one.peak["fp8"] == pytest.approx(2 * one.peak["bf16"], rel=1e-3)
    assert one.network_bandwidth < one.link_bandwidth < one.memory_bandwidth < one.peak["bf16"] / 100
    assert HARDWARE["A100-40"].peak["bf16"] == 312e12 <= one.peak["bf16"]
    # a bandwidth that reads the whole memory in 20 to 50 ms is none of a mistaken unit
    assert 0.02 < one.memory / one.memory_bandwidth < 0.05
