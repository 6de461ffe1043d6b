"""Token files from an object store that fails now and then: whole, verified by their manifest, or not there."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaspec import cli
from megaspec.core.errors import DataError
from megaspec.core.remote_files import TRIES
from megaspec.data.fetch import fetch
from megaspec.data.indexed import IndexedFile
from tests.checkpoint.s3 import SECRET, StandIn, environment, server

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


def test_a_recipe_that_names_a_url_is_told_the_command(capfd) -> None:
    words = ["plan", "recipe=hello", "data.blend=[{prefix: 's3://corpora/data/web'}]", "hardware=cpu"]
    assert cli.main(words) == 0
    assert "megaspec data fetch s3://corpora/data/web --out data/web" in " ".join(capfd.readouterr().err.split())
