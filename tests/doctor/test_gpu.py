"""The doctor on GPUs: NVML answers, numbers are right, and links that are measured go into a plan. Seconds."""

import json
from pathlib import Path

import pytest
import torch

from megaspec.cli import main
from megaspec.doctor.gpus import read_driver
from megaspec.estimate.hardware import hardware_of
from megaspec.estimate.target import detect_target
from megaspec.estimate.throughput import read_table

pytestmark = pytest.mark.gpu


def test_nvml_answers():
    driver = read_driver()
    if driver is None:
        pytest.skip("nvidia-ml-py is not installed here")
    assert len(driver.gpus) >= torch.cuda.device_count()
    assert driver.cuda[0] >= 12
    first = driver.gpus[0]
    assert first.name == torch.cuda.get_device_name(0)
    assert first.celsius is not None
    assert first.used is not None


def test_this_machine(tmp_path, monkeypatch, capfd, tell):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    code = main(["doctor", "--json"])
    content = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert code == content["exit_code"]
    for finding in content["findings"]:
        tell(f"{finding['level']} {finding['area']}: {finding['what']}")
    # a borrowed machine may have small limits or a hot GPU; its numbers are right and its ranks meet
    assert not [one for one in content["findings"] if one["area"] == "probe" and one["level"] == "error"]
    assert content["probe"]["backend"] == "nccl"
    assert content["probe"]["ranks"] == torch.cuda.device_count()


def test_links_change_a_plan(tmp_path, monkeypatch, capfd, tell):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    hardware = hardware_of(detect_target())
    main(["doctor", "--out", "links.json"])
    tell(capfd.readouterr().out)
    table = read_table(Path("links.json"))
    assert {one.ranks for one in table.collectives} >= {2}
    times = []
    for words in ((), ("throughput=links.json",)):
        ask = [
            "plan",
            "recipe=llama3_2_1b",
            f"hardware={hardware.name}",
            "gpus=2",
            "parallelism.tp=2",
            "--json",
            *words,
        ]
        assert main(ask) == 0
        times.append(json.loads(capfd.readouterr().out)["step_time"]["seconds"])
    tell(f"a step of llama3_2_1b over tp 2: {times[0]:.4f} s by the shipped links, {times[1]:.4f} s by these")
    assert times[0] != times[1]
