"""The manifest: both ways, small, and refused whenever a value in it isn't what it must be."""

import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megaspec.checkpoint.codec import decode, encode
from megaspec.checkpoint.files import read_limited, safe_join
from megaspec.checkpoint.format import (
    Manifest,
    StoredFile,
    StoredPiece,
    StoredTensor,
    is_tensor_name,
)
from megaspec.core.errors import CheckpointError

MANIFEST = Manifest(
    step=3,
    generation=2,
    token=1,
    chunk_bytes=64,
    files=(StoredFile("rank-00000.safetensors", 104, np.array([1, 0xFFFFFFFF], dtype=np.uint32)),),
    tensors={
        "a/b.c-d_1": StoredTensor("F32", (4, 2), np.array([[0, 64, 0, 0, 2, 2], [0, 80, 2, 0, 2, 2]])),
        "count": StoredTensor("I64", (), np.array([[0, 96]])),
        "none": StoredTensor("U8", (0,), np.empty((0, 4), dtype=np.int64)),
    },
    spec={"a": [1, None]},
    state={"loss": 0.1},
)


def seal(body: object) -> bytes:
    """A manifest file with any inner object and the right sum."""
    text = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    return b'{"sha256":"' + hashlib.sha256(text).hexdigest().encode() + b'","manifest":' + text + b"}\n"


def inner() -> dict:
    return json.loads(encode(MANIFEST))["manifest"]


def test_manifest_is_json_and_comes_back() -> None:
    data = encode(MANIFEST)
    found = decode(data, "here")
    assert encode(found) == data
    assert (found.step, found.generation, found.token, found.chunk_bytes) == (3, 2, 1, 64)
    assert (found.spec, found.state) == (MANIFEST.spec, MANIFEST.state)
    assert found.files[0].crc32.tolist() == [1, 0xFFFFFFFF]
    matrix, count, none = found.tensors.values()
    assert (matrix.dtype, matrix.shape, matrix.piece(1)) == ("F32", (4, 2), StoredPiece(0, 80, (2, 0), (2, 2)))
    assert (count.shape, count.piece(0)) == ((), StoredPiece(0, 96, (), ()))
    assert (none.shape, len(none.table)) == ((0,), 0)
    assert found.digest == json.loads(data)["sha256"] == hashlib.sha256(data[88:-2]).hexdigest()
    assert encode(decode(seal(inner()), "here")) == data


def test_every_flipped_bit_of_a_manifest_is_seen() -> None:
    data = encode(MANIFEST)
    for i in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[i // 8] ^= 1 << i % 8
        with pytest.raises(CheckpointError, match="here: "):
            decode(bytes(damaged), "here")
    for n in range(len(data)):
        with pytest.raises(CheckpointError, match="here: "):
            decode(data[:n], "here")


def nested(levels: int) -> list:
    """[[[...]]]"""
    found: list = []
    for _ in range(levels):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (["step"], -1),
        (["step"], True),
        (["step"], 1.0),
        (["step"], 1 << 63),
        (["chunk_bytes"], 0),
        (["chunk_bytes"], 65),
        (["chunk_bytes"], 65 << 20),
        (["surprise"], 1),
        (["files"], {}),
        (["files", 0, 0], "../../etc/passwd"),
        (["files", 0, 0], "/etc/passwd"),
        (["files", 0, 0], "rank-00000.safetensors/../../x"),
        (["files", 0, 0], "manifest.json"),
        (["files", 0, 0], 3),
        (["files", 0, 1], 300),
        (["files", 0, 1], 84),
        (["files", 0, 1], 112),
        (["files", 0, 2], "0000000g" * 2),
        (["files", 0, 2], ["00000000"]),
        (["files"], [["rank-00000.safetensors", 104, "0" * 16]] * 2),
        (["files"], []),
        (["tensors"], []),
        (["tensors", "../x"], ["F32", [1], []]),
        (["tensors", "a//b"], ["F32", [1], []]),
        (["tensors", "/a"], ["F32", [1], []]),
        (["tensors", ""], ["F32", [1], []]),
        (["tensors", "a b"], ["F32", [1], []]),
        (["tensors", "x" * 513], ["F32", [1], []]),
        (["tensors", "a/b.c-d_1", 0], "pickle"),
        (["tensors", "a/b.c-d_1", 1], [4, "2"]),
        (["tensors", "a/b.c-d_1", 1], [1] * 17),
        (["tensors", "a/b.c-d_1", 1], [3, 2]),
        (["tensors", "a/b.c-d_1", 2, 0], [1, 64, [0, 0], [2, 2]]),
        (["tensors", "a/b.c-d_1", 2, 0], [-1, 64, [0, 0], [2, 2]]),
        (["tensors", "a/b.c-d_1", 2, 0], [0, 96, [0, 0], [2, 2]]),
        (["tensors", "a/b.c-d_1", 2, 0], [0, 65, [0, 0], [2, 2]]),
        (["tensors", "a/b.c-d_1", 2, 0], [0, -4, [0, 0], [2, 2]]),
        (["tensors", "a/b.c-d_1", 2, 0], [0, 64, [0, 0], [0, 2]]),
        (["tensors", "a/b.c-d_1", 2, 0], [0, 64, [0], [2]]),
        (["tensors", "a/b.c-d_1", 2, 0], [0, 64, [0, 0], [3, 2]]),
        (["tensors", "a/b.c-d_1", 2, 0], [0, 64, [1, 0], [2, 2]]),
        (["tensors", "a/b.c-d_1", 2, 0], [0, 64, [0, 0], [2, 1]]),
        (["tensors", "a/b.c-d_1", 2, 0], [0, 64, [0, 0], [2, True]]),
        (["tensors", "a/b.c-d_1", 2, 0], [0, 64, [0, 0], [2, 2.0]]),
        (["tensors", "a/b.c-d_1", 2, 0], [0, 64, [0, 0], [2, 1 << 60]]),
        (["tensors", "a/b.c-d_1", 2, 0], [0, 80, [0, 0], [2, 2]]),
        (["tensors", "a/b.c-d_1", 2], [[0, 64, [0, 0], [4, 2]], [0, 96, [0, 0], [1, 1]]]),
        (["tensors", "a/b.c-d_1", 2], [[0, 64, [0, 0], [2, 2]]]),
        (["tensors", "a/b.c-d_1", 2], []),
        (["tensors", "a/b.c-d_1", 1], [10**12, 10**12]),
        (["tensors", "count", 2], [[0, 96, [], []], [0, 96, [], []]]),
        (["tensors", "count", 2, 0, 1], 64),
        (["generation"], 10**13),
        (["spec", "deep"], nested(70)),
        (["state", "many"], "x" * (2 << 20)),
        (["tensors", "a/b.c-d_1", 2], "pieces"),
        (["spec"], []),
        (["state"], None),
    ],
)
def test_a_well_sealed_manifest_with_a_wrong_value_is_refused(where: list, value: object) -> None:
    body = inner()
    place = body
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    with pytest.raises(CheckpointError, match="here: "):
        decode(seal(body), "here")


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b"3",
        b"{}",
        b"",
        b"{",
        b"\xff",
        b"[" * 200_000,
        b'{"version":2,"version":2}',
        b'{"version":NaN}',
        b"1" * 10_000,
        b'{"version":2}',
    ],
)
def test_other_json_is_refused(text: bytes) -> None:
    with pytest.raises(CheckpointError, match="here: "):
        decode(seal(text), "here")


