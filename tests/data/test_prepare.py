import gzip
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspec.core.errors import DataError, WriteError
from megaspec.data import inputs as inputs_module
from megaspec.data import json_lines
from megaspec.data import manifest as manifest_module
from megaspec.data import prepare as prepare_module
from megaspec.data import workers as workers_module
from megaspec.data.files import write_atomically
from megaspec.data.indexed import IndexedFile
from megaspec.data.inputs import Document, cut, documents, find_inputs, lines_before, read_documents
from megaspec.data.inspect import inspect
from megaspec.data.manifest import load_manifest, sha256_of_files
from megaspec.data.prepare import JobProgress, prepare
from megaspec.data.provenance import tokenizer_of
from megaspec.data.text_fields import TextFields
from megaspec.data.tokenizer import ByteTokenizer, parse_tokenizer
from megaspec.data.workers import WorkerDied

ROOT = Path(__file__).parents[2]
WORDS = ["alpha", "βήτα", "gamma", "ДЕЛЬТА", "漢字", "\n", " ", "x" * 40]


def texts_of(count: int, seed: int = 0) -> list[str]:
    rng = np.random.RandomState(seed)
    return ["".join(rng.choice(WORDS, rng.randint(1, 30))) + "." for _ in range(count)]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))
    return path


def documents_of(prefix: Path) -> list[str]:
    file, tokenizer = IndexedFile(prefix), tokenizer_of(prefix)
    out = []
    for i in range(len(file)):
        ids = file.read(i).tolist()
        assert ids[-1] == tokenizer.eod
        out.append(tokenizer.decode(ids[:-1]))
    return out


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(inputs_module, "SMALLEST_PART", 4000)


