"""`megaspec completion`: what a line may become, asked directly, through bash's own functions and at bash's prompt."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megaspec.cli import COMMANDS as COMMAND_FILES
from megaspec.cli import main, parse
from megaspec.commands.completion import COMMANDS, HOMES, SCRIPTS, complete
from megaspec.compose.search_path import SearchPath
from megaspec.recipe import SECTIONS
from megaspec.resolve.gather import RUNS
from megaspec.run_folder import SPEC
from megaspec.sweep.multirun import SWEEPS
from megaspec.sweep.state import HEAD
from tests.pace import within

ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join(str(ROOT / p) for p in ("", "kernels", "launchers"))
BASH = shutil.which("bash")


@pytest.fixture
def shell(tmp_path):
    """An environment in which `megaspec` is a command, and the script."""
    command = tmp_path / "bin" / "megaspec"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nPYTHONPATH={PATHS} exec {sys.executable} -P -m megaspec "$@"\n')
    command.chmod(0o755)
    (tmp_path / "script").write_text(SCRIPTS["bash"])
    return {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}", "PS1": "$ ", "TERM": "dumb"}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("megaspec tr", ["train"]),
        ("megaspec train recipe=llama3_8b", ["recipe=llama3_8b", "recipe=llama3_8b_fp8", "recipe=llama3_8b_half"]),
        ("megaspec train recipe=hello optim.l", ["optim.lr="]),
        ("megaspec train recipe=hello optim.sch", ["optim.schedule."]),
        ("megaspec train optim.schedule.wsd", ["optim.schedule.wsd_decay=", "optim.schedule.wsd_decay_steps="]),
        ("megaspec plan optim.kind=ad", ["optim.kind=adamw"]),
        ("megaspec plan kernels.compile=", [f"kernels.compile={w}" for w in ("auto", "block", "none")]),
        ("megaspec plan precision=fp", [f"precision={p}" for p in ("fp16", "fp32", "fp64", "fp8")]),
        ("megaspec plan hardware=H", ["hardware=H100", "hardware=H200"]),
        ("megaspec plan log.tensorboard=", [f"log.tensorboard={w}" for w in ("auto", "false", "true")]),
        ("megaspec train -m precision=fp16,bf", ["precision=fp16,bf16"]),
        ("megaspec train -m sweep.k", ["sweep.keep_going=", "sweep.kind="]),
        ("megaspec train sweep.k", []),
        ("megaspec train ~data.bl", ["~data.blend"]),
        ("megaspec train --m", ["--multirun"]),
        ("megaspec train --config-dir ", []),
        ("megaspec train res", ["resume="]),
        ("megaspec plan --json recipe=hel", ["recipe=hello"]),
        ("megaspec resume runs/hello kernels=", ["kernels=auto", "kernels=reference"]),
        ("megaspec data ", ["fetch", "inspect", "prepare"]),
        ("megaspec data prepare --wor", ["--workers"]),
        ("megaspec explain train.st", ["train.steps"]),
        ("megaspec explain tp-h", ["tp-heads"]),
        ("megaspec explain optim.lr recipe=hel", ["recipe=hello"]),
        ("megaspec check llama2", ["llama2_13b", "llama2_7b"]),
        ("megaspec diff hello llama2_7", ["llama2_7b"]),
        ("megaspec schema opt", ["optim"]),
        ("megaspec completion ", ["bash", "zsh"]),
        ("megaspec nonsense x", []),
        ("megaspec train '\"", []),
    ],
)  # fmt: skip
def test_a_line_may_become(line, found):
    assert complete(line) == found


def test_all_commands_groups_and_recipes_are_offered():
    offered = complete("megaspec ")
    assert {one for one in COMMANDS if " " not in one} <= set(offered)
    assert set(complete("megaspec train ")) >= {f"{s}=" for s in ("recipe", *SECTIONS)} | {f"{s}." for s in SECTIONS}
    assert complete("megaspec train recipe=") == [f"recipe={name}" for name in SearchPath().choices("recipe")]


def test_folders_of_the_user_count(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text("defaults: [hello]\n")
    (tmp_path / "more" / "model").mkdir(parents=True)
    (tmp_path / "more" / "model" / "tiny.yaml").write_text("defaults: [hello]\n")
    assert complete("megaspec train recipe=mi") == ["recipe=mine", "recipe=mistral_7b", "recipe=mixtral_8x7b"]
    assert complete("megaspec train --config-dir more recipe=mine model=ti") == ["model=tiny"]
    assert complete("megaspec train --config-dir none recipe=mine model=ti") == []


def help_of(capsys, *words):
    with pytest.raises(SystemExit):
        parse([*words, "--help"])
    return capsys.readouterr().out


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A working folder with runs, a sweep and other things."""
    monkeypatch.chdir(tmp_path)
    for file in (
        "runs/hello/spec.json",
        "runs/hello-2/spec.json",
        "runs/hello/.room/spec.json",
        "runs/made/recipe.json",
        "runs/two words/spec.json",
        "far/hello/spec.json",
        "sweeps/lr/sweep.json",
        "sweeps/lr/03-lr-0.1/spec.json",
        "sweeps/lr/logs/03-lr-0.1.log",
    ):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).touch()


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("megaspec resume ", ["runs/hello", "runs/hello-2"]),
        ("megaspec resume runs/hello-", ["runs/hello-2"]),
        ("megaspec resume ./runs/hello-", ["./runs/hello-2"]),
        ("megaspec resume far/", ["far/hello"]),
        ("megaspec resume runs/hello/", []),
        ("megaspec resume nowhere/", []),
        ("megaspec resume sweeps/lr/", ["sweeps/lr/03-lr-0.1"]),
        ("megaspec resume --fork far/x runs/hello-", ["runs/hello-2"]),
        ("megaspec resume runs/hello rec", []),
        ("megaspec generate r", ["runs/hello", "runs/hello-2"]),
        ("megaspec generate runs/hello ", []),
        ("megaspec checkpoint ", ["average", "diff", "fetch", "inspect", "list", "save", "verify"]),
        ("megaspec checkpoint list runs/", ["runs/hello", "runs/hello-2"]),
        ("megaspec checkpoint verify ", ["runs/hello", "runs/hello-2"]),
        ("megaspec checkpoint verify runs/hello ", []),
        ("megaspec diff runs/hello runs/hello-", ["runs/hello-2"]),
        ("megaspec diff hello run", ["runs/hello", "runs/hello-2"]),
        ("megaspec check run", []),
        ("megaspec sweep ", ["resume", "show"]),
        ("megaspec sweep resume ", ["sweeps/lr"]),
        ("megaspec sweep show sw", ["sweeps/lr"]),
        ("megaspec sweep show sweeps/lr ", []),
        ("megaspec sweep resume sweeps/lr ", ["memory=", "sweep."]),
        ("megaspec sweep resume sweeps/lr sweep.s", ["sweep.slots="]),
        ("megaspec sweep resume sweeps/lr sweep.a", ["sweep.again="]),
        ("megaspec sweep resume sweeps/lr sweep.again=", ["sweep.again=failed", "sweep.again=unfinished"]),
        ("megaspec sweep resume sweeps/lr memory=", ["memory=check", "memory=ignore"]),
        ("megaspec train -m recipe=hello swee", ["sweep."]),
        ("megaspec train -m sweep.metric=v", ["sweep.metric=valid_loss"]),
    ],
)  # fmt: skip
def test_folders_of_runs_and_sweeps_are_found(line, found):
    assert complete(line) == found


