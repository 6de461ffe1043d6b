"""What is found on machines that are broken in one way each."""

import errno
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megaspec.doctor import gpus, machine, software
from megaspec.doctor.finding import Finding, error, exit_code, ok, warn
from megaspec.doctor.gpus import Driver, Gpu
from megaspec.doctor.machine import Card
from megaspec.doctor.software import Software
from megaspec.launcher.exit_file import MEANINGS

ROOT = Path(__file__).parents[2]
GPU = Gpu(
    0,
    "NVIDIA H100 80GB HBM3",
    uncorrected=0,
    ecc=True,
    remap_pending=False,
    remap_failed=False,
    celsius=40,
    mig=False,
    persistence=True,
    used=0,
    links=18,
    links_down=0,
    link_errors=0,
    lanes=16,
    most_lanes=16,
)
SOFTWARE = Software(
    packages={"torch": "2.13.0", "triton": "3.7.1", "nvidia-nccl-cu13": "2.29.7", "nvidia-ml-py": "13.0"},
    torch_cuda="13.0",
    torch_triton="==3.7.1",
    driver="580.95.05",
    driver_cuda=(13, 0),
    gpus=8,
    sm=90,
)


def bad(findings) -> list[Finding]:
    return [finding for finding in findings if finding.level != "ok"]


# ---- GPUs


def test_gpus_that_are_well():
    assert bad(gpus.gpu_findings([GPU, replace(GPU, number=1)])) == []


@pytest.mark.parametrize(
    ("broken", "level", "said"),
    [
        ({"uncorrected": 3}, "error", "3 uncorrected errors of memory"),
        ({"remap_failed": True}, "error", "no spare rows"),
        ({"remap_pending": True}, "error", "rows of memory wait"),
        ({"slowed": ("too hot (hardware)",), "celsius": 91}, "error", "too hot (hardware), 91 °C"),
        ({"slowed": ("clocks that somebody has set",)}, "warn", "clocks are lower"),
        ({"ecc": False}, "warn", "ECC is off"),
        ({"mig": True}, "warn", "MIG is on"),
        ({"persistence": False}, "warn", "persistence mode is off"),
        ({"link_errors": 7}, "warn", "7 errors on its NVLinks"),
        ({"lanes": 8}, "warn", "8 of 16 lanes"),
        ({"used": 30 * 2**30}, "warn", "30.0 GiB of its memory are in use"),
    ],
)
def test_a_gpu_that_is_not(broken, level, said):
    (finding,) = bad(gpus.gpu_findings([replace(GPU, **broken), replace(GPU, number=1)]))
    assert (finding.area, finding.level) == ("gpu 0", level)
    assert said in finding.what
    assert finding.code == (77 if level == "error" else 0)


def test_gpus_that_differ():
    found = bad(gpus.gpu_findings([GPU, replace(GPU, number=1, links=12, links_down=6)]))
    assert [finding.area for finding in found] == ["gpu 1", "links"]
    assert "6 of 18 NVLinks are down" in found[0].what
    (finding,) = bad(gpus.gpu_findings([GPU, replace(GPU, number=1, name="NVIDIA H200")]))
    assert "2 kinds" in finding.what


def test_what_a_driver_does_not_say_is_no_finding():
    assert bad(gpus.gpu_findings([Gpu(0, "NVIDIA T4")])) == []


def test_gpus_that_nobody_sees():
    driver = Driver("580.95.05", (13, 0), (GPU,))
    assert gpus.count_finding(driver, 0).level == "error"
    assert gpus.count_finding(driver, 1).level == "ok"
    assert gpus.count_finding(None, 0).level == "ok"


def test_every_reason_has_its_bit():
    pynvml = pytest.importorskip("pynvml")
    bits = [getattr(pynvml, name) for name in gpus.SLOWED.values()]
    assert len(set(bits)) == len(bits)
    for words, bit in zip(gpus.SLOWED, bits, strict=True):
        assert gpus._slowed(bit) == (words,)
    assert gpus._slowed(pynvml.nvmlClocksEventReasonGpuIdle | pynvml.nvmlClocksEventReasonSwPowerCap) == ()


# ---- software


def test_versions_that_fit():
    assert bad(software.software_findings(SOFTWARE)) == []


def changed(**packages: str | None) -> Software:
    made = dict(SOFTWARE.packages)
    for name, version in packages.items():
        made.pop(name.replace("_", "-"), None)
        if version is not None:
            made[name.replace("_", "-")] = version
    return replace(SOFTWARE, packages=made)


