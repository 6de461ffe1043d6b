"""Token files from an object store that fails now and then: whole, verified by their manifest, or not there."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile

from megaspec import cli
from megaspec.core.errors import DataError
from megaspec.core.remote_files import TRIES
from megaspec.data.fetch import fetch, fetch_text, listing_here
from megaspec.data.indexed import IndexedFile
from megaspec.data.remote_text import list_text
from tests.checkpoint.s3 import SECRET, StandIn, environment, server
from tests.data.helpers import write_dataset

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto")
FILES = ["web.bin", "web.idx", "web.manifest.json"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """A data set on this machine."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "web.txt").write_text("some text that is long enough to be read in parts\n" * 200)
    words = ["data", "prepare", str(folder / "web.txt"), "--out", str(folder / "web"), "--tokenizer", "byte"]
    assert cli.main(words) == 0
    return folder / "web"


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with server() as address:
        yield address


@pytest.fixture
def store(moto, corpus, monkeypatch) -> Iterator[StandIn]:
    """A bucket that holds it."""
    stand_in = StandIn(moto)
    for name, value in environment(stand_in.url).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    # with the address and credentials of another test
    s3fs.S3FileSystem.clear_instance_cache()
    fs = s3fs.S3FileSystem(skip_instance_cache=True)
    if not fs.exists("corpora"):
        fs.mkdir("corpora")
    for name in FILES:
        fs.put_file(str(corpus.parent / name), f"corpora/data/{name}")
    stand_in.fs = fs
    stand_in.requests.clear()
    yield stand_in
    stand_in.close()


def get(out: Path):
    return fetch("s3://corpora/data/web", out, wait_seconds=0.01)


def assert_same(out: Path, corpus: Path) -> None:
    for ending in (".bin", ".idx", ".manifest.json"):
        assert Path(f"{out}{ending}").read_bytes() == Path(f"{corpus}{ending}").read_bytes()
    IndexedFile(str(out))
    assert not [name for name in os.listdir(out.parent) if name.startswith(".")]


def test_every_third_request_fails(store, corpus, tmp_path) -> None:
    store.fault = lambda number, method, path: (503, "cut")[number % 2] if number % 3 == 0 else None
    get(tmp_path / "data" / "web")
    assert store.faults > 1
    assert_same(tmp_path / "data" / "web", corpus)


def test_what_is_there_is_not_fetched_again(store, corpus, tmp_path) -> None:
    get(tmp_path / "web")
    store.requests.clear()
    get(tmp_path / "web")
    assert not [path for _, path in store.requests if ".bin" in path]
    # damage here is found, and mended
    data = bytearray((tmp_path / "web.bin").read_bytes())
    data[7] ^= 1
    (tmp_path / "web.bin").write_bytes(data)
    get(tmp_path / "web")
    assert_same(tmp_path / "web", corpus)


