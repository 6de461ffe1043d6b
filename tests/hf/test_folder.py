"""Malformed folders: each is one clear error, before anything is written."""

import hashlib
import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megaspec.core.errors import CheckpointError
from megaspec.hf.companions import read_companions
from megaspec.hf.digest import folder_digest
from megaspec.hf.folder import open_hf_folder, read_config

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    save_file(TENSORS, path / "model.safetensors")
    return path


def with_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def rewrite_header(folder: Path, change) -> None:
    """The same bytes behind another header."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def test_a_folder_is_read(folder: Path) -> None:
    with open_hf_folder(folder) as opened:
        assert {name: entry.shape for name, entry in opened.tensors.items()} == {"a": (2, 3), "b": (4,)}
        assert {entry.dtype for entry in opened.tensors.values()} == {"F32", "BF16"}
    with_index(folder, {"a": "model.safetensors", "b": "model.safetensors"})
    with open_hf_folder(folder) as opened:
        assert set(opened.tensors) == {"a", "b"}


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])


def grow(folder: Path) -> None:
    with open(folder / "model.safetensors", "ab") as file:
        file.write(b"more")


def huge_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 10 * 10**9) + b"{}")


def header_length(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(struct.pack("<Q", len(data)) + data[8:])


def overlap(folder: Path) -> None:
    def change(header):
        header["b"]["data_offsets"] = [16, 24]

    rewrite_header(folder, change)


def wrong_dtype(folder: Path) -> None:
    def change(header):
        header["b"]["dtype"] = "F32"

    rewrite_header(folder, change)


def unknown_dtype(folder: Path) -> None:
    def change(header):
        header["b"]["dtype"] = "Q4"

    rewrite_header(folder, change)


def negative_shape(folder: Path) -> None:
    def change(header):
        header["b"]["shape"] = [-4]

    rewrite_header(folder, change)


def no_safetensors(folder: Path) -> None:
    os.rename(folder / "model.safetensors", folder / "pytorch_model.bin")


def missing_shard(folder: Path) -> None:
    with_index(folder, {"a": "model.safetensors", "b": "model-00002.safetensors"})


def outside(folder: Path) -> None:
    with_index(folder, {"a": "model.safetensors", "b": "../other.safetensors"})


def link(folder: Path) -> None:
    os.rename(folder / "model.safetensors", folder.parent / "elsewhere")
    os.symlink(folder.parent / "elsewhere", folder / "model.safetensors")


def pipe(folder: Path) -> None:
    os.remove(folder / "model.safetensors")
    os.mkfifo(folder / "model.safetensors")


def index_names_more(folder: Path) -> None:
    with_index(folder, {"a": "model.safetensors", "b": "model.safetensors", "c": "model.safetensors"})


def index_names_less(folder: Path) -> None:
    with_index(folder, {"a": "model.safetensors"})


def index_is_a_list(folder: Path) -> None:
    with_index(folder, ["a"])


def no_config(folder: Path) -> None:
    os.remove(folder / "config.json")


def config_is_a_list(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def config_says_twice(folder: Path) -> None:
    (folder / "config.json").write_text('{"hidden_size": 1, "hidden_size": 2}')


def config_has_nan(folder: Path) -> None:
    (folder / "config.json").write_text('{"rope_theta": NaN}')


def config_is_deep(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)


def config_is_large(folder: Path) -> None:
    with open(folder / "config.json", "wb") as file:
        file.truncate(1 << 30)


def two_files_without_index(folder: Path) -> None:
    save_file(TENSORS, folder / "other.safetensors")


BROKEN = {
    truncate: "it is cut or damaged",
    grow: "it is cut or damaged",
    huge_header: "its header says that it has 10,000,000,000 bytes",
    header_length: "its header says that it has",
    overlap: "a gap or an overlap",
    wrong_dtype: "8 bytes, where dtype=F32 and shape=[4] take 16",
    unknown_dtype: "dtype='Q4' is none of",
    negative_shape: "must be whole numbers of at least 0",
    no_safetensors: "pickled weights (.bin, .pt) are never read",
    missing_shard: "is missing, and model.safetensors.index.json names it",
    outside: "must be a .safetensors file of this folder",
    link: "model.safetensors",
    pipe: "expected a regular file",
    index_names_more: "c is not in model.safetensors",
    index_names_less: "holds b, which model.safetensors.index.json has in no file",
    index_is_a_list: "weight_map must name a file for each tensor",
    no_config: "config.json",
    config_is_a_list: "is a list, expected an object",
    config_says_twice: "the key 'hidden_size' stands twice",
    config_has_nan: "NaN is no number that JSON has",
    config_is_deep: "is no JSON that can be read",
    config_is_large: "expected at most",
    two_files_without_index: "no model.safetensors.index.json says what belongs together",
}


@pytest.mark.parametrize("damage", BROKEN, ids=lambda damage: damage.__name__)
def test_a_broken_folder_is_refused(damage, folder: Path) -> None:
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        open_hf_folder(folder)
    assert BROKEN[damage] in str(caught.value)


def test_no_folder_is_refused(tmp_path: Path) -> None:
    for read in (open_hf_folder, read_config):
        with pytest.raises(CheckpointError, match="is no folder"):
            read(tmp_path / "none")


def test_a_folder_may_be_a_link_itself(folder: Path, tmp_path: Path) -> None:
    os.symlink(folder, tmp_path / "link")
    with open_hf_folder(tmp_path / "link") as opened:
        assert set(opened.tensors) == {"a", "b"}


@pytest.fixture
def cached(folder: Path, tmp_path: Path) -> Path:
    """The folder as the hub's cache has it."""
    model = tmp_path / "models--org--name"
    snapshot = model / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    for name in os.listdir(folder):
        blob = hashlib.sha256(name.encode()).hexdigest()
        os.rename(folder / name, model / "blobs" / blob)
        os.symlink(f"../../blobs/{blob}", snapshot / name)
    return snapshot