@pytest.mark.parametrize(
    ("found", "level", "said"),
    [
        (changed(torch=None), "error", "torch is not installed"),
        (changed(torch="2.10.0"), "error", "outside of"),
        (replace(SOFTWARE, torch_cuda=None), "error", "is built for CPUs"),
        (replace(SOFTWARE, driver="570.10"), "error", "driver 570.10, torch is built for CUDA 13.0"),
        (replace(SOFTWARE, torch_cuda="13.2"), "warn", "torch is built for CUDA 13.2"),
        (replace(SOFTWARE, driver=None, driver_cuda=None, gpus=0), "warn", "no NVIDIA driver"),
        (changed(triton=None), "error", "triton is not installed"),
        (changed(triton="3.5.0"), "warn", "torch asks for triton==3.7.1"),
        (changed(nvidia_nccl_cu12="2.27"), "warn", "nvidia-nccl-cu13 2.29.7 and nvidia-nccl-cu12 2.27"),
        (changed(nvidia_nccl_cu13=None, nvidia_nccl_cu12="2.27"), "warn", "nvidia-nccl-cu12"),
        (changed(nvidia_ml_py=None), "warn", "nvidia-ml-py is not installed"),
        (changed(transformer_engine="2.10", transformer_engine_torch="2.10"), "warn", "older than 2.20"),
        (changed(transformer_engine="2.20"), "warn", "without transformer-engine-torch"),
        (
            changed(transformer_engine_cu12="2.20"),
            "error",
            "transformer-engine-cu12 2.20, torch is built for CUDA 13.0",
        ),
        (replace(changed(flash_attn_4="4.0.0b36"), sm=80), "warn", "flash-attn-4"),
    ],
)
def test_versions_that_do_not_fit(found, level, said):
    (finding,) = [one for one in bad(software.software_findings(found)) if said in one.what]
    assert finding.level == level
    assert finding.do


def test_what_is_asked_of_versions_is_what_the_project_asks():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [Requirement(line) for line in project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        needed += [Requirement(line) for line in extra]
    by_name = {one.name: one.specifier for one in needed}
    assert by_name["torch"] == Requirement(f"x{software.TORCH}").specifier
    for name, least in software.LEAST.items():
        assert str(by_name[name]) == f">={least}"


# ---- the rest of a machine


@pytest.mark.parametrize(
    ("size", "free", "ranks", "level"),
    [
        (None, None, 1, "error"),
        (64 * 2**20, 64 * 2**20, 8, "error"),
        (64 * 2**20, 64 * 2**20, 1, "warn"),
        (2**31, 2**31, 8, "warn"),
        (2**36, 2**36, 8, "ok"),
        # large, and full
        (2**36, 2**20, 8, "error"),
    ],
)
def test_shm(size, free, ranks, level):
    assert machine.shm_finding(size, free, ranks=ranks).level == level


def test_disk(tmp_path, monkeypatch):
    assert machine.space_finding(tmp_path, 2**30).level == "warn"
    assert machine.rate_finding(tmp_path, 50e6).level == "warn"
    assert machine.rate_finding(tmp_path, 2e9).level == "ok"
    assert machine.write_rate(tmp_path, 2**22) > 0
    assert list(tmp_path.iterdir()) == []
    # where the folder is not there yet, its disk is looked at
    assert [one.area for one in machine.look_at_disk(tmp_path / "a" / "b")] == ["disk", "disk"]
    assert list(tmp_path.iterdir()) == []

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(machine.os, "write", full)
    *_, finding = machine.look_at_disk(tmp_path)
    assert (finding.level, finding.code) == ("error", 73)
    assert "delete old runs" in finding.do
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("files", "locked", "has_cards", "levels"),
    [
        (1024, -1, False, ["error", "ok"]),
        (20000, -1, True, ["warn", "ok"]),
        (-1, 65536, False, ["ok", "ok"]),
        (2**20, 65536, True, ["ok", "error"]),
    ],
)
def test_limits(files, locked, has_cards, levels):
    found = list(machine.limit_findings(files, locked, has_network_cards=has_cards))
    assert [finding.level for finding in found] == levels


def test_variables():
    found = bad(machine.variable_findings({"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_DEBUG": "trace"}, gpus=8))
    assert [finding.what for finding in found] == ["CUDA_DEVICE_MAX_CONNECTIONS=1", "NCCL_DEBUG=trace"]
    well = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1", "NCCL_P2P_DISABLE": "0"}
    assert bad(machine.variable_findings(well, gpus=8)) == []
    assert len(bad(machine.variable_findings({"OMP_NUM_THREADS": "1"}, gpus=0))) == 1
    told = list(machine.variable_findings({"NCCL_SOCKET_IFNAME": "ib0"}, gpus=8))
    assert [finding.what for finding in told] == ["NCCL_SOCKET_IFNAME=ib0"]


