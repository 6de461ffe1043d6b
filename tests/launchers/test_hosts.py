"""Hosts that are network namespaces: own addresses, a cable between them that can be cut. Needs root, and `ip`."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaspec.cli import main
from megaspec.launcher.exit_file import read_exit
from megaspec.launcher.suspects import failures_of_host
from megaspec_launchers import slurm
from megaspec_launchers.recipe_file import NAME, recipe_of_job
from tests.launchers.jobs import ROOT, slurm_environment, spec_of, write_program, write_slurm
from tests.launchers.test_slurm import TINY

HOSTS = ("megaspec-a", "megaspec-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
TIMEOUT = 6
# Beyond a collective's own: the watchdog's grace, the end of ranks, the other node's word.
MARGIN = 30


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def can_make_hosts() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", "megaspec-try"], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", "megaspec-try"], capture_output=True)
    return made


pytestmark = [pytest.mark.slow, pytest.mark.skipif(not can_make_hosts(), reason="needs root and network namespaces")]


@pytest.fixture
def hosts() -> Iterator[tuple[str, ...]]:
    """Two hosts with a cable between them."""
    remove_hosts()
    for host in HOSTS:
        ip("netns", "add", host)
    ip("link", "add", "eth0", "netns", HOSTS[0], "type", "veth", "peer", "name", "eth0", "netns", HOSTS[1])
    for host, address in zip(HOSTS, ADDRESSES, strict=True):
        ip("-n", host, "address", "add", f"{address}/24", "dev", "eth0")
        ip("-n", host, "link", "set", "eth0", "up")
        ip("-n", host, "link", "set", "lo", "up")
    yield HOSTS
    remove_hosts()


def remove_hosts() -> None:
    for host in HOSTS:
        done = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True)
        for pid in done.stdout.split():
            os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", host], capture_output=True)


def pids_on(host: str) -> list[int]:
    return [int(pid) for pid in ip("netns", "pids", host).split()]


def lose(host: str) -> None:
    """As when power fails: nothing on it says good-bye."""
    ip("-n", host, "link", "set", "eth0", "down")
    for pid in pids_on(host):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": f"text {n} and more"}) for n in range(3000)))
    words = ["data", "prepare", "text.jsonl", "--out", "data/hello", "--tokenizer", "byte", "--workers", "1"]
    assert main(words) == 0
    return tmp_path


def job_spec(steps: int):
    words = ["launcher=slurm", "launcher.nodes=2", "launcher.hardware=cpu", "launcher.ranks_per_node=1", *TINY]
    words += ["launcher.env={GLOO_SOCKET_IFNAME: eth0}", f"launcher.timeout_seconds={TIMEOUT}"]
    return spec_of(*words, f"train.steps={steps}", "checkpoint.every=20")


def wait_for(text: str, file: Path, process: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + 150
    while text not in file.read_text() and process.poll() is None:
        assert time.monotonic() < give_up, file.read_text()
        time.sleep(0.1)
    assert process.poll() is None, file.read_text()


def srun_of_hosts(programs: Path) -> None:
    """A task on each host."""
    text = (programs / "srun").read_text()
    before = "subprocess.Popen(words, env=environment)"
    assert before in text
    prefix = f'["ip", "netns", "exec", {HOSTS!r}[node], *words]'
    write_program(programs / "srun", text.replace(before, f"subprocess.Popen({prefix}, env=environment)"))


@pytest.mark.parametrize("lost", [0, 1])
def test_a_job_loses_a_host_and_goes_on_when_it_is_back(hosts, here, lost, tell):
    programs = write_slurm(here / "bin", ADDRESSES)
    srun_of_hosts(programs)
    script = slurm.render(job_spec(200))
    environment = slurm_environment(programs)
    output = here / "slurm.out"
    with open(output, "w") as out:
        job = subprocess.Popen(["bash", "-c", script], cwd=here, env=environment, stdout=out, stderr=out)
        wait_for("saved runs/hello/checkpoints/step-00000020", output, job)
        began = time.monotonic()
        lose(hosts[lost])
        code = job.wait(TIMEOUT + MARGIN)
    tell(f"host {lost} of 2 lost: the job ended with {code} after {time.monotonic() - began:.1f} s")
    assert code == 74, output.read_text()
    assert (programs / "requeued").read_text().split() == ["4711"]
    for host in hosts:
        assert pids_on(host) == []
    run = here / "runs" / "hello"
    # a rank of the host that is left wrote it
    assert read_exit(run).code == 74
    assert f"host {ADDRESSES[lost]} was lost" in output.read_text()
    ip("-n", hosts[lost], "link", "set", "eth0", "up")
    done = subprocess.run(
        ["bash", "-c", script], cwd=here, env=environment | {"SLURM_RESTART_COUNT": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_exit(run).code == 0
    assert list(failures_of_host(run, ADDRESSES[lost])) == ["4711-0"]
    assert failures_of_host(run, ADDRESSES[1 - lost]) == {}
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    assert steps[-1] == 200


def test_torchrun_on_two_hosts_loses_one(hosts, here, tell):
    """torchrun itself tells 1 of everything; the run's folder says what it was."""
    spec = job_spec(100_000)
    (here / "recipes").mkdir()
    (here / "recipes" / f"{NAME}.yaml").write_text(recipe_of_job(spec))
    sources = os.pathsep.join(str(ROOT / source) for source in ("", "kernels", "launchers"))
    environment = os.environ | {"PYTHONPATH": sources, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "MEGASPEC_RUN_SECRET": "of the ranks of these two hosts alone"}
    agents = []
    output = here / "torchrun.out"
    with open(output, "w") as out:
        for number, host in enumerate(hosts):
            words = [sys.executable, "-P", "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
            words += [f"--node-rank={number}", f"--master-addr={ADDRESSES[0]}", "--master-port=29500"]
            words += ["-m", "megaspec.cli", "train", f"recipe={NAME}", "resume=auto"]
            command = ["ip", "netns", "exec", host, *words]
            agents.append(subprocess.Popen(command, cwd=here, env=environment, stdout=out, stderr=out))
        wait_for("step 10/", output, agents[0])
        began = time.monotonic()
        lose(hosts[1])
        code = agents[0].wait(TIMEOUT + MARGIN + 30)
    tell(f"torchrun lost host 1 of 2: it ended with {code} after {time.monotonic() - began:.1f} s")
    assert code == 1
    assert read_exit(here / "runs" / "hello").code == 74
    agents[1].wait(10)
    for host in hosts:
        assert pids_on(host) == []
