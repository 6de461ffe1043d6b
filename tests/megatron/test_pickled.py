"""Pickles read as data: what torch and pickle write, what is refused, and what is thrown at it."""

import argparse
import io
import os
import pickle
import random
import struct
import time
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from megaspec.core.errors import CheckpointError
from megaspec.megatron import pickled
from megaspec.megatron.opened import args_of, entries_of
from megaspec.megatron.pickled import Global, Made, read_pickle
from megaspec.megatron.rank_files import RankFiles
from megaspec.megatron.stored_tensors import stored_tensor
from megaspec.megatron.torch_zip import read_torch_file
from tests.megatron.test_checkpoint import unpacked

PLAIN = {
    "numbers": [0, 1, -1, 255, 256, 65_535, 65_536, -(2**31), 2**31, 2**70, -(2**70), 1.5, float("inf")],
    "texts": ["", "a", "ä" * 300, "x" * 70_000],
    "others": [None, True, False, b"", b"b" * 300, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], {}],
    "shared": ["again"] * 3,
    7: {"in": {"each": {"other": []}}},
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_are_those_that_were_written(protocol):
    content = pickle.dumps(PLAIN, protocol)
    found = read_pickle(content, "here")
    if protocol == 2:
        # which has no bytes of its own
        assert str(found["others"][4].function) == "_codecs.encode"
        found["others"][3:5] = [b"", b"b" * 300]
    assert found == PLAIN


def test_objects_are_records_and_nothing_is_called():
    args = argparse.Namespace(layers=2, dtype=torch.bfloat16, kind=torch.Size([1, 2]))
    found = read_pickle(pickle.dumps({"args": args, "ordered": OrderedDict(a=1, b=2)}, 4), "here")
    assert args_of(found["args"])["layers"] == 2
    assert args_of(found["args"])["dtype"] == Global("torch", "bfloat16")
    assert isinstance(args_of(found["args"])["kind"], Made)
    assert entries_of(found["ordered"]) == {"a": 1, "b": 2}