@pytest.mark.parametrize("version", [1, 3])
def test_another_version_is_not_taken_for_damage(version: int) -> None:
    body = inner()
    body["version"] = version
    with pytest.raises(
        CheckpointError, match=f"version={version}, this program reads 2; use the program that wrote it"
    ):
        decode(seal(body), "here")


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text.replace(b",", b", ", 1),
        lambda text: text.replace(b'"step":3', b'"step":03'),
        lambda text: text.replace(b'"step":3', b'"step":3e0'),
        lambda text: text.replace(b"[2,2]", b"[2,+2]", 1),
        lambda text: text.replace(b"[2,2]", b"[2,02]", 1),
        lambda text: text.replace(b'"state":{', b'"state":{},"state":{'),
        lambda text: text.replace(b'"spec":{', b'"spec":{"a":1,'),
        lambda text: text.replace(b'"none"', b'"count"'),
        lambda text: text[:-1],
        lambda text: text + b"}",
        lambda text: text[:-1] + b',"more":1}',
    ],
)
def test_another_form_of_the_same_is_refused(edit) -> None:
    text = json.dumps(inner(), separators=(",", ":")).encode()
    assert edit(text) != text
    decode(seal(text), "here")
    with pytest.raises(CheckpointError, match="here: "):
        decode(seal(edit(text)), "here")


def test_what_decode_refuses_is_not_written() -> None:
    for change, said in (
        ({"generation": 10**12 + 1}, "generation"),
        ({"state": {"many": "x" * (2 << 20)}}, "bytes of Spec and state"),
    ):
        with pytest.raises(CheckpointError, match=said):
            encode(replace(MANIFEST, **change))


