"""Runs whose data a recipe names by URL: the samples and losses of files, on a store that is away at times."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaspec import cli
from megaspec.compose.words import compose_words
from megaspec.estimate.target import detect_target
from megaspec.launcher import exit_file
from megaspec.log.jsonl import read_metrics
from megaspec.resolve.gather import gather_facts
from megaspec.resolve.resolver import resolve
from megaspec.spec import Spec
from tests.checkpoint.s3 import SECRET, StandIn, environment, server
from tests.runtime.lives import read_all
from tests.runtime.test_strangers import attempt
from tests.runtime.test_strangers import store as meeting

assert meeting
s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto")
TINY = (
    "recipe=hello hardware=cpu ~data.prepare train.sample=null model.n_layers=1 model.d_model=16 model.n_heads=2 "
    "model.n_kv_heads=1 model.d_ffn=64 model.max_seq_len=32 data.seq_len=32 train.global_batch=4 train.micro_batch=1 "
    "train.steps=4 train.eval_every=4 train.eval_samples=8 optim.schedule.warmup_steps=1 optim.schedule.decay_steps=8 "
    "launcher.ranks=1 parallelism.tp=1 log=plain"
)
ENDINGS = (".bin", ".idx", ".manifest.json")


def words(prefix: str, name: str, *, command: str = "train") -> list[str]:
    """The command line of a run of two data sets and an evaluation set."""
    given = [word for word in TINY.split() if command == "plan" or not word.startswith("hardware=")]
    blend = f"data.blend=[{{prefix: '{prefix}web', weight: 2}}, {{prefix: '{prefix}more', weight: 1}}]"
    return [command, *given, f"name={name}", blend, f"data.valid.web={prefix}valid"]


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with server() as address:
        yield address


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Three data sets on this machine."""
    folder = tmp_path_factory.mktemp("corpus")
    for name in ("web", "more", "valid", "other"):
        text = "".join(json.dumps({"text": f"document {n} of {name} with some words in it"}) + "\n" for n in range(200))
        (folder / f"{name}.jsonl").write_text(text)
        given = ["data", "prepare", str(folder / f"{name}.jsonl"), "--out", str(folder / name), "--tokenizer", "byte"]
        assert cli.main(given) == 0
    return folder


@pytest.fixture
def bucket(moto, corpus, tmp_path, monkeypatch) -> Iterator[StandIn]:
    """A store that has them, and a folder to work in."""
    stand_in = StandIn(moto)
    for name, value in environment(stand_in.url).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    stand_in.fs = s3fs.S3FileSystem(skip_instance_cache=True)
    if not stand_in.fs.exists("corpora"):
        stand_in.fs.mkdir("corpora")
    for name in ("web", "more", "valid"):
        upload(stand_in, corpus / name, name)
    stand_in.requests.clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("megaspec.core.remote_files.LONGEST_WAIT_SECONDS", 0.01)
    yield stand_in
    stand_in.close()


def upload(stand_in: StandIn, prefix: Path, name: str) -> None:
    for ending in ENDINGS:
        stand_in.fs.put_file(f"{prefix}{ending}", f"corpora/{name}{ending}")


def read_from(stand_in: StandIn, ending: str) -> list[str]:
    return [path for method, path in stand_in.requests if method == "GET" and ending in path and "?list" not in path]


def losses(run: str) -> list[tuple[str, float]]:
    lines = read_metrics(Path(run) / "metrics.jsonl")
    return [(line["event"], line["loss"]) for line in lines if line["event"] in ("step", "eval")]