class Calls:
    """Runs a command when pickle reads it."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("function", [os.system, eval, exec, __import__, print, torch.load, os.remove])
def test_names_that_are_not_on_the_list_are_refused_by_name(protocol, function, tmp_path, capfd):
    mark = tmp_path / "called"
    content = pickle.dumps({"model": Calls(function, f"touch {mark}")}, protocol)
    with pytest.raises(CheckpointError) as error:
        read_pickle(content, "here")
    assert function.__name__ in str(error.value)
    assert "which no checkpoint of Megatron's needs" in str(error.value)
    assert not mark.exists()
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "cut off"),
        (b"\x80", "cut off"),
        (b"\x80\x01.", "protocol 1"),
        (b"\x80\x09.", "protocol 9"),
        (b"I1\n.", "doesn't begin"),
        (b"\x80\x02.", "a value is missing"),
        (b"\x80\x02NN.", "more behind its end"),
        (b"\x80\x02N.N", "more behind its end"),
        (b"\x80\x02i__main__\nA\n.", "opcode b'i'"),
        (b"\x80\x02I1\n.", "opcode b'I'"),
        (b"\x80\x02\x82\x01.", "opcode"),
        (b"\x80\x02h\x07.", "entry 7 of its memo"),
        (b"\x80\x02]NNs.", "keys and values for a list"),
        (b"\x80\x02}]Ns.", "a list in a key"),
        (b"\x80\x02}Na.", "entries for a dict"),
        (b"\x80\x02NNR.", "a call without arguments"),
        (b"\x80\x02N)R.", "a call of a NoneType"),
        (b"\x80\x02]Nb.", "a state for a list"),
        (b"\x80\x02e.", "a container without a beginning"),
        (b"\x80\x02(].", "more behind its end"),
        (b"\x80\x04NN\x93.", "a name that is no text"),
        (b"\x80\x02X\xff\xff\xff\x7fa.", "cut off"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\xff.", "cut off"),
        (b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.", "cut off"),
        (b"\x80\x02\x8b\xff\xff\x00\x00" + b"\x01" * 65_535 + b".", "a number of 65,535 bytes"),
        (b"\x80\x02\x8b\xff\xff\xff\xff.", "a number of -1 bytes"),
        (b"\x80\x02X\x01\x00\x00\x00\xff.", "no UTF-8"),
        (b"\x80\x02" + b"(" * 2000 + b".", "containers in each other"),
        (b"\x80\x02" + b"N" * 1_000_001 + b".", "values side by side"),
        (b"\x80\x02c" + b"a" * 1000 + b"\n.", "a name without an end"),
    ],
)
def test_what_is_no_pickle_of_a_checkpoint_is_told(content, told):
    with pytest.raises(CheckpointError) as error:
        read_pickle(content, "here")
    assert told in str(error.value)
    assert "(at byte " in str(error.value)


def test_limits(monkeypatch):
    monkeypatch.setattr(pickled, "MOST_OPCODES", 1000)
    with pytest.raises(CheckpointError, match="more than 1,000 opcodes"):
        read_pickle(b"\x80\x02" + b"N0" * 1000 + b"N.", "here")
    monkeypatch.setattr(pickled, "MOST_BYTES", 1000)
    with pytest.raises(CheckpointError, match="at most 1,000"):
        read_pickle(bytes(1001), "here")


def test_a_thousand_laughs_take_no_memory():
    """Ten times ten times ten ... of one list: as many entries as opcodes, whatever it would be when copied."""
    content = b"\x80\x02]q\x000"
    for number in range(60):
        # a new list, which holds the last one ten times
        last = b"h" + bytes([number])
        content += b"](" + last * 10 + b"eq" + bytes([number + 1]) + b"0"
    begin = time.monotonic()
    found = read_pickle(content + b"h\x3c.", "here")
    assert [len(found), len(found[0]), found[0] is found[9]] == [10, 10, True]
    assert time.monotonic() - begin < 5


def mutants(content: bytes, drawn: random.Random, count: int) -> list[bytes]:
    """Cut, with bytes changed, inserted, left out, or a part repeated."""
    made = []
    for _ in range(count):
        mutant = bytearray(content)
        for _ in range(drawn.choice([1, 1, 2, 5])):
            at = drawn.randrange(len(mutant))
            match drawn.randrange(5):
                case 0:
                    del mutant[at:]
                case 1:
                    mutant[at] = drawn.randrange(256)
                case 2:
                    mutant[at:at] = drawn.randbytes(drawn.randrange(1, 9))
                case 3:
                    del mutant[at : at + drawn.randrange(1, 9)]
                case 4:
                    mutant[at:at] = mutant[at : at + drawn.randrange(1, 99)]
            if not mutant:
                break
        made.append(bytes(mutant))
    return made


def test_fuzzed_pickles_end_with_a_value_or_our_error(tmp_path):
    checkpoint = unpacked("dist_dense", tmp_path)
    metadata = (checkpoint / "iter_0000010" / ".metadata").read_bytes()
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(2, 3), "args": argparse.Namespace(b=1), "o": OrderedDict(c=2)}, buffer)
    with zipfile.ZipFile(buffer) as archive:
        [name] = [one for one in archive.namelist() if one.endswith("data.pkl")]
        saved = archive.read(name)
    drawn = random.Random(7)
    begin = time.monotonic()
    refused = 0
    for content in [*mutants(metadata[:4000], drawn, 1500), *mutants(saved, drawn, 3000)]:
        try:
            read_pickle(content, "here")
        except CheckpointError:
            refused += 1
    assert refused > 2000
    assert time.monotonic() - begin < 60


def test_fuzzed_files_end_with_tensors_or_our_error(tmp_path):
    torch.save({"a": torch.arange(6.0).view(2, 3), "b": torch.nn.Parameter(torch.ones(3))}, tmp_path / "whole.pt")
    content = (tmp_path / "whole.pt").read_bytes()
    drawn = random.Random(8)
    refused = 0
    for number, mutant in enumerate(mutants(content, drawn, 1500)):
        path = tmp_path / f"{number}.pt"
        path.write_bytes(mutant)
        with RankFiles(tmp_path) as files:
            try:
                found = read_torch_file(files, path.name)
                for name, value in (entries_of(found.value) or {}).items():
                    stored = stored_tensor(found, value, str(type(name)))
                    assert stored.offset + 4 <= len(mutant)
            except CheckpointError:
                refused += 1
        path.unlink()
    assert refused > 700


def zipped(path: Path, content: bytes, change) -> None:
    """A zip file of one entry whose bytes are changed."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content)
    raw = bytearray(path.read_bytes())
    change(raw)
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda raw: raw.__setitem__(slice(-6, -2), struct.pack("<L", 0)), "its directory is damaged"),
        (lambda raw: raw.__setitem__(slice(-14, -10), b"\xff\x7f\xff\x7f"), "entries"),
        (lambda raw: raw.__setitem__(slice(30, 37), b"../../e"), "the directory and the entry differ"),
        (lambda raw: raw.extend(b"more"), "its end is missing"),
        (lambda raw: raw.__setitem__(0, 0), "torch before 1.6"),
    ],
)
def test_zip_files_that_are_none_of_torchs(change, told, tmp_path):
    zipped(tmp_path / "x.pt", pickle.dumps({}, 2), change)
    with RankFiles(tmp_path) as files, pytest.raises(CheckpointError) as error:
        read_torch_file(files, "x.pt")
    assert told in str(error.value)


def test_a_tensor_never_reaches_behind_its_storage(tmp_path):
    """torch.as_strided's numbers, made up: as many numbers as are there at most, each row behind the last."""
    torch.save(torch.ones(4), tmp_path / "x.pt")
    with RankFiles(tmp_path) as files:
        found = read_torch_file(files, "x.pt")
    storage = found.value.arguments[0]
    rebuild = found.value.function
    for offset, shape, strides in ((1, (4,), (1,)), (0, (3, 2), (2, 1)), (0, (2,), (4,)), (-1, (1,), (1,))):
        with pytest.raises(CheckpointError):
            stored_tensor(found, Made(rebuild, (storage, offset, shape, strides)), "x")
    assert stored_tensor(found, Made(rebuild, (storage, 0, (2, 2), (2, 1))), "x").shape == (2, 2)