def rows_of_ranks(n_ranks: int, n_tensors: int, *, chunks: int) -> Manifest:
    """Matrices whose rows are shared out to all ranks: the form of a large run."""
    rank = np.arange(n_ranks)
    tensors = {}
    for i in range(n_tensors):
        zeros, ones = np.zeros_like(rank), np.ones_like(rank)
        columns = [rank, 8 + 51_200 * i + zeros, 100 * rank, zeros, 100 * ones, 128 * ones]
        tensors[f"optim/exp_avg/layers.{i}.attn.wqkv.weight"] = StoredTensor(
            "F32", (100 * n_ranks, 128), np.stack(columns, axis=1)
        )
    size = 8 + 51_200 * n_tensors
    crcs = np.arange(chunks, dtype=np.uint32)
    files = tuple(StoredFile(f"rank-{j:05d}.safetensors", size, crcs) for j in rank.tolist())
    return Manifest(1, 1, 1, 8 * -(-size // (8 * chunks)), files, tensors)


def test_a_hundred_thousand_pieces_stay_small_and_quick() -> None:
    big = rows_of_ranks(8, 12_500, chunks=1 << 14)
    started = time.process_time()
    data = encode(big)
    assert len(data) < 8.3e6
    found = decode(data, "here")
    assert time.process_time() - started < 6, "measured: 0.6 s, of which 0.1 s is writing"
    assert encode(found) == data


def staircase(n_steps: int) -> tuple[list, list]:
    """Files, and a square tensor of which step i holds row i from the diagonal on and column i below it."""
    size = 8 + 4 * n_steps * n_steps
    pieces, at = [], 8
    for i in range(n_steps):
        for start, shape in (([i, i], [1, n_steps - i]), ([i + 1, i], [n_steps - i - 1, 1])):
            if min(shape):
                pieces.append([0, at, start, shape])
                at += 4 * shape[0] * shape[1]
    return [["rank-00000.safetensors", size, "0" * 8 * -(-size // 8192)]], ["F32", [n_steps, n_steps], pieces]


def test_a_staircase_is_no_bomb() -> None:
    """4,000 steps took 28 s when each piece was compared with each other."""
    body = inner()
    body["chunk_bytes"] = 8192
    files, tensor = staircase(4000)
    body["files"], body["tensors"] = files, {"stairs": tensor}
    started = time.process_time()
    assert len(decode(seal(body), "here").tensors["stairs"].table) == 7999
    tensor[2][-1] = [*tensor[2][-1][:2], [0, 0], [1, 1]]
    with pytest.raises(CheckpointError, match="stairs: its pieces must hold each of its elements once"):
        decode(seal(body), "here")
    assert time.process_time() - started < 4, "measured: 0.05 s"


def peak_of(path: Path) -> int:
    """Bytes that a process takes at most to read a manifest, beyond what it has before."""
    code = (
        "import re, sys\n"
        "from pathlib import Path\n"
        "from megaspec.checkpoint.codec import decode\n"
        "from megaspec.core.errors import CheckpointError\n"
        # Not ru_maxrss, which a process inherits.
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+) kB', Path('/proc/self/status').read_text())[1])\n"
        "before = peak()\n"
        "try:\n"
        "    decode(Path(sys.argv[1]).read_bytes(), 'here')\n"
        "except CheckpointError as error:\n"
        "    print(str(error)[:200], file=sys.stderr)\n"
        "print(peak() - before)"
    )
    run = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True, timeout=60)
    return 1024 * int(run.stdout)


BOMBS = {
    "pieces": lambda: encode(rows_of_ranks(1000, 350, chunks=1)),
    "checksums": lambda: encode(rows_of_ranks(8, 1, chunks=250_000)),
    "tensors": lambda: seal(inner() | {"tensors": {f"{i}": ["U8", [0], []] for i in range(130_000)}}),
    "too many tensors": lambda: seal(inner() | {"tensors": {f"{i}": ["U8", [0], []] for i in range(700_000)}}),
    "files": lambda: seal(inner() | {"files": [[f"rank-{i:08d}.safetensors", 0, ""] for i in range(400_000)]}),
    "numbers of a shape": lambda: seal(inner() | {"tensors": {"a": ["U8", [0] * 7_000_000, []]}}),
    "lists in the state": lambda: seal(inner() | {"state": {"a": [[]] * 5_000_000}}),
    "solids": lambda: seal(inner() | {"tensors": {"a": ["U8", [9] * 5, [[0, 8, [0] * 5, [1] * 5]] * 500_000]}}),
}


# where few tensors too many are refused, more of them are
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "too many tensors")) for name in BOMBS]
)
def test_a_manifest_takes_memory_in_proportion_to_itself(tmp_path, name) -> None:
    """15 MB of pieces took 313 MB."""
    path = tmp_path / "manifest.json"
    size = path.write_bytes(BOMBS[name]())
    assert size > 2e6
    assert peak_of(path) < 6 * size + 96e6


def test_names() -> None:
    assert all(map(is_tensor_name, ["a", "a/b", "a..b/c", "A-Z_0.9", "x" * 512]))
    assert not any(map(is_tensor_name, ["", "/", "a/", "..", "a/../b", "./a", "a b", "ä", "a\n", "a\\b", "x" * 513]))


def test_plain_file_names_only(tmp_path) -> None:
    assert safe_join(tmp_path, "a-1.b") == tmp_path / "a-1.b"
    for name in ("..", ".", "", "a/b", "/a", "a\0", "a\n", "x" * 256):
        with pytest.raises(CheckpointError, match="must be plain"):
            safe_join(tmp_path, name)


def test_a_large_file_in_place_of_a_small_one_is_not_read(tmp_path) -> None:
    with open(tmp_path / "manifest.json", "wb") as file:
        file.truncate(1 << 40)
    fd = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(CheckpointError, match=r"manifest.json: expected at most 100 bytes, found 1099511627776"):
        read_limited(tmp_path, fd, "manifest.json", limit=100)
    os.close(fd)