def test_folders_are_where_and_what_commands_make():
    assert {SPEC: str(RUNS), HEAD: str(SWEEPS)} == HOMES


def test_the_table_is_what_the_parsers_take(capsys):
    top = help_of(capsys)
    listed = re.findall(r"^    ([a-z-]+)(?:  |$)", top, re.MULTILINE)
    assert set(COMMAND_FILES) <= set(listed)
    assert {one for one in COMMANDS if " " not in one} == set(listed)
    for name, known in COMMANDS.items():
        text = help_of(capsys, *name.split())
        flags = set(re.findall(r"(?:^  |, )(--[a-z][a-z-]*)", text, re.MULTILINE)) - {"--help"}
        assert flags == set(known.flags), name
        below = {one.partition(" ")[2] for one in COMMANDS if one.startswith(f"{name} ")}
        if below:
            assert below == set(re.findall(r"^    ([a-z]+)(?:  |$)", text, re.MULTILINE)), name


def test_it_is_quick_and_imports_neither_hydra_nor_torch():
    code = "import sys; sys.argv[1:] = ['_complete', 'megaspec train recipe=hel'];"
    code += "from megaspec.__main__ import main; main();"
    code += "heavy = {'hydra', 'omegaconf', 'torch', 'numpy', 'megaspec.cli', 'megaspec.compose.compose'};"
    code += "print(heavy & {*sys.modules})"
    # 0.2 s on an idle machine
    with within(0.6, children=True):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": PATHS}
        )
    assert done.stdout.splitlines() == ["recipe=hello", "set()"], done.stderr


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "found"),
    [
        # others differ in what complete() says, which is asked above
        pytest.param("megaspec tr", ["train"], marks=pytest.mark.slow),
        ("megaspec train recipe=llama3_8b_", ["llama3_8b_fp8", "llama3_8b_half"]),
        ("megaspec train recipe=hello parallelism.tp", ["parallelism.tp="]),
        pytest.param("megaspec plan optim.kind=sg", ["sgd"], marks=pytest.mark.slow),
    ],
)
def test_bash_runs_the_function(line, found, shell, tmp_path):
    script = (
        f'eval "$(megaspec completion bash)"; COMP_LINE="{line}"; COMP_POINT=${{#COMP_LINE}}; COMP_WORDS=(megaspec);'
    )
    script += '_megaspec_complete; printf "%s\\n" "${COMPREPLY[@]}"; complete -p megaspec'
    done = subprocess.run(
        [BASH, "--norc", "-c", script], capture_output=True, text=True, env=shell, cwd=tmp_path, timeout=60
    )
    *replies, spec = done.stdout.splitlines()
    assert replies == found, done.stderr
    assert spec == "complete -o default -F _megaspec_complete megaspec"


