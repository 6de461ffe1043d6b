"""The manifest: both ways, small, and refused whenever a value in it isn't what it must be."""

import hashlib
import json
import os
import time

import pytest

from megaspec.checkpoint.files import read_limited, safe_join
from megaspec.checkpoint.format import (
    Manifest,
    StoredFile,
    StoredPiece,
    StoredTensor,
    decode,
    encode,
    is_tensor_name,
)
from megaspec.core.errors import CheckpointError

MANIFEST = Manifest(
    step=3,
    generation=2,
    token=1,
    chunk_bytes=64,
    files=(StoredFile("rank-00000.safetensors", 100, (1, 0xFFFFFFFF)),),
    tensors={
        "a/b.c-d_1": StoredTensor(
            "F32", (4, 2), (StoredPiece(0, 64, (0, 0), (2, 2)), StoredPiece(0, 80, (2, 0), (2, 2)))
        ),
        "none": StoredTensor("U8", (0,), ()),
    },
    spec={"a": [1, None]},
    state={"loss": 0.1},
)


def seal(body: object) -> bytes:
    """A manifest file with any inner object and the right sum."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b'{"sha256":"' + hashlib.sha256(text).hexdigest().encode() + b'","manifest":' + text + b"}\n"


def inner() -> dict:
    return json.loads(encode(MANIFEST))["manifest"]


def test_manifest_is_json_and_comes_back() -> None:
    data = encode(MANIFEST)
    assert decode(data, "here") == MANIFEST
    assert json.loads(data)["sha256"] == hashlib.sha256(data[88:-2]).hexdigest()
    assert decode(seal(inner()), "here") == MANIFEST


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


PIECE = [0, 64, [0, 0], [2, 2]]


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
        (["files", 0, 2], "0000000g" * 2),
        (["files", 0, 2], ["00000000"]),
        (["files"], [["rank-00000.safetensors", 100, "0" * 16]] * 2),
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
        b'{"version":1,"version":1}',
        b'{"version":NaN}',
        b"1" * 10_000,
        b'{"version":1}',
    ],
)
def test_other_json_is_refused(text: bytes) -> None:
    with pytest.raises(CheckpointError, match="here: "):
        decode(seal(text), "here")


def test_a_newer_version_is_not_taken_for_damage() -> None:
    body = inner()
    body["version"] = 2
    with pytest.raises(CheckpointError, match="version=2, this program reads 1; use the program that wrote it"):
        decode(seal(body), "here")


def test_a_hundred_thousand_pieces_stay_small_and_quick() -> None:
    tensors = {
        f"layers.{i}.attention.weight": StoredTensor(
            "F32",
            (800, 128),
            tuple(StoredPiece(j, 512 * (100 * i + j), (100 * j, 0), (100, 128)) for j in range(8)),
        )
        for i in range(12_500)
    }
    files = tuple(StoredFile(f"rank-{j:05d}.safetensors", 1 << 40, (0,) * (1 << 14)) for j in range(8))
    big = Manifest(1, 1, 1, 64 << 20, files, tensors)
    started = time.process_time()
    data = encode(big)
    assert len(data) < 8e6
    assert decode(data, "here") == big
    assert time.process_time() - started < 6, "measured: 1.3 s, of which 0.25 s is writing"


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
