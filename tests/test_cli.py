"""The command line: what it prints, what it returns, and what it refuses."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from megaspec.checkpoint.folders import CHECKPOINTS
from megaspec.cli import COMMANDS, main, parse
from megaspec.commands import starting
from megaspec.core.errors import RecipeError
from megaspec.launcher.exit_file import read_exit
from megaspec.run_folder import is_run, make_folder, newest_step, read_run, write_run
from tests.warm import warm_command

ROOT = Path(__file__).parents[1]
PATH = os.pathsep.join(str(ROOT / p) for p in ("", "kernels", "launchers"))
TINY = (
    "recipe=hello",
    "data=synthetic",
    "~data.blend",
    "train.sample=null",
    "launcher.ranks=1",
    "model.n_layers=1",
    "data.seq_len=8",
    "train.steps=2",
    "train.global_batch=2",
    "train.eval_every=0",
    "optim.schedule.warmup_steps=0",
    "log.tensorboard=false",
    "log.console=quiet",
)


def test_every_file_of_a_command_is_reached():
    """By cli.py, or by the command that it is a part of."""
    reached = {module.__name__ for module in COMMANDS.values()}
    for module in COMMANDS.values():
        below = getattr(module, "COMMANDS", {}).values()
        reached |= {part.__name__ for part in below if isinstance(part, ModuleType)}
    for path in (ROOT / "megaspec" / "commands").glob("*.py"):
        if re.search("^def add_parser", path.read_text(), re.MULTILINE):
            assert f"megaspec.commands.{path.stem}" in reached, f"add {path.stem} to COMMANDS in megaspec/cli.py"


def tiny(*changes):
    """TINY with some of its words changed: a word may be given once."""
    keys = {word.partition("=")[0] for word in changes}
    return [*(word for word in TINY if word.partition("=")[0] not in keys), *changes]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("RANK", raising=False)


def test_plan_shows_the_essentials_without_data(capsys):
    assert main(["plan", "recipe=hello", "hardware=cpu", "train.global_batch=16", "train.steps=120"]) == 0
    out, err = capsys.readouterr()
    for line in (
        "world 2 = pp 1 · dp_replicate 1 · dp_shard 1 · cp 1 · tp 2",
        "16 sequences = micro 16 · accumulation 1 · dp 1; 4,096 tokens a step",
        "722,176 = embedding 32,896",
        "a token with causal attention",
        "Decided for you",
        "no GPU: as many ranks as heads and widths divide by",
    ):
        assert line in out, line
    assert "not ready to train: data.blend.0.prefix=data/hello" in err
    assert "make it with `megaspec data prepare python --out data/hello --tokenizer byte`" in err
    assert list(Path().iterdir()) == []


def test_hydra_and_numpy_are_loaded_by_commands_that_need_them_only():
    code = "import sys; from megaspec.cli import parse; parse(['checkpoint', 'list', 'x']);"
    code += "print(sorted({'hydra', 'omegaconf', 'numpy', 'torch'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=os.environ | {"PYTHONPATH": PATH}, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize(("command", "code"), [(["plan", "hardware=cpu"], 0), (["train", "parallelism.pp=2"], 64)])
def test_keys_that_a_choice_leaves_out_are_told(command, code, capsys):
    assert main([*command, *(word for word in TINY if word != "~data.blend")]) == code
    assert "left out: data.blend (recipes/hello.yaml:7): no key of data.kind=synthetic" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "required: COMMAND"),
        (["trian"], "trian: no command of megaspec; did you mean train"),
        (["data", "prepair"], "prepair: no command of megaspec data; did you mean prepare?"),
        (["frobnicate"], "choose from 'train', 'resume'"),
        (["train", "hello"], "hello is no setting; write recipe=hello"),
        (["train", "recipe=recipes/hello.yaml"], "recipe=recipes/hello.yaml does not exist; did you mean hello?"),
        (["train", "recipe=zzz"], "recipes of your own are looked for in /"),
        (["train", "--recipe", "hello"], "--recipe: unknown; settings have no dashes: recipe=VALUE"),
        (["resume"], "required: RUN\n"),
        (["sweep", "show", "nowhere"], "nowhere holds no sweep (no sweep.json); there is no such folder"),
        (["plan"], "recipe=NAME is missing; choose deepseek_v3, deepseek_v3_tp8_ep32, gemma2_2b"),
        (["plan", "recipe=hello", "recipe=hello"], "given more than once"),
        (["plan", "recipe=helo"], "recipe=helo does not exist; did you mean hello?"),
        (["plan", "recipe=hello", "--config-dri", "x"], "--config-dri: unknown; did you mean --config-dir?"),
        (["train", "--parallelism.tp=2", "recipe=hello"], "settings have no dashes: parallelism.tp=2"),
        (["train", "--steps=5", "recipe=hello"], "settings have no dashes: steps=5"),
        (["train", "recipe=hello", "resume=always"], "resume=always must be never or auto"),
        (["plan", "recipe=hello", "optim.lrr=1", "train.stpes=3"], "train.stpes=3: stpes is no key of train"),
        (["plan", "recipe=hello", "hardware=cpu", "parallelism.tp=3"], "parallelism.tp=3 must divide model.n_heads=4"),
        (["resume", "nowhere"], "nowhere holds no run (no spec.json); there is no such folder"),
        (["generate", "nowhere", "text"], "nowhere holds no run"),
        (["generate", "x", "y", "--tokens", "-1"], "--tokens=-1 must be at least 0"),
        (["generate", "x", "y", "--temperature", "nan"], "--temperature=nan must be at least 0, and finite"),
        (["generate", "x", "y", "--temperature", "inf"], "must be at least 0, and finite"),
        (["generate", "x", "y", "--top-p", "1.5"], "--top-p=1.5 must be above 0, and at most 1"),
        (["generate", "x", "y", "--min-p", "nan"], "--min-p=nan must be above 0"),
        (["generate", "x", "y", "--top-k", "0"], "--top-k=0 must be at least 1"),
        (["generate", "x", "y", "--top-k", "5", "--temperature", "0"], "--temperature=0 draws nothing"),
        (["generate", "x", "y", "--samples", "2", "--temperature", "0"], "--samples=2 are all the same"),
        (["generate", "x", "y", "--stop", ""], "--stop= is empty"),
        (["generate", "x", "y", "--batch", "0"], "--batch=0 must be at least 1"),
        (["generate", "x"], "there is nothing to go on from; give TEXT, or --prompts FILE"),
        (["generate", "x", "y", "--out", "nowhere/lines"], "there is no folder nowhere"),
        (["generate", "x", "\udcff"], "TEXT is not valid UTF-8"),
        (["plan", "recipe=hello", "-m", "optim.lr=1,2"], "-m: unknown; only `megaspec train` runs several points"),
        (["train", "recipe=hello", "--cfg", "job"], "--cfg: unknown; megaspec show prints"),
        (["checkpoint", "list", "x", "--fork"], "--fork: unknown"),
    ],
)
def test_mistakes_exit_64_without_a_traceback(arguments, words, capsys):
    assert main(arguments) == 64
    err = capsys.readouterr().err
    assert words in err
    assert "Traceback" not in err


def test_all_mistakes_of_a_recipe_stand_on_lines_of_their_own(capsys):
    main(["plan", "recipe=hello", "optim.lrr=1", "train.stpes=3"])
    err = capsys.readouterr().err
    assert err.splitlines() == [
        "megaspec:",
        "optim.lrr=1: lrr is no key when optim.kind=adamw; did you mean lr?   (command line)",
        "train.stpes=3: stpes is no key of train; did you mean steps?   (command line)",
    ]


def test_overrides_may_stand_anywhere():
    args = parse(["train", "a.b=1", "--config-dir", "x", "recipe=hello", "--config-dir", "y", "c=-2", "~d.e"])
    assert args.words == ["a.b=1", "recipe=hello", "c=-2", "~d.e"]
    assert args.config_dir == ["x", "y"]
    args = parse(["resume", "--fork", "new", "runs/x", "a=1", "b=2"])
    assert (str(args.run), args.words, args.fork) == ("runs/x", ["a=1", "b=2"], "new")
    with pytest.raises(RecipeError, match="unknown"):
        parse(["checkpoint", "list", "run", "more"])


@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_version_and_help(flag, capsys):
    with pytest.raises(SystemExit) as caught:
        main([flag])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("megaspec 0." if flag == "--version" else "usage: megaspec")
    if flag == "--help":
        for command in ("train", "plan", "resume", "generate", "data", "checkpoint"):
            assert re.search(rf"^ +{command}\b", out, re.MULTILINE)


@pytest.mark.parametrize("module", ["megaspec", "megaspec.cli"])
def test_a_terminal_of_few_letters_and_a_closed_one_show_no_traceback(module, tmp_path):
    environment = os.environ | {"PYTHONPATH": PATH, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    command = [sys.executable, "-P", "-m", module, "plan", "recipe=hello", "hardware=cpu"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "world 2 = pp 1 ? dp_replicate 1" in done.stdout
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 130


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("words", [("plan", "recipe=hello", "hardware=cpu"), ("schema",), ("explain", "train.steps")])
def test_a_full_disk_behind_the_output_shows_no_traceback(words, tmp_path):
    """Long output fails while it is written, short output when it is flushed."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "megaspec", *words],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": PATH},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.stderr == "megaspec: its output can't be written: No space left on device\n"
    assert done.returncode == 73