def test_a_run_is_the_one_from_files_and_goes_on_without_the_store(bucket, corpus, warm_launches, capfd) -> None:
    assert cli.main(words(f"{corpus}/", "local")) == 0
    assert cli.main(words("s3://corpora/", "far", command="plan")) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert "s3://corpora/web" in said
    assert "is to be fetched into" in said
    assert read_from(bucket, ".bin") == []
    assert not Path("runs/downloads").exists()
    assert cli.main(words("s3://corpora/", "far")) == 0
    # once each
    assert len(read_from(bucket, ".bin")) == 3
    assert losses("runs/far") == losses("runs/local")
    far, local = (Spec.model_validate_json(Path(f"runs/{name}/spec.json").read_bytes()) for name in ("far", "local"))
    assert far.data_fingerprint == local.data_fingerprint
    assert [record.url for record in far.remote] == [f"s3://corpora/{name}" for name in ("web", "more", "valid")]
    assert local.remote == ()
    # another run finds what the first fetched
    bucket.requests.clear()
    assert cli.main(words("s3://corpora/", "second")) == 0
    assert read_from(bucket, ".bin") == []
    # the store is away: a run goes on with what is here
    bucket.fault = lambda number, method, path: 503
    bucket.requests.clear()
    for name in ("far", "local"):
        assert cli.main(["resume", f"runs/{name}", "train.steps=8"]) == 0
    assert bucket.requests == []
    assert losses("runs/far") == losses("runs/local")
    assert read_all(Path("runs/far"))[8] == read_all(Path("runs/local"))[8]
    # and is back: a machine that has nothing fetches it again, an evaluation only what it reads
    bucket.fault = lambda number, method, path: None
    shutil.rmtree("runs/downloads")
    assert cli.main(["eval", "runs/far", "--json"]) == 0
    assert ["valid" in path for path in read_from(bucket, ".bin")] == [True]
    assert_untold(capfd)


