"""Nothing of a local run listens where another machine reaches it, also where the host's name is its network card's."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megaspec.core.errors import RecipeError
from megaspec.launcher.loopback import bind_to_loopback, listen_at, loopback_name
from tests.faults.runs import make_run, recipe

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "launchers"))
START = """
import sys
import megaspec_launchers.rank_factory as factories
from megaspec_launchers.local import launch
run_dir, entry, how = sys.argv[1:]
if how == "left to itself":
    factories.loopback_variables = dict
with factories.RankFactory(("torch", entry.partition(":")[0])) as factory:
    sys.exit(launch(run_dir, ranks=2, entry=entry, factory=factory))
"""


def card_address() -> str:
    """An IPv4 address of this machine that others reach."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return address.address
    pytest.skip("this machine has no network card")


def listening(launcher: psutil.Process) -> set[str]:
    """Addresses at which the launcher and what it started listen, for TCP and UDP."""
    found = set()
    for process in (launcher, *launcher.children(recursive=True)):
        try:
            for one in process.net_connections("inet"):
                if one.status in (psutil.CONN_LISTEN, psutil.CONN_NONE) and one.laddr:
                    found.add(one.laddr.ip)
        except psutil.Error:
            continue
    return found


def addresses_of_a_run(run: Path, entry: str, how: str) -> set[str]:
    """Where a run of two gloo ranks listens, on a host whose name is the address of its network card."""
    # a name of its own for this process alone, in a namespace: an address as a name resolves to itself
    named = f'hostname {card_address()} && exec "$@"'
    command = ["unshare", "--uts", "sh", "-c", named, "sh", sys.executable, "-P", "-c", START, str(run), entry, how]
    if shutil.which("unshare") is None or subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode:
        pytest.skip("this user may not make a namespace")
    environment = os.environ | {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    found = set()
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as launcher:
        process = psutil.Process(launcher.pid)
        while launcher.poll() is None:
            have_met = len(list(run.glob("met-*"))) == 2
            found |= listening(process)
            if have_met:
                (run / "seen").touch()
            time.sleep(0.02)
        said = launcher.stderr.read().decode()
    assert launcher.returncode == 0, said
    return found


MEET = "tests.launchers.gloo_toy:meets"


def assert_loopback_alone(found: set[str]) -> None:
    assert found, "ranks that meet over gloo listen somewhere"
    assert all(address.startswith("127.") or address == "::1" for address in found), found


def test_local_ranks_listen_on_loopback_alone(tmp_path):
    assert_loopback_alone(addresses_of_a_run(tmp_path, MEET, "bound"))


@pytest.mark.slow
def test_a_whole_run_listens_on_loopback_alone(tmp_path):
    run = make_run(tmp_path / "run", recipe(steps=60))
    assert_loopback_alone(addresses_of_a_run(run, "megaspec.runtime.rank:main", "bound"))


@pytest.mark.slow
def test_ranks_that_are_left_to_themselves_listen_at_the_network_card(tmp_path):
    """Which shows that the tests above could fail: gloo takes what the host's name resolves to."""
    assert card_address() in addresses_of_a_run(tmp_path, MEET, "left to itself")


def test_ranks_of_torchrun_on_one_machine_are_bound_too():
    environ = {"LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "eth0"}
    bind_to_loopback(environ, world_size=2)
    assert environ["GLOO_SOCKET_IFNAME"] == loopback_name()
    assert environ["NCCL_SOCKET_IFNAME"] == f"={loopback_name()}"
    # several machines: the environment says which interface is meant
    environ = {"LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "eth0"}
    bind_to_loopback(environ, world_size=4)
    assert environ == {"LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "eth0"}


def test_a_store_listens_where_it_is_meant_to(capfd):
    """torch's own listens at every interface."""
    import torch.distributed as dist

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fd = listen_at("127.0.0.1", port)
    store = dist.TCPStore("127.0.0.1", port, 1, is_master=True, master_listen_fd=fd)
    store.set("a", "b")
    here = {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.laddr and c.laddr.port == port}
    assert here == {"127.0.0.1"}
    with pytest.raises(RecipeError, match=f"MASTER_PORT={port} is taken at 127.0.0.1"):
        listen_at("127.0.0.1", port)
    # an address that is none of this machine's: documentation's own
    assert listen_at("203.0.113.7", port) is None
    assert "MASTER_ADDR=203.0.113.7 is no address of this machine" in capfd.readouterr().err
    with pytest.raises(RecipeError, match="has no address"):
        listen_at("no-such-host.invalid", port)