def test_missing_data_exits_65_and_makes_no_folder(capsys):
    assert main(["train", "recipe=hello"]) == 65
    assert "data.blend.0.prefix=data/hello" in capsys.readouterr().err
    assert list(Path().iterdir()) == []


def test_a_closed_pipe_and_ctrl_c_leave_no_traceback(monkeypatch, capsys):
    monkeypatch.setattr("megaspec.commands.planned.detect_target", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["plan", "recipe=hello"]) == 130
    assert "Traceback" not in capsys.readouterr().err
    command = f"{sys.executable} -P -m megaspec.cli plan recipe=hello | true"
    done = subprocess.run(command, shell=True, env=os.environ | {"PYTHONPATH": PATH}, capture_output=True, text=True)
    assert "Traceback" not in done.stderr


def test_a_run_whose_ranks_hung_is_told_how_it_goes_on(monkeypatch, capfd):
    monkeypatch.setattr("megaspec.commands.starting.launch", lambda *_, **__: 74)
    assert main(["train", *TINY, "name=hung"]) == 74
    assert "no step was saved yet; megaspec resume runs/hung goes on" in capfd.readouterr().err
    # a folder alone is no checkpoint
    (Path("runs/hung") / CHECKPOINTS / "step-00000007").mkdir(parents=True)
    assert main(["resume", "runs/hung", "train.steps=9"]) == 74
    assert "no good checkpoint is left; megaspec checkpoint verify runs/hung says why" in capfd.readouterr().err


