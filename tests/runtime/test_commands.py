"""train, resume, generate and plan on prepared text, in the folders that a user sees."""

import json
import random
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest

from megaspec import cli
from megaspec.checkpoint.comm import SoloComm
from megaspec.checkpoint.store import Store
from megaspec.commands import starting
from megaspec.data.loader import open_source
from megaspec.log.jsonl import read_metrics
from megaspec.run_folder import read_run
from megaspec_launchers.local import launch

RECIPE = """
defaults:
  - hello
model: {n_layers: 1, d_model: 32, n_heads: 2, n_kv_heads: 2, d_ffn: 64, dropout: 0.1}
data: {seq_len: 15, blend: [{prefix: text}], split: [9, 1, 0]}
train: {steps: 30, global_batch: 4, eval_every: 10, eval_samples: 5, sample: {prompt: "a", tokens: 20, temperature: 0}}
optim: {lr: 1e-2, schedule: {warmup_steps: 3, min_lr: 0}}
parallelism: {tp: 2}
launcher: {ranks: 2, timeout_seconds: 20}
log: {console: quiet, tensorboard: false}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a little text, prepared, and a recipe that takes several epochs of it."""
    folder = tmp_path_factory.mktemp("commands")
    rng = random.Random(3)
    words = ["abc", "bca", "cab"]
    lines = [json.dumps({"text": " ".join(rng.choices(words, k=rng.randint(3, 12)))}) for _ in range(20)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    (folder / "recipes").mkdir()
    (folder / "recipes" / "tiny.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert (
            cli.main(["data", "prepare", "text.jsonl", "--out", "text", "--tokenizer", "byte", "--workers", "1"]) == 0
        )
    return folder


@pytest.fixture
def megaspec(place, factory, monkeypatch):
    """Runs a command in the folder, with ranks of the factory."""
    monkeypatch.chdir(place)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(starting, "launch", partial(launch, factory=factory))
    return lambda *words: cli.main(list(words))


def sequences(run, count):
    """What the run's training order says now."""
    spec = read_run(run).spec
    source = open_source(
        spec.data, split="train", seed=spec.data.seed, segments=spec.segments, vocab_size=spec.model.vocab_size
    )
    assert len(source) == sum(spec.segments) >= count
    return [source.read(i).tokens.tolist() for i in range(count)]


def history(run):
    return read_metrics(run / "metrics.jsonl")


def weights(run):
    with Store(run).newest_good(SoloComm(), repair=False) as reader:
        return {n: reader.read(n).numpy().tobytes() for n in reader.names() if n.startswith("model/")}


def test_a_start_without_the_webhooks_address_leaves_nothing_behind(megaspec, capfd, monkeypatch):
    """So that the mended command trains in the folder that it names."""
    monkeypatch.delenv("TINY_HOOK", raising=False)
    hook = "log.webhook={url_variable: TINY_HOOK, events: []}"
    words = ("train", "recipe=tiny", "name=hooked", "train.steps=4", "train.eval_every=0", "train.sample=null")
    for more in ((), ("resume=auto",), ("--supervise",)):
        assert megaspec(*words, hook, *more) == 64
        assert "TINY_HOOK names an environment variable that is not set" in capfd.readouterr().err
        assert not Path("runs/hooked").exists()
    assert megaspec(*words) == 0
    before = Path("runs/hooked/spec.json").read_bytes()
    assert megaspec("resume", "runs/hooked", "train.steps=6", hook) == 64
    assert megaspec("resume", "runs/hooked", "train.steps=6", hook, "--fork", "forked") == 64
    assert Path("runs/hooked/spec.json").read_bytes() == before
    assert not Path("runs/forked").exists()


def test_a_longer_run_keeps_what_it_took_and_appends(megaspec, capfd):
    run = Path("runs/longer")
    assert megaspec("train", "recipe=tiny", "name=longer") == 0
    taken = sequences(run, 120)
    assert len({tuple(t) for t in taken}) < 120, "fewer than two epochs"
    assert megaspec("resume", str(run), "train.steps=50") == 0
    assert sequences(run, 120) == taken
    assert read_run(run).spec.segments == (120, 80)
    steps = [line for line in history(run) if line["event"] == "step"]
    assert [(s["step"], s["first_sample"], s["samples"]) for s in steps] == [
        (i + 1, 4 * i, 4 * i + 4) for i in range(50)
    ]
    assert [line["step"] for line in history(run) if line["event"] == "eval"] == [10, 20, 30, 40, 50]
    assert megaspec("resume", str(run), "train.steps=49") == 64
    assert "train.steps=49 must be at least the 50 that are done" in capfd.readouterr().err
    assert megaspec("resume", str(run), "train.global_batch=8") == 64
    assert "train.global_batch=8 changes the experiment" in capfd.readouterr().err
    assert megaspec("resume", str(run), "train.global_batch=8", "train.steps=60", "--fork", "wider") == 0
    assert "runs/wider starts from step 50" in capfd.readouterr().out
    wider = [line for line in history(Path("runs/wider")) if line["event"] == "step"]
    assert [(w["step"], w["first_sample"]) for w in wider] == [(51 + i, 200 + 8 * i) for i in range(10)]
    assert sequences(Path("runs/wider"), 200) == sequences(run, 200)
    assert megaspec("resume", str(run), "train.steps=40", "--fork", "shorter") == 64
    assert "train.steps=40 must be at least the 50 that are done" in capfd.readouterr().err
    assert not Path("runs/shorter").exists()


def test_another_layout_and_back(megaspec):
    """Stopped in between, moved to other ranks and back: the history of one run."""
    run = Path("runs/moved")
    assert megaspec("train", "recipe=tiny", "name=moved", "precision=fp64", "train.sample=null", "train.steps=10") == 0
    for layout, steps in ((1, 20), (2, 30)):
        assert megaspec("resume", str(run), f"parallelism.tp={layout}", f"train.steps={steps}") == 0
        assert read_run(run).spec.parallelism.dp_replicate == 2 // layout
    steps = [line for line in history(run) if line["event"] == "step"]
    assert [s["first_sample"] for s in steps] == [4 * i for i in range(30)]


def test_the_run_folder_says_what_the_run_was_made_with_and_no_secret(megaspec, monkeypatch):
    canary = "c4n4ry-t0k3n"
    monkeypatch.setenv("HF_TOKEN", canary)
    monkeypatch.setenv("WANDB_API_KEY", canary)
    monkeypatch.setattr("sys.argv", ["megaspec", "train", "recipe=tiny", f"--api-key={canary}", f"key={canary}"])
    assert (
        megaspec("train", "recipe=tiny", "name=record", "train.steps=4", "checkpoint.every=1", "checkpoint.keep=3") == 0
    )
    run = Path("runs/record")
    record = json.loads((run / "environment.json").read_text())
    assert record["command"][:3] == ["megaspec", "train", "recipe=tiny"]
    assert {"torch", "numpy", "safetensors"} <= record["versions"].keys()
    for file in run.rglob("*"):
        if file.is_file():
            assert canary.encode() not in file.read_bytes(), file
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [f"step-{s:08d}" for s in (2, 3, 4)]


def test_all_checkpoints_stay_where_the_recipe_says_so(megaspec, capfd):
    words = ("train", "recipe=tiny", "name=kept", "train.steps=4", "train.sample=null", "checkpoint.every=1")
    assert megaspec(*words, "checkpoint.keep=every") == 64
    assert "checkpoint.keep=every must be a whole number or all" in " ".join(capfd.readouterr().err.split())
    assert megaspec(*words, "checkpoint.keep=all") == 0
    folder = Path("runs/kept/checkpoints")
    assert sorted(p.name for p in folder.iterdir()) == [f"step-{s:08d}" for s in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("name", "words"),
    [("odd", ()), ("even", ("data.seq_len=16", "train.sample.tokens=90")), ("long", ("model.max_seq_len=77",))],
)
def test_generated_text_is_that_of_any_layout(name, words, megaspec, capfd):
    """Written by two ranks at the end of their run, and by one device afterwards."""
    assert megaspec("train", "recipe=tiny", f"name={name}", "precision=fp64", *words) == 0
    run = Path("runs") / name
    assert read_run(run).spec.parallelism.sequence_parallel == (name == "even")
    (sample,) = [line for line in history(run) if line["event"] == "sample"]
    assert len(sample["text"]) > 5
    for more in ([], ["parallelism.tp=1"]):
        capfd.readouterr()
        tokens = str(read_run(run).spec.train.sample.tokens)
        assert megaspec("generate", str(run), "a", "--tokens", tokens, "--temperature", "0") == 0
        assert capfd.readouterr().out == f"a{sample['text']}\n"
        assert megaspec("resume", str(run), *more) == 0
        assert [line["text"] for line in history(run) if line["event"] == "sample"][-1] == sample["text"]


def test_generate_says_what_is_missing(megaspec, capfd):
    def said(*words):
        capfd.readouterr()
        code = megaspec("generate", *words)
        err = capfd.readouterr().err
        assert "Traceback" not in err
        return code, err

    code, err = said("runs/none", "a")
    assert code == 64
    assert "runs/none holds no run" in err
    made_up = (
        "data=synthetic",
        "~data.blend",
        "~data.split",
        "train.sample=null",
        "train.steps=4",
        "train.eval_every=0",
    )
    assert megaspec("train", "recipe=tiny", "name=made-up", *made_up) == 0
    code, err = said("runs/made-up", "a")
    assert code == 65
    assert "data.kind=synthetic has no tokenizer" in err
    assert megaspec("train", "recipe=tiny", "name=empty", "train.steps=4", "checkpoint.every=2") == 0
    code, err = said("runs/empty", "a", "--step", "3")
    assert code == 66
    assert "--step 3: runs/empty has checkpoints of 2, 4" in err
    texts = []
    for step in ("2", "4"):
        capfd.readouterr()
        assert megaspec("generate", "runs/empty", "a", "--step", step, "--tokens", "9", "--json") == 0
        texts.append(json.loads(capfd.readouterr().out)["text"])
    assert texts[0] != texts[1]
    for path in Path("runs/empty/checkpoints").iterdir():
        path.rename(path.parents[1] / path.name)
    code, err = said("runs/empty", "a")
    assert code == 66
    assert "no checkpoint was saved there yet" in err
    capfd.readouterr()
    asked = [*(w for w in made_up if not w.startswith("train.sample=")), "train.sample={prompt: a}"]
    assert megaspec("train", "recipe=tiny", *asked) == 64
    assert "train.sample needs a tokenizer, data.kind=synthetic has none" in capfd.readouterr().err


def test_the_same_numbers_with_deterministic_operations(megaspec):
    for name in ("one", "two"):
        assert megaspec("train", "recipe=tiny", f"name={name}", "train=deterministic", "train.steps=6") == 0
    assert weights(Path("runs/one")) == weights(Path("runs/two"))


def test_a_checkpoint_that_is_passed_over_and_a_run_that_is_done_are_told(megaspec, capfd):
    assert megaspec("train", "recipe=tiny", "name=bent", "train.steps=4", "checkpoint.every=2") == 0
    capfd.readouterr()
    assert megaspec("resume", "runs/bent") == 0
    said = capfd.readouterr().out
    assert said.startswith("runs/bent is finished: all 4 steps are done; megaspec resume runs/bent train.steps=N")
    shard = next(Path("runs/bent/checkpoints/step-00000004").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    for words in (("generate", "runs/bent", "a", "--tokens", "2"), ("resume", "runs/bent", "train.steps=5")):
        capfd.readouterr()
        assert megaspec(*words) == 0
        err = capfd.readouterr().err
        assert "a checkpoint is not good: step-00000004" in err
        assert "crc32 expected" in err
        assert "step 2 is the newest good one" in err


def test_a_run_that_is_done_does_what_it_is_asked_for_now(megaspec, capfd):
    first = ("train.steps=2", "train.eval_every=0", "train.sample=null", "optim.schedule.warmup_steps=1")
    assert megaspec("train", "recipe=tiny", "name=more", *first) == 0
    asked = (("train.eval_every=2", "eval"), ("train.sample={prompt: a, tokens: 3}", "sample"))
    for word, event in asked:
        assert event not in [line["event"] for line in history(Path("runs/more"))]
        assert megaspec("resume", "runs/more", word) == 0
        assert [line["step"] for line in history(Path("runs/more")) if line["event"] == event] == [2]
    capfd.readouterr()
    assert megaspec("resume", "runs/more", "log.every=3") == 0
    assert "runs/more is finished: all 2 steps are done" in capfd.readouterr().out


def test_another_runs_checkpoint_is_neither_written_from_nor_forked(megaspec, capfd):
    for name, seed in (("mine", 1), ("theirs", 2)):
        steps = ("train.steps=4", "optim.schedule.decay_steps=4") if name == "mine" else ("train.steps=6",)
        assert megaspec("train", "recipe=tiny", f"name={name}", f"train.seed={seed}", *steps) == 0
    foreign = "checkpoints/step-00000006"
    shutil.copytree(Path("runs/theirs") / foreign, Path("runs/mine") / foreign)
    assert megaspec("checkpoint", "verify", "runs/mine") == 66
    out = capfd.readouterr().out
    assert [line.split()[-1] for line in out.splitlines() if line.split()[:1] in (["6"], ["4"])] == ["BAD", "good"]
    for words in (("generate", "runs/mine", "a", "--tokens", "2"), ("resume", "runs/mine", "--fork", "forked")):
        assert megaspec(*words) == 0
        err = capfd.readouterr().err
        assert "it is a checkpoint of another run, runs/theirs: " in err
        assert "train.seed=2 (this run: 1)" in err
    assert (Path("runs/mine") / foreign).is_dir(), "looking moves nothing"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


SHORT = ("recipe=tiny", "train.steps=4", "train.eval_every=0", "train.sample=null", "checkpoint.every=2")


ALONE = ("parallelism.tp=1", "launcher.ranks=1")
FP8 = ("precision=fp8", "precision.recipe=delayed", "precision.first_layers_bf16=0", "precision.last_layers_bf16=0")
DELAYED = (*SHORT, *ALONE, "data.seq_len=16", *FP8, "precision.amax_history=4")
STAYS = "what delayed scales remember there stays behind"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("precision.recipe=tensorwise", f"precision.recipe=tensorwise fits scales to the elements at hand; {STAYS}\n"),
        ("precision=bf16", f"; {STAYS}\n"),
    ],
)
def test_a_fork_of_delayed_scales_takes_another_recipe(megaspec, capfd, word, said):
    """It is told what of the run it has no use for, goes on from its own checkpoint, and finds its history again."""
    name = word.partition("=")[2]
    assert megaspec("train", *DELAYED, f"name=delayed-{name}") == 0
    assert megaspec("resume", f"runs/delayed-{name}", word) == 64
    assert "changes the experiment" in capfd.readouterr().err
    assert megaspec("resume", f"runs/delayed-{name}", "--fork", name, word, "train.steps=6") == 0
    out = capfd.readouterr().out
    assert said in out
    assert ("precision.amax_history=4 is not read: " in out) == (name == "tensorwise")
    with Store(Path("runs", name)).newest_good(SoloComm(), repair=False) as reader:
        assert not [stored for stored in reader.names() if stored.startswith("fp8/")]
    assert megaspec("resume", f"runs/{name}", "train.steps=8") == 0
    capfd.readouterr()
    assert megaspec("resume", f"runs/{name}", "--fork", f"{name}-slower", "optim.lr=1e-4", "train.steps=10") == 0
    # there is nothing left to stay behind
    assert STAYS not in capfd.readouterr().out
    assert megaspec("resume", f"runs/{name}", "--fork", f"{name}-back", *FP8, "train.steps=10") == 0
    told = capfd.readouterr()
    assert "delayed scales begin anew" in told.err
    assert STAYS not in told.out


