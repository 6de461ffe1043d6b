"""What is signed with a job's secret, and where the secret is from."""

import os
import stat
import subprocess
import sys
from itertools import product

import pytest

from megaspec.core.errors import RecipeError
from megaspec.launcher.run_secret import (
    FILE_VARIABLE,
    VALUE_VARIABLE,
    RunSecret,
    UntrustedError,
    is_one_machine,
    take_secret,
)

SECRET = RunSecret(b"k" * 32)
PLACE = {"attempt": "1", "sequence": 1}


def test_what_was_signed_for_a_place_is_read_there_alone():
    signed = SECRET.sign("run", "/runs/mine", **PLACE)
    assert SECRET.open("run", signed, **PLACE) == "/runs/mine"
    # a replay: at another attempt, under another key, as another message, by who has another secret
    for other in ({"attempt": "2", "sequence": 1}, {"attempt": "1", "sequence": 2}):
        with pytest.raises(UntrustedError, match="was not written by a rank of this job"):
            SECRET.open("run", signed, **other)
    with pytest.raises(UntrustedError):
        SECRET.open("walk", signed, **PLACE)
    with pytest.raises(UntrustedError):
        RunSecret(b"j" * 32).open("run", signed, **PLACE)


def test_every_changed_byte_is_refused():
    signed = SECRET.sign("run", "/runs/mine", **PLACE)
    tried = 0
    for at, flip in product(range(len(signed)), (1, 32, 128)):
        changed = bytearray(signed)
        changed[at] ^= flip
        with pytest.raises(UntrustedError):
            SECRET.open("run", bytes(changed), **PLACE)
        tried += 1
    assert tried > 200


@pytest.mark.parametrize("data", [b"", b" ", b"/runs/mine", b"0" * 64 + b" /runs/mine", b"\xff" * 100])
def test_what_was_never_signed_is_refused(data):
    with pytest.raises(UntrustedError):
        SECRET.open("run", data, **PLACE)


def test_parts_of_a_message_cannot_be_moved():
    """`ab` + `c` does not sign as `a` + `bc`."""
    signature, _, _ = SECRET.sign("ab", "c", **PLACE).partition(b" ")
    with pytest.raises(UntrustedError):
        SECRET.open("a", signature + b" bc", **PLACE)


def test_nothing_shows_it():
    for text in (repr(SECRET), str(SECRET), f"{SECRET}", repr([SECRET])):
        assert "kkkk" not in text


def test_it_is_taken_out_of_the_environment(tmp_path):
    environ = {VALUE_VARIABLE: "s" * 32, "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    take_secret(environ, world_size=8, job="mine")
    assert environ.keys() == {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}
    path = tmp_path / "secret"
    path.write_text("s" * 32 + "\n")
    path.chmod(0o600)
    # the same secret, however it comes
    environ = {FILE_VARIABLE: str(path), VALUE_VARIABLE: "another one, which counts less"}
    taken = take_secret(environ, world_size=8, job="mine")
    assert not environ
    assert taken.sign("run", "x", **PLACE) == RunSecret(b"s" * 32).sign("run", "x", **PLACE)


def test_a_bad_secret_is_refused_without_being_shown(tmp_path):
    short = "tiny-secret"
    with pytest.raises(RecipeError, match=f"{VALUE_VARIABLE} holds 11 bytes") as refused:
        take_secret({VALUE_VARIABLE: short}, world_size=2, job="mine")
    assert short not in str(refused.value)
    path = tmp_path / "secret"
    with pytest.raises(RecipeError, match="can't be read: No such file"):
        take_secret({FILE_VARIABLE: str(path)}, world_size=2, job="mine")
    path.write_text("s" * 32)
    path.chmod(0o644)
    with pytest.raises(RecipeError, match="can be read by everybody"):
        take_secret({FILE_VARIABLE: str(path)}, world_size=2, job="mine")
    with pytest.raises(RecipeError, match="is no regular file"):
        take_secret({FILE_VARIABLE: "/dev/zero"}, world_size=2, job="mine")


def test_ranks_on_several_machines_need_one():
    with pytest.raises(RecipeError, match=f"neither {VALUE_VARIABLE} nor {FILE_VARIABLE} is set; export"):
        take_secret({"LOCAL_WORLD_SIZE": "4"}, world_size=8, job="mine")
    with pytest.raises(RecipeError, match="ranks on several machines"):
        take_secret({"MASTER_ADDR": "node-0"}, world_size=2, job="mine")


@pytest.mark.parametrize(
    ("environ", "world_size", "expected"),
    [
        ({"LOCAL_WORLD_SIZE": "8"}, 8, True),
        ({"LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}, 8, False),
        ({"MASTER_ADDR": "localhost"}, 2, True),
        ({"MASTER_ADDR": "node-0"}, 2, False),
        ({}, 1, True),
    ],
)
def test_whether_all_ranks_are_here(environ, world_size, expected):
    assert is_one_machine(environ, world_size) == expected


ASK = "from megaspec.launcher.run_secret import take_secret as t; import sys; sys.stdin.read(1); "
ASK += "print(t({}, world_size=1, job='one').token('x'))"


def test_ranks_of_one_machine_agree_on_one_that_nobody_else_reads(tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", ASK]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    asking = [subprocess.Popen(command, env=environment, **pipes) for _ in range(8)]
    told = {process.communicate("x")[0] for process in asking}
    assert len(told) == 1
    assert len(told.pop().strip()) == 32
    (folder,) = tmp_path.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (kept,) = folder.iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    folder.chmod(0o755)
    refused = subprocess.run(command, env=environment, input="x", capture_output=True, text=True)
    assert "must be a folder that only this user can enter" in refused.stderr