@pytest.mark.usefixtures("warm_launches")
def test_a_run_trains_goes_on_and_forks(capfd):
    assert main(["train", *TINY, "name=one"]) == 0
    folder = Path("runs/one")
    assert is_run(folder)
    assert newest_step(folder) == 2
    first = read_run(folder)
    assert first.recipe["parallelism"]["tp"] == "auto"
    assert first.spec.parallelism.tp == 1

    assert main(["train", *TINY, "name=one", "run_dir=runs/one"]) == 64
    assert "holds a finished run; megaspec resume runs/one train.steps=N trains it" in capfd.readouterr().err
    assert main(["resume", "runs/one", "optim.lr=1"]) == 64
    assert "changes the experiment" in capfd.readouterr().err
    assert main(["resume", "runs/one", "run_dir=x"]) == 64
    assert "a run stays in its folder" in capfd.readouterr().err
    assert read_run(folder).spec == first.spec

    assert main(["resume", "runs/one", "train.steps=4"]) == 0
    longer = read_run(folder).spec
    assert (longer.segments, longer.optim.schedule.decay_steps, newest_step(folder)) == ((4, 4), 2, 4)
    assert main(["train", *tiny("name=one", "train.steps=5", "resume=auto")]) == 0
    assert (read_run(folder).spec.segments, newest_step(folder)) == ((4, 4, 2), 5)

    assert (
        main(["resume", "runs/one", "--fork", "two", "optim.lr=1e-3", "optim.schedule.min_lr=0", "train.steps=6"]) == 0
    )
    assert "runs/two starts from step 5 of runs/one" in capfd.readouterr().out
    two = read_run(Path("runs/two"))
    assert (two.spec.name, two.spec.run_dir, two.spec.optim.lr) == ("two", "runs/two", 1e-3)
    assert newest_step(Path("runs/two")) == 6
    assert read_run(folder).spec.optim.lr == 3e-3


