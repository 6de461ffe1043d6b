"""The command on this machine, and what a plan makes of the links that it measures."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megaspec.cli import main
from megaspec.commands import doctor
from megaspec.core.errors import HardwareError, RecipeError
from megaspec.doctor import links, probe
from megaspec.estimate.hardware import HARDWARE
from megaspec.estimate.throughput import read_throughput, shipped_table
from megaspec.launcher.rendezvous import FileRendezvous
from megaspec.runtime.rank import RankInfo

ROOT = Path(__file__).parents[2]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(doctor.machine, "WRITTEN", 2**24)
    return tmp_path


def test_this_machine(here, capfd, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    code = main(["doctor", "--json"])
    content = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert code == content["exit_code"] == 0, content
    areas = {finding["area"] for finding in content["findings"]}
    assert {"software", "gpus", "links", "shm", "disk", "limits", "environment", "probe"} <= areas
    assert content["probe"]["backend"] == "gloo"
    assert content["probe"]["ranks"] == 2
    assert len(content["probe"]["send_rates"]) == 2
    (one,) = [finding for finding in content["findings"] if finding["what"] == "CUDA_DEVICE_MAX_CONNECTIONS=1"]
    assert (one["level"], one["host"]) == ("warn", socket.gethostname())
    assert list(here.iterdir()) == []


def test_what_is_shown(here, capsys, monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert main(["doctor", "--look-only"]) == 0
    out = capsys.readouterr().out
    assert "warn  environment  NCCL_P2P_DISABLE=1\n" in out
    assert "                   do: unset it\n" in out


def test_runs_that_can_not_be_written(here, capsys):
    (here / "file").write_text("")
    for folder in ("/proc/nowhere", "file", "file/runs"):
        assert main(["doctor", "--look-only", "--run-dir", folder]) == 73, folder
        assert "error disk" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--out", "links.json"], 64, "plans count links of GPUs, and there is none here"),
        (["--out", "links.json", "--look-only"], 64, "drop --look-only"),
        (["--base", "nothing.json"], 64, "--base is a table for --out"),
    ],
)
def test_what_is_refused(here, capsys, words, code, said):
    assert main(["doctor", *words]) == code
    assert said in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_a_probe_that_fails_is_an_error():
    for code, expected in ((77, 77), (74, 74), (64, 64), (70, 70), (1, 70)):
        (finding,) = doctor.probe_result(code, None, None, 8)
        assert (finding.level, finding.code) == ("error", expected)


@pytest.fixture
def alone(tmp_path):
    me = RankInfo(0, 1, 0, 0, FileRendezvous(str(tmp_path / "store")), 20.0)
    dist.init_process_group("gloo", store=dist.FileStore(me.store.path, 1), rank=0, world_size=1)
    yield me
    dist.destroy_process_group()


def test_wrong_numbers_are_suspected_hardware(alone):
    cpu = torch.device("cpu")
    probe.check_products(alone, cpu)
    probe.check_sums(alone, cpu)

    def flip(numbers: torch.Tensor) -> None:
        numbers.view(-1)[7] += 1

    with pytest.raises(HardwareError, match="rank 0: 1 of 16384 numbers of a product"):
        probe.check_products(alone, cpu, spoil=flip)
    with pytest.raises(HardwareError, match="rank 0: 1 of 65536 sums of an all-reduce are wrong"):
        probe.check_sums(alone, cpu, spoil=flip)


# ---- links, and what a plan makes of them


def probed(*, slower: float = 1.0, network: dict | None = None) -> dict:
    """As a probe of eight H100 whose links take `slower` times what the shipped table says."""
    collectives = []
    for one in shipped_table("H200").collectives:
        content = one.model_dump(mode="json")
        content["curve"]["seconds"] = [seconds * slower for seconds in content["curve"]["seconds"]]
        collectives.append(content)
    return {
        "ranks": 8,
        "nodes": 1,
        "backend": "nccl",
        "all_reduce_seconds": 2e-5,
        "all_reduce_rate": 3e11,
        "send_seconds": 1e-5,
        "send_rates": [3e11] * 8,
        "between_nodes": [],
        "network": network,
        "collectives": collectives,
    }


def planned(capsys, *words: str) -> dict:
    assert main(["plan", "recipe=llama3_8b", "hardware=H200", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def seconds_of(plan: dict) -> float:
    return plan["step_time"]["seconds"]


def test_a_plan_counts_with_measured_links(here, capsys):
    base = links.base_table(None, HARDWARE["H200"])
    for name, slower in (("same", 1.0), ("slow", 10.0)):
        table = links.table_with_links(base, probed(slower=slower), "8 x NVIDIA H200")
        Path(f"{name}.json").write_text(table.model_dump_json())
    words = ("gpus=8", "parallelism.tp=4", "parallelism.sequence_parallel=true")
    shipped = planned(capsys, *words)
    same = planned(capsys, *words, "throughput=same.json")
    slow = planned(capsys, *words, "throughput=slow.json")
    assert seconds_of(same) == pytest.approx(seconds_of(shipped), rel=1e-9)
    assert seconds_of(slow) > 1.3 * seconds_of(shipped)
    assert "links measured on 8 x NVIDIA H200" in read_throughput(Path("slow.json")).source


def test_a_plan_counts_with_a_measured_network(here, capsys):
    base = links.base_table(None, HARDWARE["H200"])
    for name, rate in (("fast", 45e9), ("slow", 1e9)):
        network = {"bandwidth": rate, "latency": 1e-5}
        table = links.table_with_links(base, probed(network=network), "16 x NVIDIA H200")
        Path(f"{name}.json").write_text(table.model_dump_json())
    words = ("gpus=16", "parallelism.dp_strategy=fsdp", "parallelism.tp=1")
    fast = planned(capsys, *words, "throughput=fast.json")
    slow = planned(capsys, *words, "throughput=slow.json")
    assert seconds_of(slow) > 1.3 * seconds_of(fast)


def test_tables_that_links_can_not_go_into():
    with pytest.raises(RecipeError, match="for B200 no table of its arithmetic ships"):
        links.base_table(None, HARDWARE["B200"])
    with pytest.raises(RecipeError, match="a table of H200, and these are H100"):
        links.base_table(shipped_table("H200"), HARDWARE["H100"])
    nothing = probed() | {"collectives": [], "network": None}
    with pytest.raises(RecipeError, match="one rank has no link to measure"):
        links.table_with_links(shipped_table("H200"), nothing, "")


def test_slow_links_are_found():
    hardware = HARDWARE["H200"]
    assert {finding.level for finding in links.probe_findings(probed(), hardware)} == {"ok"}
    slow = probed() | {"all_reduce_rate": 2e10}
    assert [one.level for one in links.probe_findings(slow, hardware)] == ["warn", "ok"]
    uneven = probed() | {"send_rates": [3e11] * 5 + [2e10] + [3e11] * 2}
    (finding,) = [one for one in links.probe_findings(uneven, hardware) if one.level == "warn"]
    assert "20.00 GB/s from rank 5 to rank 6" in finding.what
    # between nodes a link is slower than within one, and no finding
    nodes = probed() | {"nodes": 2, "between_nodes": [3, 7], "send_rates": [3e11, 3e11, 3e11, 4e10] * 2}
    assert {finding.level for finding in links.probe_findings(nodes, hardware)} == {"ok"}


@pytest.mark.slow
def test_ranks_of_two_hosts(here):
    """As torchrun starts them on two hosts of one rank each: rank 0 tells what both have found."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "launchers"))
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, "-P", "-m", "megaspec.cli", "doctor", "--json"]
        pipe = subprocess.PIPE
        ranks.append(subprocess.Popen(command, env=environment | place, stdout=pipe, stderr=pipe, text=True))
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert outputs[1][0] == ""
    content = json.loads(outputs[0][0].splitlines()[-1])
    assert (content["probe"]["ranks"], content["probe"]["nodes"]) == (2, 2)
    assert content["probe"]["between_nodes"] == [0, 1]
    assert [finding["area"] for finding in content["findings"]].count("shm") == 2