def test_a_fork_that_keeps_delayed_scales_goes_on_with_them(megaspec, capfd):
    assert megaspec("train", *DELAYED, "name=delayed") == 0
    assert megaspec("resume", "runs/delayed", "--fork", "slower", "optim.lr=1e-4", "train.steps=6") == 0
    told = capfd.readouterr()
    assert "begin anew" not in told.err
    assert STAYS not in told.out
    assert "is not read" not in told.out


def test_a_place_for_copies_is_one_runs(megaspec, capfd):
    copies = Path("copies").resolve()
    there = f"checkpoint.copy_to=file://{copies}"
    assert megaspec("train", *SHORT, "name=first", there) == 0
    before = contents(copies)
    # another one, the same anew, and a fork with the recipe of the first
    refused = {
        "runs/second": ("train", *SHORT, "name=second", "train.seed=5", there),
        "runs/first-2": ("train", *SHORT, "name=first", there),
        "runs/child": ("resume", "runs/first", "--fork", "child", "optim.lr=1e-3", "train.steps=6"),
    }
    capfd.readouterr()
    for run, words in refused.items():
        assert megaspec(*words) == 73
        said = capfd.readouterr().err
        assert f"{there} holds copies of " in said
        assert not Path(run).exists()
    assert contents(copies) == before
    assert megaspec(*refused["runs/child"], f"{there}/child") == 0
    # the run is lost, and goes on from its copies
    shutil.rmtree("runs/first")
    assert megaspec("checkpoint", "fetch", f"file://{copies}", "--out", "runs/back") == 0
    assert megaspec("resume", "runs/back", "train.steps=6") == 0
    assert sorted(path.name for path in (copies / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]


def test_a_copy_is_not_brought_beside_the_spec_of_another_run(megaspec, capfd):
    """As runs of an earlier version left them, which wrote over each other's."""
    copies = Path("mixed").resolve()
    for name, seed in (("left", 5), ("right", 6)):
        words = (f"name={name}", f"train.seed={seed}", f"checkpoint.copy_to=file://{copies}/{name}")
        assert megaspec("train", *SHORT, *words) == 0
    left = copies / "left"
    shutil.rmtree(left / "checkpoints" / "step-00000004")
    shutil.copytree(copies / "right" / "checkpoints" / "step-00000004", left / "checkpoints" / "step-00000004")
    capfd.readouterr()
    assert megaspec("checkpoint", "fetch", f"file://{left}", "--out", "runs/mix") == 66
    said = capfd.readouterr().err
    assert f"step 4 of file://{left} is of right (runs/right), and file://{left}/spec.json of left: name=right" in said
    assert not Path("runs/mix/checkpoints").exists()
    # its own is brought
    assert megaspec("checkpoint", "fetch", f"file://{left}", "--step", "2", "--out", "runs/mix") == 0
    # and none beside the spec.json of a folder that is there
    assert megaspec("checkpoint", "fetch", f"file://{copies}/right", "--out", "runs/mix") == 66
    assert "runs/mix/spec.json of left" in capfd.readouterr().err
    assert [path.name for path in Path("runs/mix/checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("key", ["copy_to", "fallback_dir"])
def test_nothing_is_saved_or_copied_into_the_folder_of_a_run(key, megaspec, capfd):
    here = Path().resolve()
    prefix = "file://" if key == "copy_to" else ""
    one = f"one-{key}"
    assert megaspec("train", *SHORT, f"name={one}") == 0
    before = contents(Path("runs", one))
    link = here / f"link-{key}"
    link.symlink_to(here / "runs")
    own = f"is in run_dir=runs/mine-{key}, the run's own folder"
    another = f"is in {here}/runs/{one}, the folder of another run"
    places = {
        here / f"runs/mine-{key}": own,
        here / f"runs/other/../mine-{key}/checkpoints/copies": own,
        # what only the disk tells
        link / f"mine-{key}/copies": own,
        here / "runs" / one: another,
        here / "runs" / one / "checkpoints": another,
        link / one / "checkpoints" / "step-00000004": another,
    }
    capfd.readouterr()
    for place, said in places.items():
        word = f"checkpoint.{key}={prefix}{place}"
        assert megaspec("train", *SHORT, f"name=mine-{key}", word) == 64
        assert f"{word} {said}" in capfd.readouterr().err
        assert not Path(f"runs/mine-{key}").exists()
    assert contents(Path("runs", one)) == before
    # what the paths alone tell is told by a plan
    word = f"checkpoint.{key}={prefix}{here}/runs/mine-{key}/copies"
    assert megaspec("plan", *SHORT, f"name=mine-{key}", word) == 64
    assert own in capfd.readouterr().err
    assert megaspec("resume", f"runs/{one}", "train.steps=6", f"checkpoint.{key}={prefix}{here}/runs/{one}/x") == 64
    assert f"is in run_dir=runs/{one}, the run's own folder" in capfd.readouterr().err
    # beside a run, and below where another one copies to
    assert megaspec("train", *SHORT, f"name=mine-{key}", f"checkpoint.{key}={prefix}{here}/runs/beside-{key}") == 0
    if key == "copy_to":
        assert megaspec("train", *SHORT, "name=next", f"checkpoint.{key}={prefix}{here}/runs/beside-{key}/next") == 0


def test_a_place_for_copies_that_nothing_reaches_is_told_before_a_rank_starts(megaspec, monkeypatch, capfd):
    monkeypatch.setattr(starting, "launch", None)
    word = "checkpoint.copy_to=foo://bucket/run"
    for command in ("plan", "train"):
        assert megaspec(command, *SHORT, "name=far", word) == 64
        assert f"{word}: foo:// is no scheme that fsspec knows; try s3://" in capfd.readouterr().err
    word = "checkpoint.copy_to=memory://copies"
    assert megaspec("plan", *SHORT, "name=far", word) == 64
    assert f"{word}: memory:// is that of one process, and gone with it; try s3://" in capfd.readouterr().err
    # known, and its package is not there; a plan may be made where the run is not
    word = "checkpoint.copy_to=gs://bucket/run"
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert megaspec("plan", *SHORT, "name=far", word) == 0
    assert megaspec("train", *SHORT, "name=far", word) == 64
    assert f"{word}: gs:// needs a package that is not installed" in capfd.readouterr().err
    assert not Path("runs/far").exists()