@pytest.mark.usefixtures("warm_launches")
def test_a_finished_run_is_answered_at_once(capfd, monkeypatch):
    assert main(["train", *tiny("train.steps=1")]) == 0
    folder = Path("runs/hello")
    files = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    capfd.readouterr()
    # without torch, in a process of its own
    script = "import sys; from megaspec.cli import main; code = main(sys.argv[1:]); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", f"{script}; sys.exit(code)"]
    environment = os.environ | {"PYTHONPATH": PATH}
    for words in (["resume", "runs/hello"], ["train", *tiny("train.steps=1", "resume=auto")]):
        done = subprocess.run([*command, *words], env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        says = (
            "runs/hello is finished: all 1 steps are done; megaspec resume runs/hello train.steps=N trains it to step N"
        )
        assert done.stdout == f"{says}\n"
    assert read_exit(folder).code == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")} == files

    started = []
    monkeypatch.setattr(starting, "launch", lambda place, **_: started.append(place) or 0)
    # a second run of its name is another one, and says so
    assert main(["train", *tiny("train.steps=1")]) == 0
    says = "runs/hello holds a run of this name: this is another one, in runs/hello-2; megaspec resume runs/hello"
    assert says in capfd.readouterr().out
    # all steps are saved, but the start before did not end well: ranks write what is missing
    (folder / "exit_code.json").unlink()
    assert main(["resume", "runs/hello"]) == 0
    # and there is more to do
    assert main(["resume", "runs/hello", "train.steps=2"]) == 0
    assert started == ["runs/hello-2", "runs/hello", "runs/hello"]


@pytest.mark.usefixtures("warm_launches")
def test_a_new_run_never_takes_a_folder_that_is_used(capfd):
    Path("runs/hello").mkdir(parents=True)
    Path("runs/hello/notes.txt").write_text("mine")
    assert main(["train", *TINY, "run_dir=runs/hello"]) == 64
    assert "exists and is not empty" in capfd.readouterr().err
    assert main(["train", *TINY]) == 0
    assert is_run(Path("runs/hello-2"))
    assert sorted(p.name for p in Path("runs/hello").iterdir()) == ["notes.txt"]


@pytest.mark.usefixtures("warm_launches")
def test_resume_auto_starts_a_run_that_is_not_there_or_was_never_finished():
    unfinished = Path("runs/one")
    (unfinished / "lock").mkdir(parents=True)
    (unfinished / "recipe.json").write_text("{")
    assert main(["train", *TINY, "name=one", "resume=auto"]) == 0
    assert newest_step(unfinished) == 2
    told = read_exit(unfinished)
    assert (told.code, told.meaning, told.step) == (0, "done", 2)


@pytest.mark.parametrize(("is_under_way", "code"), [(True, 78), (False, 0)])
def test_resume_auto_of_a_run_that_another_job_made_meanwhile(is_under_way, code, monkeypatch, capfd):
    """Jobs that start at once all find no run. One makes it; the others hear who has it, or go on when it has ended."""
    resolve = starting.resolve
    others = []

    def other_job_is_faster(recipe, target, *rest, **more):
        spec = resolve(recipe, target, *rest, **more)
        make_folder(Path(spec.run_dir))
        write_run(Path(spec.run_dir), recipe, target, spec)
        if is_under_way:
            others.append(holder_of(spec.run_dir))
        return spec

    monkeypatch.setattr(starting, "resolve", other_job_is_faster)
    monkeypatch.setattr(starting, "launch", lambda *_, **__: 0)
    try:
        assert main(["train", *TINY, "name=one", "resume=auto"]) == code
        assert ("is in use by pid" in capfd.readouterr().err) == is_under_way
    finally:
        for other in others:
            other.kill()
            other.wait()


def test_a_damaged_run_folder_is_named(capfd):
    folder = Path("runs/bad")
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text("{}")
    nothing = '{"format_version": 2}'
    damages = (("{", "can't be read"), ("[]", "holds no object"), (nothing, "is damaged: name: Field required"))
    for text, words in damages:
        (folder / "spec.json").write_text(text)
        assert main(["resume", str(folder)]) == 64
        err = capfd.readouterr().err
        assert "runs/bad/spec.json" in err
        assert words in err


def holder_of(folder):
    """A process that has a run's lock."""
    program = (
        "import sys, time; from megaspec.checkpoint.lock import RunLock;"
        f"RunLock('{folder}').acquire(); print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": PATH}
    )
    assert holder.stdout.readline() == b"held\n"
    return holder