def test_a_stream_is_the_one_from_files(bucket, corpus, warm_launches, capfd) -> None:
    text = Path("text")
    for number, name in enumerate(("a/web.jsonl", "a-b/more.jsonl", "valid.jsonl", ".hidden.jsonl")):
        (text / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(f"{corpus}/{('web', 'more', 'valid', 'other')[number]}.jsonl", text / name)
        bucket.fs.put_file(str(text / name), f"corpora/text/{name}")
    others = ("data.blend", "data.valid", "name=", "train.eval_every")
    given = [word for word in words("", "") if not word.startswith(others)]
    given += ["data=stream", "~data.blend", "data.tokenizer=byte", "data.window=500"]
    given += ["train.eval_every=0"]
    for name, path in (("local", "text/**/*.jsonl"), ("far", "s3://corpora/text/**/*.jsonl")):
        assert cli.main([*given, f"name={name}", f"data.files=[{{path: '{path}'}}]"]) == 0, capfd.readouterr().err
    assert losses("runs/far") == losses("runs/local")
    assert not list(Path("runs/downloads").glob("**/.hidden.jsonl"))
    bucket.fault = lambda number, method, path: 503
    for name in ("local", "far"):
        assert cli.main(["resume", f"runs/{name}", "train.steps=6"]) == 0
    assert losses("runs/far") == losses("runs/local")
    bucket.fault = lambda number, method, path: None
    bucket.fs.pipe_file("corpora/text/valid.jsonl", b'{"text": "other text"}\n')
    shutil.rmtree("runs/downloads")
    capfd.readouterr()
    assert cli.main(["resume", "runs/far", "train.steps=8"]) == 65
    assert "data.files.0.path=s3://corpora/text/**/*.jsonl: holds other data" in capfd.readouterr().err


def test_lengths_are_read_from_beside_the_files(bucket, corpus, capfd) -> None:
    given = [*words("s3://corpora/", "far", command="plan"), "data.document_mask=true", "--json"]
    assert cli.main(given) == 0
    assert lengths_of(capfd) is None
    # here alone, for those that are fetched; for others beside the files
    assert cli.main(["data", "inspect", "s3://corpora/web", "--json"]) == 0
    (kept,) = Path("runs/downloads").glob("*/web.lengths.json")
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["lengths_file"] == str(kept)
    assert cli.main(["data", "inspect", f"{corpus}/more", "--json"]) == 0
    bucket.fs.put_file(f"{corpus}/more.lengths.json", "corpora/more.lengths.json")
    capfd.readouterr()
    assert cli.main(given) == 0
    far = lengths_of(capfd)
    shutil.copy(kept, f"{corpus}/web.lengths.json")
    local = [word.replace("s3://corpora/", f"{corpus}/") for word in given]
    assert cli.main(local) == 0
    assert far == lengths_of(capfd) != None  # noqa: E711 a comparison of three
    for name in ("web", "more"):
        Path(f"{corpus}/{name}.lengths.json").unlink()
    bucket.fs.rm_file("corpora/more.lengths.json")


def lengths_of(capfd) -> list[dict] | None:
    """What a plan weighs attention by."""
    plan = json.loads(capfd.readouterr().out)
    (said,) = [one for one in plan["decisions"] if one["key"] == "data.document_lengths"]
    return said["value"]


def assert_untold(capfd) -> None:
    """No secret was printed, or stands in a file."""
    out, err = capfd.readouterr()
    written = [path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()]
    for secret in (SECRET, "canary-key"):
        assert secret not in out + err
        assert not any(secret.encode() in content for content in written)


def test_other_data_under_the_same_name(bucket, corpus, warm_launches, capfd) -> None:
    assert cli.main(words("s3://corpora/", "far")) == 0
    upload(bucket, corpus / "other", "more")
    # what the run began with is here
    assert cli.main(["resume", "runs/far", "train.steps=6"]) == 0
    shutil.rmtree("runs/downloads")
    capfd.readouterr()
    assert cli.main(["resume", "runs/far", "train.steps=8"]) == 65
    said = capfd.readouterr().err
    assert "data.blend.1.prefix=s3://corpora/more: holds other data than when the run was resolved" in said
    assert "--fork NAME" in said
    assert cli.main(["resume", "runs/far", "train.steps=8", "--fork", "anew"]) == 0
    # other tokens under the old manifest
    shutil.rmtree("runs/downloads")
    bucket.fs.put_file(f"{corpus}/web.bin", "corpora/more.bin")
    capfd.readouterr()
    assert cli.main(words("s3://corpora/", "damaged")) == 65
    assert "s3://corpora/more.bin" in capfd.readouterr().err


@pytest.mark.parametrize("case", ["no bucket", "denied", "away", "no tokens", "full"])
def test_what_keeps_a_run_from_its_data_is_told_before_it_starts(bucket, case, monkeypatch, capfd) -> None:
    prefix, code = "s3://corpora/", 65
    match case:
        case "no bucket":
            prefix, said = "s3://nowhere/", "there is no such bucket or file; a data set is its .bin"
        case "denied":
            bucket.fault = lambda number, method, path: 403
            said = "access is denied"
        case "away":
            bucket.fault = lambda number, method, path: 503
            said = "web.manifest.json: "
        case "no tokens":
            bucket.fs.rm_file("corpora/web.bin")
            said = "web.bin: there is no such bucket or file"
        case "full":
            usage = shutil.disk_usage(".")
            monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
            code, said = 73, "bytes"
    assert cli.main(words(prefix, "far")) == code
    err = capfd.readouterr().err
    assert said in err
    if case == "full":
        assert "data.download_dir=runs/downloads: " in err
        assert "free are 10 " in err
        assert exit_file.read_exit(Path("runs/far")).code == 73
    else:
        assert f"data.blend.0.prefix={prefix}web: " in err
        assert not Path("runs/far").exists()
    assert read_from(bucket, ".bin") == []
    assert SECRET not in err
    assert cli.main(words(prefix, "far", command="plan")) == 0


def test_hosts_of_a_job_fetch_before_any_of_their_ranks_trains(bucket, corpus, meeting, capfd) -> None:
    """Two ranks, the first of a host each, as torchrun starts them; the store is a folder."""
    url = f"file://{corpus}/"
    composed = compose_words(words(url, "far")[1:])
    spec = resolve(composed.recipe, detect_target(), gather_facts(composed.recipe), composed.origins)
    folder = Path("runs/job")
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text(spec.model_dump_json())
    assert attempt(meeting, 0, folder, local_ranks=(0, 0)) == ([0, 0], [str(folder)] * 2)
    assert len(list(Path("runs/downloads").glob("*/*.bin"))) == 3
    assert capfd.readouterr().err.count("fetching file://") == 3
    # gone, and so is one that they are fetched from: no rank trains, and the run's folder says why
    shutil.rmtree("runs/downloads")
    os.rename(f"{corpus}/valid.bin", f"{corpus}/valid.away")
    exit_file.begin(folder, step=0)
    try:
        assert attempt(meeting, 1, folder, local_ranks=(0, 1)) == ([65, 65], [])
    finally:
        os.rename(f"{corpus}/valid.away", f"{corpus}/valid.bin")
    assert exit_file.read_exit(folder).code == 65
    assert "data.valid.web.blend.0.prefix=file://" in capfd.readouterr().err