@pytest.mark.parametrize("ending", [".bin", ".idx", ".manifest.json"])
def test_damage_there_is_named_and_nothing_is_left(store, corpus, tmp_path, ending) -> None:
    data = bytearray(Path(f"{corpus}{ending}").read_bytes())
    data[len(data) // 2] ^= 1
    store.fs.pipe_file(f"corpora/data/web{ending}", bytes(data))
    with pytest.raises(DataError) as raised:
        get(tmp_path / "web")
    assert raised.value.exit_code == 65
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("case", ["missing", "denied", "away"])
def test_what_is_not_there_ends_with_65_and_tells_no_secret(store, tmp_path, capfd, monkeypatch, case) -> None:
    monkeypatch.setattr("megaspec.core.remote_files.LONGEST_WAIT_SECONDS", 0.01)
    url = "s3://corpora/data/web"
    if case == "missing":
        url = "s3://corpora/data/none"
    elif case == "denied":
        store.fault = lambda number, method, path: 403
    else:
        store.fault = lambda number, method, path: 503
    assert cli.main(["data", "fetch", url, "--out", str(tmp_path / "web")]) == 65
    said = capfd.readouterr().err
    assert "s3://corpora/data" in said
    assert SECRET not in said
    assert len(store.requests) <= 4 * TRIES
    assert os.listdir(tmp_path) == []


def test_a_secret_in_a_url_is_refused_untold(tmp_path, capfd) -> None:
    words = ["data", "fetch", f"s3://me:{SECRET}@corpora/data/web", "--out", str(tmp_path / "web")]
    assert cli.main(words) == 64
    assert SECRET not in capfd.readouterr().err


@pytest.fixture(scope="module")
def many_blocks(tmp_path_factory) -> Path:
    """A data set of five blocks of tokens."""
    folder = tmp_path_factory.mktemp("blocks")
    write_dataset(folder / "many", [1000] * 2300)
    return folder / "many"


def put(store: StandIn, prefix: Path, there: str) -> None:
    for ending in (".bin", ".idx", ".manifest.json"):
        store.fs.put_file(f"{prefix}{ending}", f"{there}{ending}")


def test_what_a_killed_fetch_left_is_taken_where_it_is_good(store, many_blocks, tmp_path) -> None:
    put(store, many_blocks, "corpora/data/many")
    store.requests.clear()
    stuck = threading.Event()

    def stops_behind_the_third_block(number: int, method: str, path: str) -> threading.Event | None:
        first = store.range.removeprefix("bytes=").partition("-")[0]
        if "many.bin" in path and first.isdigit() and int(first) >= 3 << 20:
            return stuck
        return None

    store.fault = stops_behind_the_third_block
    part = tmp_path / ".many.bin.part"
    words = ["data", "fetch", "s3://corpora/data/many", "--out", str(tmp_path / "many")]
    process = subprocess.Popen([sys.executable, "-P", "-m", "megaspec.cli", *words], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not part.exists() or part.stat().st_size < 3 << 20:
            assert time.monotonic() < deadline, "three blocks did not come"
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
        stuck.set()
    assert not (tmp_path / "many.bin").exists()
    assert not (tmp_path / "many.manifest.json").exists()
    # a block that was damaged since, and what a write was cut off at
    data = bytearray(part.read_bytes())
    data[(2 << 20) + 5] ^= 1
    part.write_bytes(bytes(data) + b"half a block")
    store.fault = lambda number, method, path: None
    store.requests.clear()
    fetch("s3://corpora/data/many", tmp_path / "many", wait_seconds=0.01)
    assert len([path for method, path in store.requests if method == "GET" and "many.bin" in path]) == 3
    assert_same(tmp_path / "many", many_blocks)


def test_one_of_several_fetches_and_the_others_wait(store, many_blocks, tmp_path) -> None:
    put(store, many_blocks, "corpora/data/many")
    store.requests.clear()
    said: list[str] = []

    def one() -> None:
        fetch("s3://corpora/data/many", tmp_path / "many", wait_seconds=0.01, tell=said.append)

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([path for method, path in store.requests if method == "GET" and "many.bin" in path]) == 5
    assert len([text for text in said if text.startswith("fetching")]) == 1
    assert_same(tmp_path / "many", many_blocks)


def test_a_full_disk_is_told_before_the_first_byte(store, corpus, tmp_path, monkeypatch, capfd) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    store.requests.clear()
    assert cli.main(["data", "fetch", "s3://corpora/data/web", "--out", str(tmp_path / "web")]) == 73
    need = Path(f"{corpus}.bin").stat().st_size + Path(f"{corpus}.idx").stat().st_size
    assert f"{need} bytes" in (said := capfd.readouterr().err)
    assert "free are 100 " in said
    assert not [path for _, path in store.requests if ".bin" in path]
    assert os.listdir(tmp_path) == []


def test_the_extra_that_is_missing_is_named(tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(vars(sys.modules["fsspec.registry"])["_registry"], "s3", raising=False)
    assert cli.main(["data", "fetch", "s3://corpora/data/web", "--out", str(tmp_path / "web")]) == 64
    assert "pip install 'megaspec[s3]'" in capfd.readouterr().err


def test_text_that_is_replaced_or_edited(store, tmp_path) -> None:
    """Another object under the name, and a file here that somebody wrote to."""
    store.fs.pipe_file("corpora/text/a.jsonl", b'{"text": "one"}\n')
    store.fs.pipe_file("corpora/text/b.jsonl", b'{"text": "two"}\n')
    listing = list_text("s3://corpora/text/*.jsonl")
    folder = tmp_path / "text"
    fetch_text("s3://corpora/text/*.jsonl", folder, expected=listing.record)
    store.requests.clear()
    fetch_text("s3://corpora/text/*.jsonl", folder, expected=listing.record)
    assert store.requests == []
    (folder / "a.jsonl").write_text('{"text": "0ne"}\n')
    assert listing_here(folder, listing.record) is None
    fetch_text("s3://corpora/text/*.jsonl", folder, expected=listing.record)
    assert (folder / "a.jsonl").read_text() == '{"text": "one"}\n'
    store.fs.pipe_file("corpora/text/b.jsonl", b'{"text": "2wo"}\n')
    with pytest.raises(DataError, match=r"data\.files\.0\.path=s3://corpora/text/\*\.jsonl: holds other data"):
        fetch_text("s3://corpora/text/*.jsonl", tmp_path / "new", expected=listing.record, name="data.files.0.path=")


@pytest.mark.parametrize("name", ["../up.jsonl", "a//b.jsonl", "x.jsonl.gz"])
def test_names_that_are_no_paths_and_text_that_cannot_be_streamed(tmp_path, name) -> None:
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.store[f"/text/{name}"] = MemoryFile(fs, f"/text/{name}", b"{}")
    with pytest.raises(DataError, match=r"no path here|from its middle on"):
        list_text("memory://text")
