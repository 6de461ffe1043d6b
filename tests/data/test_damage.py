"""Random damage of token files: with a manifest none is silent."""

import random
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megaspec.core.errors import DataError
from megaspec.data.indexed import HEADER, IndexedFile
from megaspec.data.inspect import UNSEEN_WITHOUT_MANIFEST, inspect
from megaspec.data.manifest import load_manifest
from tests.data.helpers import write_dataset

LENGTHS = [7, 19, 3, 33, 12, 5, 28, 40, 9, 16, 21, 2]
S, D = len(LENGTHS), len(LENGTHS) + 1
FIELDS = ("magic", "version", "dtype", "count", "length", "offset", "bound", "size", "crc32", "tokens")
AT = {
    "magic": (0, 9),
    "version": (9, 17),
    "dtype": (17, 18),
    "sequence count": (18, 26),
    "document count": (26, 34),
    "lengths": (34, 34 + 4 * S),
    "offsets": (34 + 4 * S, 34 + 12 * S),
    "bounds": (34 + 12 * S, 34 + 12 * S + 8 * D),
}


def flip(region):
    def damage(idx: bytearray, data: bytearray, rng: random.Random) -> None:
        begin, end = AT[region]
        idx[rng.randrange(begin, end)] ^= 1 << rng.randrange(8)

    return damage


