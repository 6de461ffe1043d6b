"""What a machine without GPUs has left, by control groups of both versions, and what ranks need of it."""

import psutil
import pytest

from megaspec.core.units import GIB
from megaspec.estimate.cpu_memory import available_memory, cpu_need
from megaspec.estimate.memory import fullest, memory_of
from tests.plan.plans import LLAMA, plan

VERSION_1 = "11:cpu,cpuacct:/x\n4:memory:/jobs/7\n0::/\n"
VERSION_2 = "0::/jobs/7\n"
NO_LIMIT_1 = str(2**63 - 4096)
MACHINE = 100 * GIB


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    """One with 100 GiB left."""
    memory = psutil.virtual_memory()._replace(available=MACHINE)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def group(path, version, limit, used, files=0, read_again=0):
    """files, read_again: bytes of the use that are files', and of those that were read more than once."""
    path.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current", "inactive_file", "active_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
    (path / names[0]).write_text(f"{limit}\n")
    (path / names[1]).write_text(f"{used}\n")
    (path / "memory.stat").write_text(f"anon 1\n{names[2]} {files}\n{names[3]} {read_again}\n")


def asked(tmp_path, text):
    (tmp_path / "self").write_text(text)
    return available_memory(tmp_path, tmp_path / "self")


@pytest.mark.parametrize(("version", "text", "root"), [(1, VERSION_1, "memory"), (2, VERSION_2, ".")])
def test_the_narrowest_limit_counts(version, text, root, tmp_path):
    root = tmp_path / root
    no_limit = NO_LIMIT_1 if version == 1 else "max"
    group(root / "jobs" / "7", version, no_limit, 5 * GIB)
    assert asked(tmp_path, text) == MACHINE
    # of a group above, what its other processes take left out
    group(root / "jobs", version, 12 * GIB, 5 * GIB)
    assert asked(tmp_path, text) == 7 * GIB
    group(root / "jobs" / "7", version, 6 * GIB, 2 * GIB, files=GIB)
    assert asked(tmp_path, text) == 5 * GIB
    group(root / "jobs" / "7", version, 6 * GIB, 3 * GIB, files=GIB, read_again=GIB)
    assert asked(tmp_path, text) == 5 * GIB
    group(root / "jobs" / "7", version, 6 * GIB, 7 * GIB)
    assert asked(tmp_path, text) == 0


@pytest.mark.parametrize(("version", "text", "root"), [(1, VERSION_1, "memory"), (2, VERSION_2, ".")])
def test_a_container_sees_its_own_group_as_the_root(version, text, root, tmp_path):
    group(tmp_path / root, version, 3 * GIB, GIB)
    assert asked(tmp_path, text) == 2 * GIB


@pytest.mark.parametrize("text", ["", VERSION_1, VERSION_2])
def test_without_a_limit_it_is_the_machine_s(text, tmp_path):
    assert asked(tmp_path, text) == MACHINE
    (tmp_path / "memory.max").write_text("no number\n")
    (tmp_path / "memory.current").write_text("7\n")
    assert asked(tmp_path, text) == MACHINE


def test_all_ranks_of_a_machine_are_counted():
    recipe = plan(LLAMA, {"parallelism.pp": 2, "parallelism.dp_replicate": 2, "train.micro_batch": 1})
    stages = memory_of(recipe, device="cpu")
    assert stages[0].total != stages[1].total
    need = cpu_need(recipe, world=4)
    assert need.of_ranks == 2 * sum(stage.total for stage in stages)
    assert need.total == need.of_ranks + need.of_processes
    # torchrun has two of them here, on whichever stages
    here = cpu_need(recipe, world=4, local=2)
    assert (here.ranks, here.of_ranks) == (2, 2 * fullest(stages).total)
    assert here.of_processes < need.of_processes