def test_a_second_job_on_the_same_run_is_refused_at_once(capfd):
    main(["train", *TINY, "name=one"])
    holder = holder_of("runs/one")
    try:
        capfd.readouterr()
        start = time.perf_counter()
        assert main(["resume", "runs/one", "train.steps=4"]) == 78
        # at once: nobody waits for the lock
        assert time.perf_counter() - start < 5
        assert f"pid {holder.pid}" in capfd.readouterr().err
        assert read_run(Path("runs/one")).spec.train.steps == 2
    finally:
        holder.kill()
        holder.wait()


def test_ranks_that_torchrun_started_train_one_run(tmp_path):
    words = " ".join(f"'{w}'" for w in tiny("launcher.ranks=auto", "run_dir=runs/world"))
    command = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 -m megaspec.cli train {words}"
    environment = os.environ | {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    run = read_run(Path("runs/world"))
    assert (run.spec.world_size, newest_step(run.folder)) == (2, 2)
    assert done.stdout.count("\ndecided  ") == 1
    # what torchrun tells a rank, and what it starts
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "job"}
    words = ["train", *tiny("launcher.ranks=auto", "run_dir=runs/other", "optim.lrr=1")]
    failing = warm_command(words, cwd=tmp_path, env=environment | place | store)
    assert failing.returncode == 64
    assert failing.stderr.count("did you mean lr?") == 1
    assert not Path("runs/other").exists()


def test_two_values_for_one_key_are_refused_and_the_same_word_twice_is_not(capsys):
    assert main(["plan", "recipe=hello", "optim.lr=1e-3", "+optim.lr=2e-3"]) == 64
    assert "optim.lr is set twice, optim.lr=1e-3 and +optim.lr=2e-3; keep one" in capsys.readouterr().err
    assert main(["plan", "recipe=hello", "optim.lr=1e-3", "optim.lr=1e-3"]) == 0


@pytest.mark.parametrize(
    ("words", "code", "exit_code"),
    [
        (["plan", "--json", "recipe=hello", "model.n_kv_heads=3"], "kv-heads", 64),
        (["plan", "recipe=hello", "model.dropout=2", "--json"], "key.type", 64),
        (["plan", "--json", "recipe=helo"], "choice.unknown", 64),
        (["plan", "--json", "--ranks", "x", "recipe=hello"], "", 64),
        (["tune", "--json", "recipe=hello", "gpus=0"], "choice.unknown", 64),
        (["tune", "--json", "recipe=llama3_1_405b", "gpus=8"], "tune-large", 64),
        (["diff", "--json", "hello", "helo"], "choice.unknown", 64),
    ],
)
def test_programs_read_errors_as_they_read_answers(words, code, exit_code, capsys):
    assert main(words) == exit_code
    said = capsys.readouterr()
    problem = json.loads(said.out)["problems"][-1 if code == "kv-heads" else 0]
    assert set(problem) == {"code", "key", "message", "origin"}
    assert problem["code"] == code
    assert problem["message"] in said.err


@pytest.mark.parametrize("words", [["resume"], ["report"]])
def test_room_that_is_kept_for_a_runs_files_is_no_run(words, tmp_path, monkeypatch, capsys):
    """A run's folder that has lost its spec.json, and one with runs in it."""
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/x5/.room", "many/.room", "many/mine", "whole", "whole/.room"):
        Path(folder).mkdir(parents=True)
        Path(folder, "spec.json").write_bytes(b"\0")
    hints = {
        "runs/x5": "give the folder that `megaspec train` named",
        "many": "give one of the runs in it: many/mine",
        "whole/.room": "did you mean whole?",
    }
    for folder, hint in hints.items():
        assert main([*words, folder]) == 64
        err = capsys.readouterr().err
        assert f"{folder} holds no run (no spec.json); {hint}" in err
        assert ".room" not in err.replace(f"{folder} holds", "")