def blob_of(snapshot: Path) -> Path:
    """What model.safetensors stands for."""
    return (snapshot / "model.safetensors").resolve()


def relink(snapshot: Path, target: str | Path) -> None:
    os.remove(snapshot / "model.safetensors")
    os.symlink(target, snapshot / "model.safetensors")


def test_a_snapshot_of_the_hubs_cache_is_read(cached: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(cached, tmp_path / "copy")
    os.symlink(cached, tmp_path / "link")
    for name in ("tokenizer.json", "generation_config.json"):
        (copy / name).write_text("{}")
        blob = cached.parents[1] / "blobs" / name.partition(".")[0]
        blob.write_text("{}")
        os.symlink(f"../../blobs/{blob.name}", cached / name)
    for path in (cached, tmp_path / "link"):
        with open_hf_folder(path) as opened, open_hf_folder(copy) as plain:
            assert opened.path == cached
            assert opened.tensors == plain.tensors
            assert folder_digest(opened) == folder_digest(plain)
            view = memoryview(bytearray(24))
            opened.read_into(opened.tensors["a"], view, 0)
            assert torch.equal(torch.frombuffer(view, dtype=torch.float32).view(2, 3), TENSORS["a"])
            assert read_companions(opened.path) == read_companions(copy)
            assert read_companions(opened.path).keys() == {"config.json", "tokenizer.json", "generation_config.json"}


def absolute(cached: Path) -> None:
    relink(cached, blob_of(cached))


def another_model(cached: Path) -> None:
    other = cached.parents[2] / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    os.rename(blob_of(cached), other / "x")
    relink(cached, "../../../models--org--other/blobs/x")


def through_blobs(cached: Path) -> None:
    os.rename(blob_of(cached), cached.parents[1] / "x")
    relink(cached, "../../blobs/../x")


def out_of_blobs(cached: Path) -> None:
    relink(cached, "../../blobs/..")


def blob_is_a_link(cached: Path) -> None:
    blob = blob_of(cached)
    os.rename(blob, cached.parents[1] / "x")
    os.symlink("../x", blob)


def blobs_is_a_link(cached: Path) -> None:
    blobs = cached.parents[1] / "blobs"
    os.rename(blobs, cached.parents[2] / "elsewhere")
    os.symlink(cached.parents[2] / "elsewhere", blobs)


def no_blob(cached: Path) -> None:
    os.remove(blob_of(cached))


def blob_is_a_pipe(cached: Path) -> None:
    blob = blob_of(cached)
    os.remove(blob)
    os.mkfifo(blob)


def other_name(cached: Path) -> None:
    """Laid out alike, and no cache."""
    os.rename(cached.parent, cached.parents[1] / "versions")


def beside(cached: Path) -> None:
    os.rename(blob_of(cached), cached / "other")
    relink(cached, "other")


NO_CACHE = {
    absolute: "links of the hub's cache are followed, snapshots/COMMIT/model.safetensors -> ../../blobs/HASH; copy",
    another_model: "model.safetensors is a link to '../../../models--org--other/blobs/x'; only",
    through_blobs: "is a link to '../../blobs/../x'; only links",
    out_of_blobs: "is a link to '../../blobs/..'; only links",
    blob_is_a_link: "found a link or another kind",
    blobs_is_a_link: "blobs: expected a file or folder of the checkpoint itself, found a link",
    no_blob: ": missing",
    blob_is_a_pipe: "expected a regular file",
    other_name: "only links of the hub's cache are followed",
    beside: "is a link to 'other'; only links",
}


@pytest.mark.parametrize("spoil", NO_CACHE, ids=lambda spoil: spoil.__name__)
def test_any_other_link_is_refused(spoil, cached: Path) -> None:
    spoil(cached)
    snapshot = cached
    if not cached.exists():
        snapshot = cached.parents[1] / "versions" / cached.name
    with pytest.raises(CheckpointError) as caught:
        open_hf_folder(snapshot)
    assert NO_CACHE[spoil] in str(caught.value)


def test_a_file_that_becomes_shorter_is_told(folder: Path) -> None:
    with open_hf_folder(folder) as opened:
        truncate(folder)
        view = memoryview(bytearray(8))
        with pytest.raises(CheckpointError, match="shorter since it was opened"):
            opened.read_into(opened.tensors["b"], view, 0)