def random_number(region, form):
    def damage(idx: bytearray, data: bytearray, rng: random.Random) -> None:
        begin, end = AT[region]
        at = begin + rng.randrange((end - begin) // struct.calcsize(form)) * struct.calcsize(form)
        struct.pack_into(form, idx, at, rng.choice([0, 1, S, D, 2**31 - 1, rng.randrange(2**31)]))

    return damage


def truncate(idx: bytearray, data: bytearray, rng: random.Random) -> None:
    victim = rng.choice([idx, data])
    del victim[rng.randrange(len(victim)) :]


def extend(idx: bytearray, data: bytearray, rng: random.Random) -> None:
    rng.choice([idx, data]).extend(rng.randbytes(rng.randrange(1, 64)))


def known_dtype(idx: bytearray, data: bytearray, rng: random.Random) -> None:
    idx[17] = rng.choice([1, 2, 3, 4, 5, 6, 7])


def move_bound(idx: bytearray, data: bytearray, rng: random.Random) -> None:
    """A document bound that still rises: nothing in the files contradicts it."""
    at = AT["bounds"][0] + 8 * rng.randrange(1, D - 1)
    (bound,) = struct.unpack_from("<q", idx, at)
    struct.pack_into("<q", idx, at, bound - 1)


def move_length(idx: bytearray, data: bytearray, rng: random.Random) -> None:
    """A length and the offset behind it, moved together: nothing in the files contradicts them."""
    k = rng.randrange(S - 1)
    a, b = struct.unpack_from("<ii", idx, AT["lengths"][0] + 4 * k)
    struct.pack_into("<ii", idx, AT["lengths"][0] + 4 * k, a + 1, b - 1)
    (offset,) = struct.unpack_from("<q", idx, AT["offsets"][0] + 8 * (k + 1))
    struct.pack_into("<q", idx, AT["offsets"][0] + 8 * (k + 1), offset + 2)


def flip_token(idx: bytearray, data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


KINDS = {
    **{f"flip {region}": flip(region) for region in AT},
    "number in sequence count": random_number("sequence count", "<Q"),
    "number in document count": random_number("document count", "<Q"),
    "number in lengths": random_number("lengths", "<i"),
    "number in offsets": random_number("offsets", "<q"),
    "number in bounds": random_number("bounds", "<q"),
    "truncate": truncate,
    "extend": extend,
    "known dtype": known_dtype,
    "move bound": move_bound,
    "move length": move_length,
    "flip token": flip_token,
}


def read_whole(prefix: Path) -> None:
    file = IndexedFile(prefix)
    for sequence in range(len(file)):
        file.read(sequence)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("whole") / "d"
    write_dataset(prefix, LENGTHS)
    return prefix


def damaged(whole: Path, prefix: Path, kind: str, rng: random.Random) -> None:
    before = Path(f"{whole}.idx").read_bytes(), Path(f"{whole}.bin").read_bytes()
    while True:
        idx, data = map(bytearray, before)
        KINDS[kind](idx, data, rng)
        if (bytes(idx), bytes(data)) != before:
            break
    Path(f"{prefix}.idx").write_bytes(idx)
    Path(f"{prefix}.bin").write_bytes(data)


def test_300_mutations_with_a_manifest(whole, tmp_path):
    rng = random.Random(2026)
    prefix = tmp_path / "d"
    Path(f"{prefix}.manifest.json").write_bytes(Path(f"{whole}.manifest.json").read_bytes())
    silent, said = [], []
    for number in range(300):
        kind = list(KINDS)[number % len(KINDS)]
        damaged(whole, prefix, kind, rng)
        try:
            read_whole(prefix)
            silent.append((number, kind))
        except DataError as error:
            said.append(str(error))
    assert silent == []
    assert len(said) == 300
    for text in said:
        assert f"{prefix}." in text
        assert any(field in text for field in FIELDS), text


def test_without_a_manifest_only_the_named_kinds_are_silent(whole, tmp_path):
    """Bounds that still rise, lengths moved with their offsets, int16 for uint16, other ids of the vocabulary."""
    rng = random.Random(2027)
    prefix = tmp_path / "d"
    silent = Counter()
    for number in range(400):
        kind = list(KINDS)[number % len(KINDS)]
        damaged(whole, prefix, kind, rng)
        try:
            read_whole(prefix)
            inspect(prefix, vocab_size=1000)
        except DataError:
            continue
        if kind == "known dtype" or kind == "flip dtype":
            assert Path(f"{prefix}.idx").read_bytes()[17] == 3
        silent[kind] += 1
    allowed = {
        "flip bounds",
        "number in bounds",
        "move bound",
        "move length",
        "known dtype",
        "flip dtype",
        "flip token",
    }
    assert set(silent) <= allowed
    assert {"move bound", "move length", "known dtype", "flip token"} <= set(silent)
    report = inspect(whole_without_manifest(whole, tmp_path), vocab_size=1000)
    assert report.unseen == UNSEEN_WITHOUT_MANIFEST
    assert "document bounds" in report.unseen[0]
    assert "uint16 read as int16" in report.unseen[1]


def whole_without_manifest(whole: Path, folder: Path) -> Path:
    for ending in (".idx", ".bin"):
        (folder / f"w{ending}").write_bytes(Path(f"{whole}{ending}").read_bytes())
    return folder / "w"


def test_every_byte_of_the_manifest_counts(whole, tmp_path):
    text = Path(f"{whole}.manifest.json").read_bytes()
    original = load_manifest(whole)
    path = tmp_path / "d.manifest.json"
    rng = random.Random(5)
    said = []
    for _ in range(150):
        changed = bytearray(text)
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        try:
            manifest = load_manifest(tmp_path / "d")
        except DataError as error:
            said.append(str(error))
            continue
        assert manifest == original, "white space only"
    assert len(said) > 100
    assert all(str(path) in text for text in said)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a manifest"),
        (b"[1]", "no JSON object"),
        (b'{"version": 1, "version": 1}', "twice"),
        (b"[" * 100_000, "not a manifest"),
        (b"\x80\x04\x95", "not a manifest"),
    ],
)
def test_what_is_no_manifest(tmp_path, content, words):
    (tmp_path / "d.manifest.json").write_bytes(content)
    with pytest.raises(DataError, match=words):
        load_manifest(tmp_path / "d")


def test_files_of_another_data_set(tmp_path):
    """The same sizes, another content: found by checksum."""
    write_dataset(tmp_path / "a", [4, 6], seed=1)
    write_dataset(tmp_path / "b", [6, 4], seed=2)
    for ending in (".idx", ".bin"):
        (tmp_path / f"a{ending}").write_bytes((tmp_path / f"b{ending}").read_bytes())
    with pytest.raises(DataError, match=r"a\.idx: crc32"):
        IndexedFile(tmp_path / "a")


def test_large_counts_allocate_nothing(tmp_path):
    header = HEADER.pack(b"MMIDIDX\0\0", 1, 8, 2**60, 2**61)
    (tmp_path / "d.idx").write_bytes(header)
    (tmp_path / "d.bin").write_bytes(np.zeros(4, np.uint16).tobytes())
    with pytest.raises(DataError, match="sequence count=1152921504606846976"):
        IndexedFile(tmp_path / "d")
