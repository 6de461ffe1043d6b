"""What the kernel counts of processes that it killed for memory: both versions of control groups, and none."""

import pytest

from megaspec.launcher.memory_kills import memory_kills

VERSION_1 = "11:cpu,cpuacct:/x\n4:memory:/jobs/7\n0::/\n"
VERSION_2 = "0::/jobs/7\n"


def group(path, name, count):
    path.mkdir(parents=True, exist_ok=True)
    (path / name).write_text(f"low 0\noom 9\noom_kill {count}\noom_group_kill 0\n")


def asked(tmp_path, text):
    (tmp_path / "self").write_text(text)
    return memory_kills(tmp_path, tmp_path / "self")


def test_version_1(tmp_path):
    group(tmp_path / "memory" / "jobs" / "7", "memory.oom_control", 3)
    group(tmp_path / "memory", "memory.oom_control", 8)
    assert asked(tmp_path, VERSION_1) == 3


def test_version_2(tmp_path):
    group(tmp_path / "jobs" / "7", "memory.events", 2)
    assert asked(tmp_path, VERSION_2) == 2


@pytest.mark.parametrize(
    ("text", "below", "name"), [(VERSION_1, "memory", "memory.oom_control"), (VERSION_2, ".", "memory.events")]
)
def test_a_container_sees_its_own_group_as_the_root(tmp_path, text, below, name):
    group(tmp_path / below, name, 5)
    assert asked(tmp_path, text) == 5


def test_where_memory_is_not_controlled_the_group_above_counts(tmp_path):
    (tmp_path / "jobs" / "7").mkdir(parents=True)
    group(tmp_path / "jobs", "memory.events", 4)
    assert asked(tmp_path, VERSION_2) == 4


@pytest.mark.parametrize("text", ["", VERSION_1, VERSION_2])
def test_no_counter_is_no_number(tmp_path, text):
    assert asked(tmp_path, text) is None
    (tmp_path / "memory.events").write_text("oom 1\n")  # kernels before 4.13 don't count kills
    assert asked(tmp_path, text) is None