@pytest.mark.skipif(BASH is None, reason="needs bash")
def test_the_key_at_the_prompt_of_bash(shell, tmp_path):
    """As a user presses it: a recipe is completed with a space, a key without one."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [BASH, "--norc", "--noprofile", "-i"],
        stdin=follower, stdout=follower, stderr=follower, env=shell, cwd=tmp_path, start_new_session=True,
    )  # fmt: skip
    os.close(follower)
    try:
        os.write(leader, b"source ./script\n")
        os.write(leader, b"megaspec plan recipe=gpt3_175b_\tparallelism.pip\tsched\tzb_h\t")
        wanted = "megaspec plan recipe=gpt3_175b_128gpu parallelism.pipeline.schedule=zb_h1"
        seen, end = "", time.monotonic() + 30
        while wanted not in seen and time.monotonic() < end:
            if select.select([leader], [], [], 1)[0]:
                seen += os.read(leader, 4096).decode().replace("\r", "").replace("\a", "")
        assert wanted in seen
    finally:
        process.kill()
        process.wait()
        os.close(leader)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_reads_the_script(tmp_path):
    (tmp_path / "script").write_text(SCRIPTS["zsh"])
    subprocess.run(["zsh", "-n", str(tmp_path / "script")], check=True)


def test_the_scripts_are_printed(capsys):
    for name, script in SCRIPTS.items():
        assert main(["completion", name]) == 0
        assert capsys.readouterr().out == script
    assert main(["completion", "fish"]) == 64
