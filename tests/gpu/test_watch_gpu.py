"""On GPUs: a hang is told with NCCL's own word, a slow rank by its phases, and local ranks listen on loopback alone."""

import json
import re
import threading
import time

import psutil
import pytest
import torch

from megaspec.estimate.target import detect_target
from megaspec.log.jsonl import read_metrics
from megaspec.recipe import Recipe
from megaspec_launchers.local import PRELOADED
from megaspec_launchers.rank_factory import RankFactory
from tests.faults.runs import go, make_run, recipe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")]
TIMEOUT = 8.0
N = min(2, torch.cuda.device_count())


@pytest.fixture(scope="module")
def factory():
    with RankFactory((*PRELOADED, "tests.faults.entry")) as made:
        yield made


def gpu_run(folder, *, ranks, steps=24):
    target = detect_target().model_copy(update={"gpus": ranks})
    fields = json.loads(recipe(ranks=ranks, tp=1, steps=steps, save_every=steps).model_dump_json())
    # the compiler takes longer than these tests allow for a hang
    fields["kernels"]["compile"] = "none"
    return make_run(folder, Recipe.model_validate_json(json.dumps(fields)), target=target)


@pytest.mark.parametrize("kind", ["sleep", "halt"])
def test_a_hang_is_told_in_time(tmp_path, factory, capfd, kind):
    run = gpu_run(tmp_path / "run", ranks=N)
    mark = run / "stuck"
    fault = {"rank": N - 1, "kind": kind, "point": "step", "count": 8, "mark": str(mark)}
    assert go(run, factory, fault=fault, timeout_seconds=TIMEOUT) == 74
    report = json.loads((run / "logs/hang-0.json").read_text())
    assert report["time"] - mark.stat().st_mtime <= TIMEOUT + 5
    ranks = report["ranks"]
    assert ranks[-1]["state"] == ("stopped" if kind == "halt" else "running")
    assert all(one["where"] for one in ranks)
    if N == 2:
        assert re.search(r"(waiting for nccl:\w+ number \d+|in|behind) ", ranks[0]["collective"]), ranks[0]
        assert ranks[0]["stacks"]["main"]


def test_own_times_of_phases_are_measured_by_events(tmp_path, factory):
    run = gpu_run(tmp_path / "run", ranks=N, steps=60)
    assert go(run, factory, timeout_seconds=60.0) == 0
    lines = read_metrics(run / "metrics.jsonl")
    assert [line for line in lines if line["event"] == "slow"] == []
    if N == 2:
        (pace,) = [line for line in lines if line["event"] == "pace"]
        assert {"forward", "backward", "optimizer", "device"} <= pace["phases"].keys()
        assert all(one["median"] > 0 for name, one in pace["phases"].items() if name in ("forward", "backward"))
        # 17 GFLOP: between a millisecond and what no GPU of today reaches
        assert 5e-6 < pace["phases"]["device"]["median"] < 1e-3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_ranks_on_gpus_of_one_machine_listen_on_loopback_alone(tmp_path, factory):
    """NCCL takes a network card where nobody names an interface."""
    run = gpu_run(tmp_path / "run", ranks=2, steps=200)
    found: set[str] = set()
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            for process in psutil.Process().children(recursive=True):
                try:
                    for one in process.net_connections("inet"):
                        if one.status == psutil.CONN_LISTEN:
                            found.add(one.laddr.ip)
                except psutil.Error:
                    continue
            time.sleep(0.05)

    looking = threading.Thread(target=look)
    looking.start()
    code = go(run, factory, timeout_seconds=60.0)
    done.set()
    looking.join()
    assert code == 0
    assert found
    assert all(address.startswith("127.") or address == "::1" for address in found), found