def test_cards(tmp_path):
    net = tmp_path / "class" / "net"
    for name, state, speed in (("eth0", "up", "1000"), ("eth1", "down", "100000"), ("lo", "up", "")):
        (net / name).mkdir(parents=True)
        (net / name / "operstate").write_text(f"{state}\n")
        (net / name / "speed").write_text(f"{speed}\n")
        if name != "lo":
            (net / name / "device").mkdir()
    for number, state in ((0, "4: ACTIVE"), (1, "1: DOWN")):
        port = tmp_path / "class" / "infiniband" / f"mlx5_{number}" / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    cards = machine.read_cards(tmp_path)
    assert cards == [
        Card("eth0", True, 1000),
        Card("eth1", False, 100000),
        Card("mlx5_0:1", True, 400000, is_rdma=True),
        Card("mlx5_1:1", False, 400000, is_rdma=True),
    ]
    found = bad(machine.card_findings(cards, nodes=2))
    assert [finding.what for finding in found] == ["eth0, 1 Gb/s", "mlx5_1:1 is down, 400 Gb/s"]
    assert "NCCL_IB_HCA=^mlx5_1" in found[1].do
    # alone a slow card is no matter
    assert len(bad(machine.card_findings(cards, nodes=1))) == 1


@pytest.mark.parametrize(
    ("variable", "value", "is_there"),
    [
        ("NCCL_SOCKET_IFNAME", "eth0", True),
        ("NCCL_SOCKET_IFNAME", "eth", True),
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "=bond0,eth1", True),
        ("NCCL_SOCKET_IFNAME", "^lo,docker", True),
        ("NCCL_SOCKET_IFNAME", "^lo,eth", False),
        ("NCCL_SOCKET_IFNAME", "ib0", False),
        ("GLOO_SOCKET_IFNAME", "eth0", True),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("GLOO_SOCKET_IFNAME", "ib0", False),
        ("NCCL_IB_HCA", "mlx5", True),
        ("NCCL_IB_HCA", "=mlx5_0:1", True),
        ("NCCL_IB_HCA", "^mlx5_1", True),
        ("NCCL_IB_HCA", "bnxt", False),
    ],
)
def test_variables_name_cards_that_are_there(variable, value, is_there):
    """With a name of another cluster's card ranks of several hosts would end, or go over a slow network in silence."""
    cards = [Card("eth0", True), Card("mlx5_0:1", True, is_rdma=True), Card("mlx5_1:1", True, is_rdma=True)]
    for nodes in (1, 2):
        found = list(machine.interface_findings({variable: value}, ["eth0", "eth1", "lo"], cards, nodes=nodes))
        assert len(found) == (0 if is_there else 1)
        for finding in found:
            assert f"{variable}={value} names no" in finding.what
            assert "eth0, eth1, lo" in finding.what or "mlx5_0, mlx5_1" in finding.what
            is_error = nodes > 1 and variable != "NCCL_IB_HCA"
            assert finding.level == ("error" if is_error else "warn")


@pytest.mark.parametrize(
    ("address", "nodes", "level"),
    [(None, 1, "error"), ("127.0.1.1", 2, "error"), ("127.0.1.1", 1, "ok"), ("10.0.0.1", 2, "ok")],
)
def test_a_hosts_own_name(address, nodes, level):
    assert machine.name_finding("node1", address, nodes=nodes).level == level


# ---- findings


def test_an_exit_code_is_one_of_the_interface():
    assert exit_code([ok("a", "b"), warn("a", "b", why="c", do="d")]) == 0
    found = [error("a", "b", why="c", do="d", code=code) for code in (64, 73, 74, 77)]
    assert exit_code(found) == 77
    assert exit_code(found[:3]) == 74
    assert exit_code(found[:2]) == 73
    assert exit_code(found[:1]) == 64
    assert {64, 70, 73, 74, 77} <= set(MEANINGS)


def test_a_finding_says_what_to_do():
    with pytest.raises(AssertionError):
        Finding("a", "warn", "b")
    with pytest.raises(AssertionError):
        Finding("a", "error", "b", "c", "d")
    with pytest.raises(AssertionError):
        Finding("a", "warn", "b", "c", "d", code=77)