def test_jsonl_becomes_documents(tmp_path):
    texts = texts_of(50)
    prepared = prepare([str(write_jsonl(tmp_path / "a.jsonl", texts))], tmp_path / "d", ByteTokenizer())
    assert documents_of(tmp_path / "d") == texts
    manifest = prepared.manifest
    assert manifest == load_manifest(tmp_path / "d")
    assert manifest.documents == 50
    assert manifest.tokens == sum(len(text.encode()) + 1 for text in texts)
    assert (manifest.dtype, manifest.tokenizer.name, manifest.tokenizer.eod) == ("uint16", "byte", 256)
    assert manifest.sources[0].sha256 == sha256_of_files([tmp_path / "a.jsonl"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "d.bin", "d.idx", "d.manifest.json"]
    assert inspect(tmp_path / "d").documents == 50


@pytest.mark.parametrize("workers", [1, 3])
def test_the_result_does_not_depend_on_workers(tmp_path, small_parts, workers):
    source = write_jsonl(tmp_path / "a.jsonl", texts_of(400))
    assert len(cut(find_inputs([str(source)]))) > 5
    tokenizer = parse_tokenizer("bpe:300")
    prepare([str(source)], tmp_path / "d", tokenizer, workers=workers)
    assert documents_of(tmp_path / "d") == texts_of(400)
    base = tmp_path.parent / "bytes-of-one-worker"
    found = [(tmp_path / f"d{ending}").read_bytes() for ending in (".bin", ".idx", ".tokenizer.json")]
    if workers == 1:
        base.write_bytes(b"".join(found))
    elif base.exists():
        assert b"".join(found) == base.read_bytes()


def test_every_kind_of_input_in_one_job(tmp_path):
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_text("from txt")
    (folder / "a.md").write_bytes(b"\xef\xbb\xbffrom md")
    (folder / "sub" / "z.jsonl").write_text('{"text": "from jsonl"}')
    (folder / "sub" / "picture.png").write_bytes(b"\x89PNG")
    table = pyarrow.table({"text": [f"row {i}" for i in range(5)], "n": list(range(5))})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet", row_group_size=2)
    prepared = prepare([str(tmp_path / "t.parquet"), str(folder)], tmp_path / "d", ByteTokenizer())
    assert documents_of(tmp_path / "d") == [*[f"row {i}" for i in range(5)], "from md", "from txt", "from jsonl"]
    assert prepared.passed_over == 1
    assert [source.name for source in prepared.manifest.sources] == [str(tmp_path / "t.parquet"), str(folder)]


def test_other_keys_and_no_eod(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "ab", "text": 5}\n')
    prepare([str(tmp_path / "a.jsonl")], tmp_path / "d", ByteTokenizer(), key="body", append_eod=False)
    assert IndexedFile(tmp_path / "d").read(0).tolist() == [97, 98]


BAD_LINES = [
    (b'{"text": "good"}', None),
    (b'{"text": "cut', "broken JSON: Unterminated string starting at character 10"),
    (b'{"other": "x", "id": 1}', 'missing key: no "text"; the line has "other", "id"'),
    (b'{"text": 5}', 'wrong type: "text" must be a string, found a number (5)'),
    (b'{"text": null}', 'wrong type: "text" must be a string, found null'),
    (b'{"text": {"a": 1}}', 'wrong type: "text" must be a string, found an object'),
    (b'["text"]', "no object: a line must be an object, found a list"),
    (b'{"text": "\xff"}', "bad UTF-8: byte 0xff at byte 11"),
    (b"", None),
    (b'{"text": "\\ud800"}', "bad UTF-8: half a character, \\ud800, at character 1"),
    (b'{"text": ""}', "empty document"),
    (b'{"text": " \\n"}', "empty document"),
    (b" \t\r", None),
    (b'{"text": "a", "text": "b"}', "broken JSON: a key twice in one object"),
    (b'{"text": "a", "n": NaN}', "broken JSON: NaN is no JSON"),
    (b'{"text": "a"} {"text": "b"}', "broken JSON: Extra data at character 15"),
    (b"[" * 100_000, "broken JSON: brackets within brackets without end"),
    (b'{"text": "also good"}', None),
    (b"", None),
    (b"", None),
]
KINDS = [reason.partition(":")[0] for _, reason in BAD_LINES if reason]


def bad_file(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(line for line, _ in BAD_LINES))
    return tmp_path / "a.jsonl"


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
def test_all_bad_lines_are_found_before_anything_is_made(tmp_path, tokenizer):
    source = bad_file(tmp_path)
    stages = []
    with pytest.raises(DataError) as error:
        prepare(
            [str(source)], tmp_path / "d", parse_tokenizer(tokenizer), progress=lambda now: stages.append(now.stage)
        )
    assert set(stages) == {"lines"}
    assert not list((tmp_path / "d.parts").glob("*.bin"))
    assert not (tmp_path / "d.parts" / "tokenizer.json").exists()
    text = str(error.value)
    assert text.startswith(f"{len(KINDS)} bad lines (")
    for kind in set(KINDS):
        assert f"{KINDS.count(kind)} {kind}" in text
    listed = [f"{source}:{n}: {reason}" for n, (_, reason) in enumerate(BAD_LINES, start=1) if reason]
    assert [line.strip() for line in text.splitlines()[1:11]] == listed[:10]
    assert f"and {len(KINDS) - 10} more" in text
    assert f"all of them: {tmp_path}/d.bad-lines.txt" in text
    assert (tmp_path / "d.bad-lines.txt").read_text().splitlines() == listed
    assert error.value.exit_code == 65
    assert not (tmp_path / "d.bin").exists()


def test_bad_lines_are_left_out_up_to_a_number(tmp_path):
    source = bad_file(tmp_path)
    with pytest.raises(DataError, match=f"--skip-bad {len(KINDS) - 1} allows {len(KINDS) - 1}:"):
        prepare([str(source)], tmp_path / "d", ByteTokenizer(), skip_bad=len(KINDS) - 1)
    prepared = prepare([str(source)], tmp_path / "d", ByteTokenizer(), skip_bad=len(KINDS))
    assert documents_of(tmp_path / "d") == ["good", "also good"]
    assert prepared.manifest.bad_lines == {kind: KINDS.count(kind) for kind in KINDS}
    assert prepared.manifest.bad_lines_file == "d.bad-lines.txt"
    assert len((tmp_path / "d.bad-lines.txt").read_text().splitlines()) == len(KINDS)
    source.write_text('{"text": "mended"}\n\n')
    prepared = prepare([str(source)], tmp_path / "d", ByteTokenizer(), overwrite=True)
    assert (prepared.manifest.documents, prepared.manifest.bad_lines_file) == (1, None)
    assert not (tmp_path / "d.bad-lines.txt").exists()


def test_a_document_of_which_no_token_is_left_is_bad(tmp_path):
    tokenizer = json.dumps(
        {
            "model": {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"},
            "normalizer": {"type": "Replace", "pattern": {"String": "b"}, "content": ""},
        }
    )
    (tmp_path / "t.json").write_text(tokenizer)
    write_jsonl(tmp_path / "a.jsonl", ["a", "b", "a"])
    made = parse_tokenizer(str(tmp_path / "t.json"))
    with pytest.raises(DataError, match=r"1 bad line \(1 no tokens\):\n  .*a\.jsonl:2: no tokens"):
        prepare([str(tmp_path / "a.jsonl")], tmp_path / "d", made, append_eod=False)
    done = prepare([str(tmp_path / "a.jsonl")], tmp_path / "d", made, append_eod=False, skip_bad=1)
    assert done.manifest.bad_lines == {"no tokens": 1}
    assert (tmp_path / "d.bad-lines.txt").read_text() == f"{tmp_path}/a.jsonl:2: no tokens\n"


def test_several_keys_and_paths_are_one_document(tmp_path):
    lines = [
        {"title": "A", "meta": {"body": "a"}},
        {"title": " ", "meta": {"body": "only"}},
        {"title": "B", "meta": {"body": "x"}, "meta.body": "b"},
        {"title": "C", "meta": {}},
        {"title": "D", "meta": "text"},
        {"title": 1, "meta": {"body": "d"}},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    fields = TextFields(("title", "meta.body"))
    prepare([str(tmp_path / "a.jsonl")], tmp_path / "d", ByteTokenizer(), key=fields, skip_bad=9)
    assert documents_of(tmp_path / "d") == ["A\n\na", "only", "B\n\nb"]
    assert (tmp_path / "d.bad-lines.txt").read_text().splitlines() == [
        f'{tmp_path}/a.jsonl:4: missing key: no "meta.body"; the line has "title", "meta"',
        f'{tmp_path}/a.jsonl:5: missing key: no "meta.body"; the line has "title", "meta"',
        f'{tmp_path}/a.jsonl:6: wrong type: "title" must be a string, found a number (1)',
    ]


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_compressed_lines(tmp_path, ending):
    texts = texts_of(3000)
    raw = write_jsonl(tmp_path / "raw.jsonl", texts).read_bytes()
    packed = gzip.compress(raw)
    if ending == "zst":
        packed = pyarrow.Codec("zstd").compress(raw, asbytes=True)
    source = tmp_path / f"a.jsonl.{ending}"
    # two members, as `cat` makes them
    source.write_bytes(packed + packed)
    prepared = prepare([str(source)], tmp_path / "d", ByteTokenizer())
    assert documents_of(tmp_path / "d") == texts * 2
    assert bool(prepared.without_checksums) == (ending == "zst")
    for damaged in (packed[:-3], packed[: len(packed) // 2], b"none", packed[:40] + b"\0" * 20 + packed[60:]):
        source.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"a\.jsonl\.{ending}: can't be decompressed: .*damaged"):
            prepare([str(source)], tmp_path / "e", ByteTokenizer())


def test_documents_of_a_file_are_strict(tmp_path, small_parts):
    source = write_jsonl(tmp_path / "a.jsonl", texts_of(300))
    assert list(documents(str(source)))[299] == Document(texts_of(300)[299], str(source), 300)
    source.write_text(source.read_text() + '\n{"text": 4}\n')
    with pytest.raises(DataError, match=r'a\.jsonl:302: wrong type: "text" must be a string, found a number \(4\)'):
        list(documents(str(source)))


def test_line_numbers_count_from_the_beginning_of_the_file(tmp_path, small_parts):
    lines = [json.dumps({"text": text}) for text in texts_of(300)]
    lines[250] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"a\.jsonl:251: broken JSON"):
        prepare([str(tmp_path / "a.jsonl")], tmp_path / "d", ByteTokenizer(), workers=2)


def test_long_lines_are_bad_and_are_not_held(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "LINE_LIMIT", 1000)
    (tmp_path / "a.jsonl").write_text(f'{{"text": "{"x" * 5000}"}}\n{{"text": "next"}}\n')
    (part,) = cut(find_inputs([str(tmp_path / "a.jsonl")]))
    found = [(line, text) for piece in part.slices for line, text in read_documents(piece, "text")]
    assert found == [(1, inputs_module.BadLine("line too long", "more than 1,000 bytes")), (2, "next")]


@given(
    lines=st.lists(st.text(alphabet="ab\r é", max_size=12), min_size=1, max_size=12),
    target=st.integers(1, 60),
    last_newline=st.booleans(),
)
@settings(max_examples=60)
def test_any_cut_gives_every_line_once(tmp_path_factory, lines, target, last_newline):
    path = tmp_path_factory.mktemp("c") / "a.jsonl"
    texts = [f"x{line}" for line in lines]
    path.write_text("\n".join(json.dumps({"text": t}) for t in texts) + "\n" * last_newline, newline="")
    found = []
    for piece, _ in inputs_module._cut_jsonl(str(path), path.stat().st_size, target):
        before = lines_before(piece)
        found += [(before + line, text) for line, text in read_documents(piece, "text")]
    assert found == list(enumerate(texts, start=1))


def test_parquet_problems(tmp_path):
    table = pyarrow.table({"text": ["a", None, ""]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet", row_group_size=2)
    with pytest.raises(DataError) as error:
        prepare([str(tmp_path / "t.parquet")], tmp_path / "d", ByteTokenizer())
    assert "t.parquet:2: wrong type" in str(error.value)
    assert "t.parquet:3: empty document" in str(error.value)
    with pytest.raises(DataError, match="no column body; --key names one of text"):
        prepare([str(tmp_path / "t.parquet")], tmp_path / "e", ByteTokenizer(), key="body")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="not a parquet file"):
        prepare([str(tmp_path / "bad.parquet")], tmp_path / "e", ByteTokenizer())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: folder / "nothing.jsonl", "no such file or folder"),
        (lambda folder: (folder / "a.csv").write_text("x") and folder / "a.csv", "an input is"),
        (lambda folder: (folder / "empty").mkdir() or folder / "empty", r"no \.jsonl"),
        (lambda folder: (folder / "e.jsonl").write_text("") or folder / "e.jsonl", "holds no document"),
    ],
)
def test_inputs_that_hold_nothing(tmp_path, make, words):
    with pytest.raises(DataError, match=words):
        prepare([str(make(tmp_path))], tmp_path / "d", ByteTokenizer())


def test_the_same_job_again_does_nothing_and_another_is_refused(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", texts_of(9))
    first = prepare([str(source)], tmp_path / "d", ByteTokenizer())
    before = (tmp_path / "d.bin").stat().st_mtime_ns
    again = prepare([str(source)], tmp_path / "d", ByteTokenizer())
    assert again.was_there
    assert again.manifest == first.manifest
    assert (tmp_path / "d.bin").stat().st_mtime_ns == before
    write_jsonl(source, texts_of(10))
    with pytest.raises(DataError, match="--overwrite"):
        prepare([str(source)], tmp_path / "d", ByteTokenizer())
    assert prepare([str(source)], tmp_path / "d", ByteTokenizer(), overwrite=True).manifest.documents == 10


JOB = """
import os, sys, time
from megaspec.data import inputs
from megaspec.data.prepare import prepare
from megaspec.data.tokenizer import parse_tokenizer
inputs.SMALLEST_PART = 4000
prepare([sys.argv[1]], sys.argv[2], parse_tokenizer("bpe:300"), workers=2)
"""


def start_job(source: Path, prefix: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", JOB, str(source), str(prefix)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )


def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(tmp_path, small_parts):
    source = write_jsonl(tmp_path / "a.jsonl", texts_of(1500))
    prepare([str(source)], tmp_path / "whole", parse_tokenizer("bpe:300"), workers=2)
    n_parts = len(cut(find_inputs([str(source)])))
    reused = []
    for k, share in enumerate((0.0, 0.2, 0.5, 0.9, 1.0)):
        prefix = tmp_path / f"d{k}"
        job = start_job(source, prefix)
        folder = Path(f"{prefix}.parts")
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and job.poll() is None:
            done = len(list(folder.glob("0*.json")))
            if folder.exists() and done >= share * n_parts:
                break
            time.sleep(0.001)
        job.send_signal(signal.SIGKILL)
        job.wait()
        result = prepare([str(source)], prefix, parse_tokenizer("bpe:300"), workers=2)
        reused.append(result.parts_reused)
        for ending in (".bin", ".idx", ".tokenizer.json"):
            assert Path(f"{prefix}{ending}").read_bytes() == (tmp_path / f"whole{ending}").read_bytes()
        inspect(prefix)
        assert not folder.exists()
    assert max(reused) > 0.3 * n_parts


# each file once by default, in turn over another data set and where there is none
@pytest.mark.parametrize(
    ("step", "over_another"),
    [
        pytest.param(step, over, marks=[pytest.mark.slow] * (step % 2 != over))
        for step in range(5)
        for over in (False, True)
    ],
)
def test_stopped_while_publishing(tmp_path, monkeypatch, step, over_another):
    """Whichever file it is stopped before: nothing half is read as whole, and the same command finishes the job."""
    if over_another:
        prepare([str(write_jsonl(tmp_path / "old.jsonl", texts_of(30, seed=5)))], tmp_path / "d", ByteTokenizer())
    source = write_jsonl(tmp_path / "a.jsonl", texts_of(30))
    prepare([str(source)], tmp_path / "whole", parse_tokenizer("bpe:300"))
    written = []

    def stop(path, chunks, **fields):
        if path.parent == tmp_path or path.name == "publishing":
            if len(written) == step:
                (tmp_path / f".{path.name}.1.tmp").write_bytes(b"half")
                raise KeyboardInterrupt
            written.append(path.name)
        write_atomically(path, chunks, **fields)

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "write_atomically", stop)
        patch.setattr(manifest_module, "write_atomically", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare([str(source)], tmp_path / "d", parse_tokenizer("bpe:300"), overwrite=over_another)
    if over_another and written[1:]:
        with pytest.raises(DataError):
            inspect(tmp_path / "d")
    prepare([str(source)], tmp_path / "d", parse_tokenizer("bpe:300"), overwrite=over_another)
    for ending in (".bin", ".idx", ".tokenizer.json"):
        assert (tmp_path / f"d{ending}").read_bytes() == (tmp_path / f"whole{ending}").read_bytes()
    assert inspect(tmp_path / "d").documents == 30
    assert not list(tmp_path.glob(".d.*.tmp"))


def test_a_damaged_part_is_made_again(tmp_path, small_parts):
    source = write_jsonl(tmp_path / "a.jsonl", texts_of(200))

    def stop(now: JobProgress) -> None:
        if now.stage == "files":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([str(source)], tmp_path / "d", ByteTokenizer(), progress=stop)
    n_parts = len(list((tmp_path / "d.parts").glob("*.bin")))
    assert n_parts > 3
    victim = tmp_path / "d.parts" / "000001.bin"
    data = bytearray(victim.read_bytes())
    data[10] ^= 1
    victim.write_bytes(data)
    (tmp_path / "d.parts" / "000002.len").write_bytes(b"")
    (tmp_path / "d.parts" / "000003.bad").write_bytes(b"[]")
    prepared = prepare([str(source)], tmp_path / "d", ByteTokenizer())
    assert prepared.parts_reused == n_parts - 2
    assert documents_of(tmp_path / "d") == texts_of(200)


@pytest.mark.parametrize("stage", ["lines", "tokens"])
def test_a_dead_worker_is_an_error(tmp_path, small_parts, monkeypatch, stage):
    source = write_jsonl(tmp_path / "a.jsonl", texts_of(2000))
    started = []

    class Worker(workers_module._Worker):
        def __init__(self, *args):
            super().__init__(*args)
            started.append(self.process)

    monkeypatch.setattr(workers_module, "_Worker", Worker)

    def kill_one(progress: JobProgress) -> None:
        if progress.stage == stage and started:
            started[-1].kill()

    with pytest.raises(WorkerDied, match="was killed by SIGKILL at part"):
        prepare([str(source)], tmp_path / "d", ByteTokenizer(), workers=2, progress=kill_one)
    assert all(process.poll() is not None for process in started)
    assert not (tmp_path / "d.bin").exists()
    assert prepare([str(source)], tmp_path / "d", ByteTokenizer()).manifest.documents == 2000


def test_two_jobs_at_one_place(tmp_path, small_parts):
    source = write_jsonl(tmp_path / "a.jsonl", texts_of(2000))
    failures = []

    def second(progress: JobProgress) -> None:
        if not failures:
            with pytest.raises(WriteError, match="another `data prepare` writes here") as error:
                prepare([str(source)], tmp_path / "d", ByteTokenizer())
            failures.append(error)

    prepare([str(source)], tmp_path / "d", ByteTokenizer(), progress=second)
    assert len(failures) == 1


def test_an_input_that_changes_meanwhile(tmp_path, small_parts):
    source = write_jsonl(tmp_path / "a.jsonl", texts_of(300))

    def change(progress: JobProgress) -> None:
        os.utime(source, (1, 1))

    with pytest.raises(DataError, match="changed while it was read"):
        prepare([str(source)], tmp_path / "d", ByteTokenizer(), progress=change)


FULL_DISK = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
from megaspec.core.errors import WriteError
from megaspec.data.prepare import prepare
from megaspec.data.tokenizer import parse_tokenizer
try:
    prepare([sys.argv[1]], sys.argv[2], parse_tokenizer("byte"))
except WriteError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize("limit", [20_000, 300_000])
def test_a_full_disk_is_named_with_what_it_needs(tmp_path, limit):
    """The first limit stops a worker, the second the joined file (of three parts, 200 kB each)."""
    for k in range(3):
        (tmp_path / f"in{k}.txt").write_text("x" * 100_000)
    code = FULL_DISK.replace(
        "import resource", "from megaspec.data import inputs; inputs.SMALLEST_PART = 1000; import resource"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(tmp_path / "d"), str(limit)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 73, done.stderr
    assert "can't be written: File too large, need " in done.stdout
    assert ("d.bin" if limit == 300_000 else "d.parts/") in done.stdout
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    assert not (tmp_path / "d.bin").exists()
    # Here the input is cut into larger parts, so the finished ones of the same numbers cover something else.
    prepare([str(tmp_path)], tmp_path / "d", ByteTokenizer())
    assert documents_of(tmp_path / "d") == ["x" * 100_000] * 3


def test_a_tokenizer_without_eod(tmp_path):
    class NoEod(ByteTokenizer):
        eod = None

    source = write_jsonl(tmp_path / "a.jsonl", ["x"])
    with pytest.raises(DataError, match="--eod"):
        prepare([str(source)], tmp_path / "d", NoEod())
    prepare([str(source)], tmp_path / "d", NoEod(), append_eod=False)


def test_the_corpus_of_this_python(tmp_path, monkeypatch):
    """A part of it: topics and modules, docstrings before their source."""
    from megaspec.data import python_corpus

    units = python_corpus.units()
    assert len(units) > 400
    assert sum(unit.bytes for unit in units) > 5_000_000
    assert units == python_corpus.units.__wrapped__()
    some = (
        *[u for u in units if u.kind == "topic"][:3],
        *[u for u in units if u.name in ("json/__init__.py", "bisect.py")],
    )
    monkeypatch.setattr(python_corpus, "units", lambda: some)
    prepared = prepare(["python"], tmp_path / "d", ByteTokenizer())
    assert prepared.manifest.documents == 7
    texts = documents_of(tmp_path / "d")
    at = next(i for i, text in enumerate(texts) if text.startswith('"""Bisection'))
    assert texts[at - 1].startswith("Bisection algorithms.\n\nInsert item x in list a")
