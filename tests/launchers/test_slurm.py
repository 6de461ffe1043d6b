"""Batch jobs of SLURM: the text, what the shell makes of it, and what it starts."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megaspec.cli import main
from megaspec.core.errors import RecipeError
from megaspec.launcher.exit_file import read_exit
from megaspec.launcher.suspects import read_avoided
from megaspec.log.jsonl import read_metrics
from megaspec_launchers import slurm
from megaspec_launchers.recipe_file import NAME, recipe_of_job
from tests.faults.test_supervise import assert_same_course
from tests.launchers.jobs import ON_CPU, SLURM, slurm_environment, spec_of, with_fields, write_program, write_slurm

GOLDEN = Path(__file__).parents[1] / "golden" / "jobs"
CONTAINER = "launcher.container={image: 'nvcr.io#nvidia/pytorch:26.06-py3', mounts: [{source: /data, read_only: true}]}"
APPTAINER = "launcher.container={runtime: apptainer, image: /images/megaspec.sif}"
EVERYTHING = (
    "launcher.account=team",
    "launcher.partition=gpu",
    "launcher.qos=high",
    "launcher.constraint='hbm&ib'",
    "launcher.reservation=night",
    "launcher.gres=gpu:h100",
    "launcher.cpus_per_node=96",
    "launcher.time=2-00:00:00",
    "launcher.modules=[cuda/13.0, nccl]",
    "launcher.env={NCCL_SOCKET_IFNAME: ib0}",
    "launcher.exclusive=false",
)
# Layouts for two nodes and for one, none for three.
FEWER = (
    "launcher.nodes=4",
    "launcher.min_nodes=1",
    "launcher.layouts=[['parallelism.dp_replicate=16','launcher.ranks=16'],['parallelism.dp_replicate=8','launcher.ranks=8']]",
)
JOBS = {
    "slurm": SLURM,
    "slurm-everything": (*SLURM, *EVERYTHING, CONTAINER, "run_dir=/scratch/runs/hello"),
    "slurm-apptainer": (*SLURM, APPTAINER),
    "slurm-cpu": (*SLURM, *ON_CPU),
    "slurm-fewer": (*SLURM, *FEWER),
}


def array() -> str:
    first = spec_of(*SLURM)
    return slurm.render_array([with_fields(first, run_dir=f"runs/{n}", optim__lr=n / 100) for n in (1, 2)], at_once=1)


@cache
def texts() -> dict[str, str]:
    made = {name: slurm.render(spec_of(*overrides)) for name, overrides in JOBS.items()}
    return made | {"slurm-array": array()}


@pytest.mark.parametrize("name", [*JOBS, "slurm-array"])
def test_text(name):
    """What is reviewed: `python -m tests.write_golden` writes it."""
    assert texts()[name] == (GOLDEN / f"{name}.sh").read_text()


@pytest.mark.parametrize("name", [*JOBS, "slurm-array"])
def test_the_shell_takes_the_text(name, tmp_path):
    text = texts()[name]
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    (tmp_path / "job.sh").write_text(text)
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, "--severity=style", "job.sh"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_options_say_what_the_spec_says():
    lines = slurm.render(spec_of(*JOBS["slurm-everything"])).splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    assert {"--nodes=2", "--ntasks-per-node=1", "--gres=gpu:h100:8", "--requeue", "--account=team"} <= set(options)
    assert "--exclusive" not in options
    # SLURM reads options up to the first command
    last = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(line.startswith("#") for line in lines[:last])
    # 120 s of grace and a minute before the limit
    assert "--signal=USR1@180" in options
    on_cpu = slurm.render(spec_of(*JOBS["slurm-cpu"]))
    assert "--gres" not in on_cpu


def test_runs_of_an_array_ask_for_the_same_nodes():
    with pytest.raises(RecipeError, match="run 2: the runs of a job array ask for the same nodes"):
        slurm.render_array([spec_of(*SLURM), spec_of(*SLURM, "launcher.nodes=1")])


# ---- quoting


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    return write_slurm(tmp_path_factory.mktemp("slurm") / "bin")


def run_script(text: str, programs: Path, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = slurm_environment(programs, **more)
    return subprocess.run(
        ["bash"], input=text, cwd=folder, env=environment, capture_output=True, text=True, errors="replace", timeout=200
    )


# whatever a file can hold but a null byte and halves of letters
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
NASTY = [
    "",
    " ",
    "a b",
    "$(touch x)",
    "`touch x`",
    "'",
    '"',
    "\\",
    "\n",
    "a\nEND-OF-RECIPE\nb",
    "é—字",
    "-n",
    "!!",
    "*",
    "~",
]
FIRST = {}


def plain_spec():
    if not FIRST:
        FIRST["spec"] = spec_of(*SLURM, *ON_CPU)
    return FIRST["spec"]


def assert_arrives(programs: Path, *, run_dir: str, variable: str, prompt: str, source: str) -> None:
    """What a task of the step is given is what the Spec says, to the letter; nothing else is executed."""
    spec = with_fields(
        plain_spec(),
        run_dir=run_dir,
        launcher__env={"NCCL_DEBUG": variable},
        train__sample={"prompt": prompt or "a", "tokens": 4},
        about__source=source,
    )
    text = slurm.render(spec)
    assert text.isascii()
    with tempfile.TemporaryDirectory() as folder:
        write_keeper = text.replace("\nsrun ", '\ncp -r "$job" kept\nsrun ', 1)
        done = run_script(write_keeper, programs, Path(folder), ONLY_DUMP="0")
        assert done.returncode == 0, done.stderr
        assert sorted(os.listdir(folder)) == ["kept"], "the script left something behind, or did what a text says"
        kept = Path(folder, "kept", "recipes", f"{NAME}.yaml").read_text(encoding="utf-8")
        assert kept == recipe_of_job(spec)
    said = json.loads((programs / "srun.json").read_text())
    assert f"--run-dir={run_dir}" in said["command"]
    assert said["environment"]["NCCL_DEBUG"] == variable
    assert len([word for word in said["command"] if word.startswith("--run-dir")]) == 1


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(run_dir=TEXTS, variable=TEXTS, prompt=TEXTS, source=TEXTS)
@example(run_dir="a b/$(touch x)", variable="'; touch x; '", prompt="END-OF-RECIPE", source="a\nEND-OF-RECIPE\nb")
def test_texts_arrive_unchanged(programs, run_dir, variable, prompt, source):
    assert_arrives(programs, run_dir=run_dir, variable=variable, prompt=prompt, source=source)


@pytest.mark.parametrize("nasty", NASTY)
def test_nasty_texts_arrive_unchanged(programs, nasty):
    assert_arrives(programs, run_dir=nasty, variable=nasty, prompt=nasty, source=nasty)


def test_half_a_letter_is_refused():
    with pytest.raises(RecipeError, match="holds half of a letter"):
        slurm.quoted("a\ud800")


@pytest.mark.parametrize(
    "word",
    ["launcher.account='a b'", "launcher.partition='x\\n#SBATCH --uid=0'", "launcher.qos=$(id)", "launcher.qos=a;b"],
)
def test_options_that_are_no_words_are_refused(word, capsys):
    assert main(["train", "recipe=hello", *SLURM, word, "--print"]) == 64
    key = word.partition("=")[0]
    assert f"{key}=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "told"),
    [
        # SLURM would read gpu:8:8, or ask for eight of another thing
        ("launcher.gres=gpu:8", "launcher.gres=gpu:8 must name one kind of GPU and no count"),
        ("launcher.gres=gpu:h100:8", "set launcher.gres=gpu, or gpu:KIND"),
        ('launcher.gres="gpu:h100,nvme"', "launcher.gres=gpu:h100,nvme must name one kind"),
        ("launcher.time=1:75:00", "launcher.time=1:75:00 must be text that matches"),
        # of what --signal takes
        ("launcher.grace_seconds=70000", "launcher.grace_seconds=70000 must be at most 65475"),
    ],
)
def test_what_sbatch_would_refuse_or_misread_is_refused(word, told, capsys):
    assert main(["train", "recipe=hello", *SLURM, word, "--print"]) == 64
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("gres", ["gpu", "gpu:h100", "gpu:nvidia_h100_80gb_hbm3", "gpu:3090"])
def test_kinds_of_gpus(gres):
    assert f"#SBATCH --gres={gres}:8\n" in slurm.render(spec_of(*SLURM, f"launcher.gres={gres}"))


CANARY = "canary7f3a"


@pytest.mark.parametrize(
    ("variable", "told"),
    [
        *((name, "names a secret") for name in ("HF_TOKEN", "WANDB_APIKEY", "GITHUB_PAT", "SSHPASS", "PGPASSWORD")),
        *((name, "names a secret") for name in ("REGISTRY_AUTH", "MYSQL_PWD", "AWS_ACCESS_KEY_ID", "ACI_JWT")),
        *((name, "load code") for name in ("CC", "CUDA_HOME", "CUDA_INJECTION64_LIB", "TRITON_CACHE_DIR", "PS4")),
        *((name, "load code") for name in ("BASH_ENV", "NVCC_PREPEND_FLAGS", "NCCL_NET_PLUGIN", "GIT_SSH_COMMAND")),
        ("MEGASPEC_FAULT", "is set by the job itself"),
    ],
)
def test_variables_that_a_recipe_may_not_set(variable, told, capsys):
    assert main(["train", "recipe=hello", *SLURM, f"launcher.env={{{variable}: {CANARY}}}", "--print"]) == 64
    said = capsys.readouterr()
    assert f"launcher.env.{variable} " in said.err
    assert told in said.err
    assert CANARY not in said.err + said.out


@pytest.mark.parametrize("address", [f"http://me:{CANARY}@proxy:3128", f"postgres://{CANARY}@db/x"])
def test_addresses_with_users_are_refused(address, capsys):
    """They would stand in the recipe, spec.json and every job, which others read."""
    assert main(["train", "recipe=hello", *SLURM, f"launcher.env={{HTTPS_PROXY: '{address}'}}", "--print"]) == 64
    said = capsys.readouterr()
    assert "launcher.env.HTTPS_PROXY holds an address with a user or password" in said.err
    assert CANARY not in said.err + said.out


def test_variables_that_a_recipe_may_set():
    said = "{NCCL_IB_HCA: mlx5, HF_HOME: /data, OMP_NUM_THREADS: '4', TOKENIZERS_PARALLELISM: 'false', "
    said += "HTTPS_PROXY: 'http://proxy:3128', NCCL_IB_PKEY: '1', UCX_TLS: rc}"
    assert "export HTTPS_PROXY=http://proxy:3128" in slurm.render(spec_of(*SLURM, f"launcher.env={said}"))


def test_containers_see_the_run(programs, tmp_path):
    """The folder of the job, that of an absolute run_dir, and what the recipe mounts; a colon is refused."""
    place = tmp_path / "with space"
    place.mkdir()
    run_dir = str(tmp_path / "elsewhere" / "run")
    spec = with_fields(spec_of(*SLURM, *ON_CPU, CONTAINER), run_dir=run_dir)
    assert run_script(slurm.render(spec), programs, place, ONLY_DUMP="0").returncode == 0
    options = json.loads((programs / "srun.json").read_text())["options"]
    assert options["--container-image"] == "nvcr.io#nvidia/pytorch:26.06-py3"
    elsewhere = str(tmp_path / "elsewhere")
    assert options["--container-mounts"] == f"{place}:{place},{elsewhere}:{elsewhere},/data:/data:ro"
    assert options["--container-workdir"] == str(place)
    place = tmp_path / "with:colon"
    place.mkdir()
    done = run_script(slurm.render(spec), programs, place, ONLY_DUMP="0")
    assert done.returncode == 64
    assert "no container can mount a folder with a colon" in done.stderr
    spec = spec_of(*SLURM, *ON_CPU, APPTAINER)
    run_script(slurm.render(spec), programs, tmp_path, ONLY_DUMP="0")
    command = json.loads((programs / "srun.json").read_text())["command"]
    where = ["--pwd", str(tmp_path), "--bind", f"{tmp_path}:{tmp_path}", "/images/megaspec.sif", "python3"]
    assert command[:9] == ["apptainer", "exec", "--no-home", *where]


def test_modules_and_variables_reach_the_tasks(programs, tmp_path):
    """Where modules read variables that are not set, and where sbatch hands no environment on."""
    text = slurm.render(spec_of(*SLURM, *ON_CPU, "launcher.modules=[cuda/13.0, nccl]"))
    module = 'module() { test "$not_there" = ""; export MODULES="$*"; }\nexport -f module\n'
    done = run_script(module + text, programs, tmp_path, ONLY_DUMP="0")
    assert done.returncode == 0, done.stderr
    said = json.loads((programs / "srun.json").read_text())
    assert said["environment"]["MODULES"] == "load cuda/13.0 nccl"
    assert said["options"]["--export"] == "ALL"
    done = run_script("module() { return 1; }\n" + text, programs, tmp_path, ONLY_DUMP="0")
    assert done.returncode == 64


def test_ranks_of_several_nodes_share_a_secret(programs, tmp_path):
    """Made by each start of the job, readable by its user alone, and gone with it."""
    seen = set()
    for _ in range(2):
        text = slurm.render(plain_spec()).replace("\nsrun ", '\nstat -c %a "$job/secret"; cat "$job/secret"\nsrun ', 1)
        mode, secret = run_script(text, programs, tmp_path, ONLY_DUMP="0").stdout.splitlines()
        assert mode == "600"
        assert len(secret) == 64
        seen.add(secret)
        said = json.loads((programs / "srun.json").read_text())
        assert said["environment"]["MEGASPEC_RUN_SECRET_FILE"] == f"{tmp_path}/.megaspec-job-4711/secret"
    assert len(seen) == 2
    assert list(tmp_path.iterdir()) == []
    assert "secret" not in slurm.render(spec_of("launcher=slurm", *ON_CPU)).replace("/secrets", "")


# ---- how a job ends


@pytest.mark.parametrize(
    ("code", "restarts", "told", "requeued"),
    [
        (0, 0, 0, False),
        (75, 0, 75, True),
        (74, 3, 74, True),
        (75, 100, 75, False),
        (137, 0, 74, True),
        (1, 0, 70, False),
        (64, 0, 64, False),
        # no node has named a host
        (77, 0, 77, False),
    ],
)
def test_what_goes_back_into_the_queue(programs, tmp_path, code, restarts, told, requeued):
    (programs / "requeued").unlink(missing_ok=True)
    text = slurm.render(plain_spec())
    done = run_script(text, programs, tmp_path, ONLY_DUMP=str(code), SLURM_RESTART_COUNT=str(restarts))
    assert done.returncode == told
    assert (programs / "requeued").exists() == requeued
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("says", "requeued"),
    [
        ("Reason=None PreemptEligibleTime=2026-11-25T20:00:00 PreemptTime=None", False),
        ("Reason=TimeLimit PreemptTime=None", True),
        ("Reason=None PreemptTime=2026-11-25T20:00:00", True),
    ],
)
@pytest.mark.parametrize("code", [75, 143])
def test_a_job_that_is_cancelled_stays_ended(programs, tmp_path, code, says, requeued):
    """slurmctld requeues a job that is being cancelled where its script asks for that: `scancel` would be undone."""
    (programs / "requeued").unlink(missing_ok=True)
    text = slurm.render(plain_spec())
    done = run_script(text, programs, tmp_path, ONLY_DUMP=str(code), TELLS_THE_SHELL="1", JOB_SAYS=says)
    assert done.returncode == (75 if code == 75 else 74), done.stderr
    assert (programs / "requeued").exists() == requeued
    assert ("which stays ended" in done.stderr) != requeued


def test_a_task_of_an_array_trains_its_own_run(programs, tmp_path):
    for number in (1, 2):
        run_script(array(), programs, tmp_path, ONLY_DUMP="0", SLURM_ARRAY_TASK_ID=str(number))
        assert f"--run-dir=runs/{number}" in json.loads((programs / "srun.json").read_text())["command"]
    assert run_script(array(), programs, tmp_path, ONLY_DUMP="0", SLURM_ARRAY_TASK_ID="3").returncode == 64


# ---- hosts that are left out


def end_with(text: str, words: str, code: int) -> str:
    """The script with a step that is this, in place of srun."""
    before, step, after = re.split(r"\n( *srun )", text)
    indent = step.removesuffix("srun ")
    return f"{before}\n{indent}{words}\n{indent}code={code}\n{after.partition('code=$?')[2]}"


def said_of_hosts(*names: str, ended: str = "missed") -> str:
    """What nodes that all end leave in the job's folder."""
    listed = "".join(f"{name}\\n" for name in names)
    words = [f"""printf '{listed}' > "$job/left-out/$name\"""", f'echo {ended} > "$job/ended/$name"']
    return f'for name in $(cat "$job/hosts"); do {"; ".join(words)}; done'


@pytest.fixture
def slurm_here(tmp_path) -> tuple[Path, Path]:
    """Programs of a scheduler that has seen no job yet, and a folder to submit from."""
    (tmp_path / "here").mkdir()
    return write_slurm(tmp_path / "bin"), tmp_path / "here"


def excluded(programs: Path) -> list[str]:
    return (programs / "excluded").read_text().split()


@pytest.mark.parametrize("code", [74, 75, 77])
def test_hosts_are_left_out_as_the_job_goes_back(slurm_here, code):
    """And let in again once their line is deleted; what sbatch was told to exclude stays so."""
    programs, here = slurm_here
    text = slurm.render(plain_spec())
    script = end_with(text, said_of_hosts("127.0.0.2"), code)
    done = run_script(script, programs, here, EXCLUDED="old[1-2]")
    assert done.returncode == code, done.stderr
    assert (programs / "requeued").read_text().split() == ["4711"]
    assert excluded(programs) == ["old[1-2]", "127.0.0.2"]
    assert "left out: 127.0.0.2 (runs/hello/avoided.jsonl says why)" in done.stderr
    assert [path.name for path in here.iterdir()] == [".megaspec-job-4711.excluded"]
    # nothing new: SLURM keeps its list
    (programs / "refuses").touch()
    script = end_with(text, said_of_hosts("127.0.0.2"), 75)
    done = run_script(script, programs, here, EXCLUDED="old[1-2],127.0.0.2", SLURM_RESTART_COUNT="1")
    assert done.returncode == 75
    assert not (programs / "held").exists()
    (programs / "refuses").unlink()
    # no node had time to say anything: neither
    run_script(end_with(text, ":", 75), programs, here, SLURM_RESTART_COUNT="2")
    assert excluded(programs) == ["old[1-2]", "127.0.0.2"]
    run_script(end_with(text, said_of_hosts(), 75), programs, here, SLURM_RESTART_COUNT="3")
    assert excluded(programs) == ["old[1-2]"]
    # a job that is done leaves nothing
    run_script(end_with(text, said_of_hosts(), 0), programs, here, SLURM_RESTART_COUNT="4")
    assert list(here.iterdir()) == []


def test_where_slurm_leaves_no_host_out_the_job_is_held(slurm_here):
    programs, here = slurm_here
    (programs / "refuses").touch()
    text = slurm.render(plain_spec()).replace("sleep 1", "sleep 0")
    done = run_script(end_with(text, said_of_hosts("127.0.0.1"), 77), programs, here)
    assert done.returncode == 77
    assert (programs / "held").read_text().split() == ["4711"]
    assert "SLURM does not leave out 127.0.0.1: the job is held" in done.stderr
    assert "scontrol update JobId=4711 ExcNodeList=127.0.0.1\n  scontrol release 4711" in done.stderr
    assert excluded(programs) == []


@pytest.mark.parametrize("name", ["127.0.0.3", "elsewhere.example"])
def test_77_without_a_host_of_the_job_ends_it(slurm_here, name):
    """One that is left out already does not help, nor does one that the cluster does not have."""
    programs, here = slurm_here
    done = run_script(end_with(slurm.render(plain_spec()), said_of_hosts(name), 77), programs, here)
    assert done.returncode == 77
    assert "no host of the job can be named, which stays ended" in done.stderr
    assert not (programs / "requeued").exists()
    assert ("elsewhere.example of runs/hello/avoided.jsonl is no node" in done.stderr) == (name != "127.0.0.3")


def test_restarts_after_77_are_counted(slurm_here):
    programs, here = slurm_here
    script = end_with(slurm.render(plain_spec()), said_of_hosts("127.0.0.1"), 77)
    done = run_script(script, programs, here, SLURM_RESTART_COUNT="100")
    assert done.returncode == 77
    assert "after 100 restarts" in done.stderr
    assert not (programs / "requeued").exists()
    assert list(here.iterdir()) == []


def test_a_signal_that_ends_the_script_comes_too_late(slurm_here):
    """SLURM sends SIGTERM to all that the script has started as soon as the job is back in the queue."""
    programs, here = slurm_here
    scontrol = (programs / "scontrol").read_text()
    for case, signalled in (('"requeue "*)', "kill $PPID;"), ('"update JobId="*)', "kill $$")):
        assert case in scontrol
        scontrol = scontrol.replace(case, f"{case} {signalled}")
    write_program(programs / "scontrol", scontrol)
    done = run_script(end_with(slurm.render(plain_spec()), said_of_hosts("127.0.0.1"), 77), programs, here)
    assert done.returncode == 77
    assert excluded(programs) == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("without", "ended", "code", "lost"),
    [
        (["127.0.0.2"], "missed", 74, "4711-3 127.0.0.2"),
        # its ranks were killed: that is why the other one, whose ranks hang, was ended by srun
        (["127.0.0.2"], "failed", 74, None),
        (["127.0.0.2"], "stopped", 74, None),
        (["127.0.0.2"], "missed", 75, None),
        (["127.0.0.1", "127.0.0.2"], "missed", 74, None),
        ([], "missed", 74, None),
    ],
)
def test_a_host_that_leaves_no_word_is_lost(slurm_here, without, ended, code, lost):
    programs, here = slurm_here
    words = said_of_hosts(ended=ended) + "".join(f'; rm "$job"/*/{name}' for name in without)
    text = slurm.render(plain_spec())
    done = run_script(end_with(text, words, code), programs, here, SLURM_RESTART_COUNT="3")
    assert done.returncode == code
    assert ("was lost" in done.stderr) == (lost is not None)
    # the next start hears of it, and the one after that no more
    for restarts, expected in (("4", lost), ("5", None)):
        run_script(text, programs, here, ONLY_DUMP="75", SLURM_RESTART_COUNT=restarts)
        command = json.loads((programs / "srun.json").read_text())["command"]
        assert f"--lost={expected or ''}" in command
        assert f"--restarts={restarts}" in command


@pytest.mark.parametrize(("restarts", "goes_on"), [("4", True), ("3", False)])
def test_a_lost_node_is_counted_where_slurm_itself_requeues_the_job(slurm_here, restarts, goes_on):
    """It tells the script to end, as `scancel` does, and has counted the restart by then (seen of SLURM 22.05)."""
    programs, here = slurm_here
    says = {"JOB_SAYS": f"Reason=None\n   Requeue=1 Restarts={restarts} BatchFlag=1", "SLURM_RESTART_COUNT": "3"}
    (here / ".megaspec-job-4711.excluded").write_text("\nold1\n")
    # the signal reaches whatever the script has started, too: here while it looks who was lost
    killed = f'#!/bin/sh\ncase "$*" in *missed*) kill $$ ;; esac\nexec {shutil.which("grep")} "$@"\n'
    write_program(programs / "grep", killed)
    words = f'{said_of_hosts()}; rm "$job"/*/127.0.0.2; kill $$'
    done = run_script(end_with(slurm.render(plain_spec()), words, 74), programs, here, **says)
    assert done.returncode == 74, done.stderr
    assert ("SLURM itself puts the job back into the queue" in done.stderr) == goes_on
    assert ("which stays ended" in done.stderr) != goes_on
    assert not (programs / "requeued").exists()
    left = sorted(path.name for path in here.iterdir())
    assert left == ([".megaspec-job-4711.excluded", ".megaspec-job-4711.lost"] if goes_on else [])


# ---- fewer nodes than a job asks for

FOUR = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")


@cache
def fewer_text() -> str:
    layouts = [[f"parallelism.dp_replicate={ranks}", f"launcher.ranks={ranks}"] for ranks in (2, 1)]
    words = ("launcher=slurm", *ON_CPU, "launcher.nodes=4", "launcher.min_nodes=1", "train.global_batch=64")
    return slurm.render(with_fields(spec_of(*words), launcher__layouts=layouts))


def step_of(programs: Path) -> tuple[dict[str, str], list[str]]:
    """Options of the step, and the words that each node is given."""
    said = json.loads((programs / "srun.json").read_text())
    return said["options"], said["command"]


@pytest.fixture
def four_nodes(tmp_path) -> tuple[Path, Path]:
    """As `slurm_here`, in a cluster of four nodes, and in a folder with a space."""
    (tmp_path / "he re").mkdir()
    return write_slurm(tmp_path / "bin", FOUR), tmp_path / "he re"


@pytest.mark.parametrize(("given", "trains", "told"), [(4, 4, ""), (3, 2, "127.0.0.3"), (2, 2, ""), (1, 1, "")])
def test_a_start_trains_on_the_most_nodes_that_a_layout_fits(four_nodes, given, trains, told):
    programs, here = four_nodes
    done = run_script(fewer_text(), programs, here, ONLY_DUMP="0", NODES=str(given))
    assert done.returncode == 0, done.stderr
    options, command = step_of(programs)
    assert (options["--nodes"], options["--ntasks"]) == (str(trains), str(trains))
    assert options["--nodelist"] == ",".join(FOUR[:trains])
    assert f"--nodes={trains}" in command
    assert "--host=127.0.0.1" in command
    # the last one stays a node of several
    assert f"--job-dir={here}/.megaspec-job-4711" in command
    expected = ""
    if trains < 4:
        expected = f"megaspec: this start trains on {trains} of 4 nodes"
        if told:
            expected += f", idle are {told}"
        expected += "\n"
    assert done.stderr == expected


def test_a_range_of_nodes_is_asked_for_without_tasks():
    """SLURM 22.05 gives a job of `--nodes=1-3 --ntasks-per-node=1` one node where three are free: it makes a number
    of tasks of the fewest nodes, and gives nodes for those."""
    options = [line for line in fewer_text().splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --nodes=1-4" in options
    assert not [line for line in options if "ntasks" in line]
    assert " --ntasks-per-node=1 " in fewer_text().partition("srun ")[2]


def test_the_job_itself_leaves_out_a_host_where_slurm_does_not(four_nodes):
    """It is not held while the nodes that it is given are enough without it; SLURM is told again each time."""
    programs, here = four_nodes
    (programs / "refuses").touch()
    text = fewer_text().replace("sleep 1", "sleep 0")
    done = run_script(end_with(text, said_of_hosts("127.0.0.1"), 77), programs, here, NODES="4", EXCLUDED="old1")
    assert done.returncode == 77
    assert (programs / "requeued").exists()
    assert not (programs / "held").exists()
    assert "SLURM does not leave out 127.0.0.1: the job itself does" in done.stderr
    # three are left of four, and two train; none of them says anything new
    done = run_script(text, programs, here, ONLY_DUMP="75", NODES="4", SLURM_RESTART_COUNT="1")
    options, command = step_of(programs)
    assert options["--nodelist"] == "127.0.0.2,127.0.0.3"
    assert "--host=127.0.0.2" in command
    assert "trains on 2 of 4 nodes, idle are 127.0.0.1,127.0.0.4" in done.stderr
    assert not (programs / "held").exists()
    assert done.stderr.count("no longer pending") == 5, "SLURM is told again"
    # it gives none but this one
    done = run_script(text, programs, here, ONLY_DUMP="0", NODES="1", SLURM_RESTART_COUNT="2")
    assert done.returncode == 77
    assert "the run keeps away from all but 0 of 127.0.0.1, and launcher.min_nodes=1" in done.stderr
    assert (programs / "held").read_text().split() == ["4711"]
    assert "ExcNodeList=old1,127.0.0.1\n  scontrol release 4711" in done.stderr
    # and hears of it at last
    (programs / "refuses").unlink()
    (programs / "held").unlink()
    done = run_script(text, programs, here, ONLY_DUMP="0", NODES="1", SLURM_RESTART_COUNT="3")
    assert done.returncode == 77
    assert excluded(programs) == ["old1", "127.0.0.1"]
    assert not (programs / "held").exists()
    done = run_script(text, programs, here, ONLY_DUMP="0", NODES="1", SLURM_RESTART_COUNT="4")
    assert done.returncode == 0, done.stderr
    assert step_of(programs)[0]["--nodelist"] == "127.0.0.2"


def test_a_host_that_is_mended_trains_again_though_slurm_never_left_it_out(four_nodes):
    programs, here = four_nodes
    (programs / "refuses").touch()
    text = fewer_text().replace("sleep 1", "sleep 0")
    run_script(end_with(text, said_of_hosts("127.0.0.1"), 77), programs, here, NODES="4")
    # its line is gone when the nodes of the next start end
    run_script(end_with(text, said_of_hosts(), 75), programs, here, NODES="4", SLURM_RESTART_COUNT="1")
    done = run_script(text, programs, here, ONLY_DUMP="0", NODES="4", SLURM_RESTART_COUNT="2")
    assert done.returncode == 0, done.stderr
    assert step_of(programs)[0]["--nodelist"] == ",".join(FOUR)


def test_an_idle_node_is_not_lost(four_nodes):
    """It is no host of the step: nothing is written of it, and a suspicion can't name it."""
    programs, here = four_nodes
    done = run_script(end_with(fewer_text(), said_of_hosts(), 74), programs, here, NODES="3")
    assert "was lost" not in done.stderr
    done = run_script(end_with(fewer_text(), said_of_hosts("127.0.0.3"), 77), programs, here, NODES="3")
    assert "no host of the job can be named, which stays ended" in done.stderr


def test_runs_of_an_array_train_on_numbers_of_nodes_that_fit_them_all():
    words = ("launcher=slurm", *ON_CPU, "launcher.nodes=4", "launcher.min_nodes=1", "train.global_batch=64")
    specs = []
    for counts in ((3, 2, 1), (2, 1)):
        specs.append(with_fields(spec_of(*words), launcher__layouts=[[f"launcher.ranks={ranks}"] for ranks in counts]))
    text = slurm.render_array(specs)
    assert "#SBATCH --nodes=1-4\n" in text
    assert "\nfor count in 4 2 1; do\n" in text


# ---- the command


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path


def test_print_starts_and_writes_nothing(here, capsys, corpus):
    before = sorted(here.rglob("*"))
    assert main(["train", "recipe=hello", *SLURM, "--print"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("#!/bin/bash\n#SBATCH ")
    assert sorted(here.rglob("*")) == before


def test_layouts_are_checked_before_a_job_waits(here, capsys, corpus):
    words = ["launcher=slurm", "launcher.hardware=cpu", "launcher.ranks_per_node=2"]
    wrong = "launcher.layouts=[['parallelism.tp=2','parallelism.dp_replicate=1'],['parallelism.tp=3']]"
    for more in ([], ["-m", "optim.lr=1e-3,2e-3"]):
        assert main(["train", *more, "recipe=hello", *words, wrong, "--print"]) == 64
        said = capsys.readouterr().err
        assert "launcher.layouts.1: parallelism.tp=3 must divide model.n_heads=4" in said
        assert "launcher.layouts.0" not in said
    # the job holds what the first layout decided
    right = wrong.replace("parallelism.tp=3'", "parallelism.tp=1','parallelism.sequence_parallel=false'")
    assert main(["train", "recipe=hello", *words, right, "--print"]) == 0
    assert "layouts: [[parallelism.tp=2, parallelism.dp_replicate=1]" in capsys.readouterr().out
    for key in (right, "launcher.restarts.most=3"):
        assert main(["train", "recipe=hello", *words, "launcher.nodes=2", key, "--print"]) == 64
        assert "is read where a job has one node, whose ranks are supervised" in capsys.readouterr().err


def test_data_that_a_container_does_not_see_is_told(here, capsys, corpus, tmp_path_factory):
    """An absolute path, and a link out of the folder that is mounted: the job would wait, and then miss it."""
    elsewhere = tmp_path_factory.mktemp("else where")
    shutil.copytree(corpus, elsewhere / "data")
    (here / "link").symlink_to(elsewhere / "data")
    words = ["train", "recipe=hello", *SLURM, CONTAINER, "--print"]
    assert main(words) == 0
    for prefix in (elsewhere / "data" / "hello", "link/hello"):
        for more in ([], ["-m", "optim.lr=1e-3,2e-3"]):
            capsys.readouterr()
            assert main([*words, *more, f"data.blend=[{{prefix: '{prefix}'}}]"]) == 64
            said = capsys.readouterr().err
            assert f"data.blend.0.prefix={prefix} is in {elsewhere}/data, which the container does not see" in said
            assert f"launcher.container.mounts: {{source: {elsewhere}/data}}" in said
        mounted = CONTAINER.replace("/data,", f"'{elsewhere}',")
        words_mounted = [mounted if word == CONTAINER else word for word in words]
        assert main([*words_mounted, f"data.blend=[{{prefix: '{prefix}'}}]"]) == 0
        assert main([*(w for w in words if w != CONTAINER), f"data.blend=[{{prefix: '{prefix}'}}]"]) == 0


def test_without_sbatch_nothing_is_written(here, capsys, corpus, monkeypatch):
    monkeypatch.setenv("PATH", str(here))
    before = sorted(here.rglob("*"))
    assert main(["train", "recipe=hello", *SLURM]) == 64
    assert "needs sbatch, which can't be found; start it on a login node" in capsys.readouterr().err
    assert sorted(here.rglob("*")) == before


def test_what_is_submitted_is_what_is_printed(here, capsys, corpus, monkeypatch, programs):
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    assert main(["train", "recipe=hello", *SLURM, "--print"]) == 0
    printed = capsys.readouterr().out
    assert main(["train", "recipe=hello", *SLURM]) == 0
    assert "slurm: submitted 4711; the run is in runs/hello" in capsys.readouterr().out
    assert (programs / "job.sh").read_text() == printed


def test_what_the_command_line_says_of_memory_reaches_the_nodes(here, capsys, corpus):
    """The nodes would refuse the run again."""
    for words, is_said in ((["memory=ignore"], True), ([], False)):
        for first in ([], ["-m", "optim.lr=1e-3,2e-3"]):
            assert main(["train", *first, "recipe=hello", *SLURM, *words, "--print"]) == 0
            assert ("memory=ignore" in capsys.readouterr().out) == is_said


def test_a_job_that_sbatch_refuses_is_told(here, capsys, corpus, monkeypatch, tmp_path, programs):
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'sbatch: error: invalid account' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(program.parent), str(programs), os.environ["PATH"]]))
    assert main(["train", "recipe=hello", *SLURM]) == 64
    assert "sbatch refuses the job: sbatch: error: invalid account" in capsys.readouterr().err
    lost = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"
    program.write_text(f"#!/bin/sh\necho '{lost}' >&2\nexit 1\n")
    assert main(["train", "recipe=hello", *SLURM]) == 74
    assert f"sbatch reaches no cluster: {lost}; nothing was started" in capsys.readouterr().err


def test_a_python_without_megaspec_is_told_before_the_job_waits(here, capsys, corpus, monkeypatch, programs):
    (programs / "job.sh").unlink(missing_ok=True)
    folder = here / "bin"
    write_program(folder / "python3", "#!/bin/sh\nexit 1\n")
    monkeypatch.setenv("PATH", os.pathsep.join([str(folder), str(programs), os.environ["PATH"]]))
    assert main(["train", "recipe=hello", *SLURM]) == 64
    said = capsys.readouterr().err
    assert f"nodes start python3 by this shell's PATH, which is {folder}/python3 and has no megaspec" in said
    assert not (programs / "job.sh").exists()
    # where modules or an image bring it, nobody knows here
    for word in ("launcher.modules=[megaspec]", APPTAINER):
        assert main(["train", "recipe=hello", *SLURM, word]) == 0


def test_a_sweep_is_an_array(here, capsys, corpus):
    words = ["train", "-m", "recipe=hello", *SLURM, "optim.lr=1e-3,2e-3,3e-3", "sweep.slots=2", "sweep.name=rates"]
    assert main([*words, "--print"]) == 0
    text = capsys.readouterr().out
    assert "#SBATCH --array=1-3%2" in text
    assert text.count("\nrun=sweeps/rates/") == 3
    nodes = ["train", "-m", "recipe=hello", "launcher=slurm", *ON_CPU, "launcher.nodes=1,2", "--print"]
    assert main(nodes) == 64
    assert "the points of a sweep ask for the same nodes here" in capsys.readouterr().err
    assert main([*words, "sweep.kind=optuna", "--print"]) == 64
    assert main(["train", "recipe=hello", "--print"]) == 64
    assert "set launcher=slurm or kubernetes" in capsys.readouterr().err


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": f"text {n} and more"}) for n in range(3000)))
        command = ["data", "prepare", "text.jsonl", "--out", "data/hello", "--tokenizer", "byte", "--workers", "1"]
        assert main(command) == 0
    return folder / "data"


@pytest.fixture
def corpus(here, tokens) -> Path:
    shutil.copytree(tokens, here / "data")
    return here / "data"


TINY = (
    "model={n_layers: 1, d_model: 16, n_heads: 2, n_kv_heads: 1, d_ffn: 64}",
    "data.seq_len=8",
    "data.split=[9, 1, 0]",
    "train.global_batch=4",
    "train.eval_every=0",
    "train.sample=null",
    "log.tensorboard=false",
    "log.console=plain",
    "optim.schedule.warmup_steps=1",
    "launcher.grace_seconds=20",
)


@pytest.mark.slow
def test_a_job_of_two_nodes_is_stopped_and_goes_on(here, capsys, corpus, programs):
    """As SLURM does it: the signal before the limit reaches the tasks, the job goes back, and its next start ends."""
    (programs / "requeued").unlink(missing_ok=True)
    (programs / "tasks").unlink(missing_ok=True)
    words = ["launcher=slurm", "launcher.nodes=2", *ON_CPU, *TINY, "train.steps=150"]
    assert main(["train", "recipe=hello", *words, "--print"]) == 0
    script = capsys.readouterr().out
    run = here / "runs" / "hello"
    environment = slurm_environment(programs)
    with open(here / "slurm.out", "w") as out:
        job = subprocess.Popen(["bash", "-c", script], cwd=here, env=environment, stdout=out, stderr=out)
    give_up = time.monotonic() + 120
    while "step 3" not in (here / "slurm.out").read_text() and job.poll() is None:
        assert time.monotonic() < give_up, (here / "slurm.out").read_text()
        time.sleep(0.05)
    for pid in (programs / "tasks").read_text().split():
        os.kill(int(pid), signal.SIGUSR1)
    assert job.wait(60) == 75, (here / "slurm.out").read_text()
    assert (programs / "requeued").read_text().split() == ["4711"]
    stopped = read_exit(run)
    assert stopped.code == 75
    assert 3 <= stopped.step < 150
    done = run_script(script, programs, here, SLURM_RESTART_COUNT="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_exit(run).code == 0
    assert yaml.safe_load((run / "spec.json").read_text())["world_size"] == 2
    assert not list(here.glob(".megaspec-job-*"))


# What ranks find as sitecustomize: they fail as plan.json says for the start of the job and the host that they are on.
PLANTED = """
import json, os
from pathlib import Path

def fault():
    if what == "kill":
        faults.kill_self()
    if what == "lost":
        os.kill(os.getppid(), 9)
        faults.kill_self()
    raise HardwareError("planted: computes wrongly", ranks=what)

if "RANK" in os.environ:
    plan = json.loads(Path(os.environ["PLAN"]).read_text())
    what = plan.get(os.environ["SLURM_RESTART_COUNT"], {}).get(os.environ["SLURMD_NODENAME"])
    if what is not None:
        from megaspec.core import faults
        from megaspec.core.errors import HardwareError
        faults.arm("step", fault, count=6)
"""


class Cluster:
    """A job of SLURM, started again and again as its queue would, on hosts that fail as planned."""

    def __init__(self, folder: Path, programs: Path, script: str, plan: dict[str, dict[str, object]]):
        self.folder = folder
        self.programs = programs
        self.script = script
        (folder / "planted").mkdir()
        (folder / "planted" / "sitecustomize.py").write_text(PLANTED)
        (folder / "plan.json").write_text(json.dumps(plan))

    def start(self, restarts: int, **more: str) -> subprocess.CompletedProcess[str]:
        """One start, up to its end."""
        (self.programs / "requeued").unlink(missing_ok=True)
        sources = slurm_environment(self.programs)["PYTHONPATH"]
        more |= {"PYTHONPATH": f"{self.folder}/planted{os.pathsep}{sources}", "PLAN": f"{self.folder}/plan.json"}
        return run_script(self.script, self.programs, self.folder, SLURM_RESTART_COUNT=str(restarts), **more)

    @property
    def is_queued(self) -> bool:
        return (self.programs / "requeued").exists() and not (self.programs / "held").exists()


def samples_once(run: Path, *, steps: int, batch: int = 4) -> None:
    """Every step stands in the metrics once, with samples of its own."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    taken = [(line["first_sample"], line["samples"]) for line in lines if line["event"] == "step"]
    assert taken == [(batch * step, batch * (step + 1)) for step in range(steps)]


def job_of_two(capsys, *words: str) -> str:
    shape = ["launcher=slurm", "launcher.nodes=2", *ON_CPU, *TINY, "train.steps=12", "checkpoint.every=4"]
    assert main(["train", "recipe=hello", *shape, *words, "--print"]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_job_goes_on_without_the_host_that_computes_wrongly(here, capsys, corpus):
    programs = write_slurm(here / "bin")
    # whatever finds it, all ranks say the same
    plan = {"0": {"127.0.0.1": [1], "127.0.0.2": [1]}}
    cluster = Cluster(here, programs, job_of_two(capsys), plan)
    run = here / "runs" / "hello"
    done = cluster.start(0)
    assert done.returncode == 77, done.stdout + done.stderr
    assert cluster.is_queued
    (avoided,) = read_avoided(run).entries
    assert (avoided.host, avoided.device, avoided.attempt) == ("127.0.0.2", None, 0)
    assert avoided.why == "rank 1: planted: computes wrongly"
    assert excluded(programs) == ["127.0.0.2"]
    done = cluster.start(1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_exit(run).code == 0
    samples_once(run, steps=12)
    # a job that is submitted by hand later, on the same hosts
    (programs / "excluded").write_text("")
    done = cluster.start(0, SLURM_JOB_ID="4712")
    assert done.returncode == 77, done.stdout + done.stderr
    assert "keeps away from host 127.0.0.2 (rank 1: planted: computes wrongly); no rank was started" in done.stderr
    assert cluster.is_queued
    assert excluded(programs) == ["127.0.0.2"]


@pytest.mark.slow
def test_a_job_goes_on_without_a_host_that_fails_twice(here, capsys, corpus):
    programs = write_slurm(here / "bin")
    plan = {restarts: {"127.0.0.1": "kill"} for restarts in ("0", "1")}
    cluster = Cluster(here, programs, job_of_two(capsys), plan)
    run = here / "runs" / "hello"
    for restarts in (0, 1):
        assert excluded(programs) == [] if restarts else not (programs / "excluded").exists()
        done = cluster.start(restarts)
        assert done.returncode == 74, done.stdout + done.stderr
        assert cluster.is_queued
    (avoided,) = read_avoided(run).entries
    assert (avoided.host, avoided.attempt) == ("127.0.0.1", 1)
    assert "failed 2 times, the last: rank 0 was killed by SIGKILL" in avoided.why
    assert excluded(programs) == ["127.0.0.1"]
    done = cluster.start(2)
    assert done.returncode == 0, done.stdout + done.stderr
    samples_once(run, steps=12)


@pytest.mark.slow
def test_a_job_of_three_nodes_goes_on_with_two_with_one_and_with_three_again(here, capsys, corpus, tell):
    """A node is lost, another one computes wrongly, and both come back: each sample is taken once, and the numbers are
    those of a run that nothing happened to."""
    programs = write_slurm(here / "bin")
    plan = {"0": {"127.0.0.3": "lost"}, "1": {"127.0.0.1": [1], "127.0.0.2": [1]}, "2": {"127.0.0.1": "kill"}}
    tiny = [word for word in TINY if not word.startswith("train.global_batch=")]
    words = ["launcher=slurm", "launcher.nodes=3", "launcher.min_nodes=1", *ON_CPU, *tiny, "train.global_batch=12"]
    words += ["train.steps=24", "precision=fp64", "checkpoint.every=2", "--print"]
    assert main(["train", "recipe=hello", *words]) == 0
    script = capsys.readouterr().out
    cluster = Cluster(here, programs, script, plan)
    run = here / "runs" / "hello"
    done = cluster.start(0, NODES="3")
    assert done.returncode == 74, done.stdout + done.stderr
    assert "host 127.0.0.3 was lost" in done.stderr
    assert cluster.is_queued
    # it is down: SLURM has two
    (programs / "hosts").write_text("127.0.0.1\n127.0.0.2\n")
    done = cluster.start(1, NODES="3")
    assert done.returncode == 77, done.stdout + done.stderr
    assert "this start trains on 2 of 3 nodes" in done.stderr
    assert excluded(programs) == ["127.0.0.2"]
    done = cluster.start(2, NODES="3")
    assert done.returncode == 74, done.stdout + done.stderr
    assert "this start trains on 1 of 3 nodes" in done.stderr
    # both are mended
    (run / "avoided.jsonl").unlink()
    (programs / "hosts").write_text("".join(f"{host}\n" for host in FOUR[:3]))
    (programs / "excluded").write_text("")
    (here / ".megaspec-job-4711.excluded").unlink()
    done = cluster.start(3, NODES="3")
    assert done.returncode == 0, done.stdout + done.stderr
    starts = [line for line in read_metrics(run / "metrics.jsonl") if line["event"] == "start"]
    assert [line["world_size"] for line in starts] == [3, 2, 1, 3]
    samples_once(run, steps=24, batch=12)
    other = here / "undisturbed"
    shutil.copytree(corpus, other / "data")
    undisturbed = Cluster(other, write_slurm(other / "bin"), script, {}).start(0, NODES="3")
    assert undisturbed.returncode == 0, undisturbed.stdout + undisturbed.stderr
    assert_same_course(run, other / "runs" / "hello", within=1e-12)
    tell("3 → 2 → 1 → 3 nodes of a SLURM job: 24 steps, samples 0 to 288 once each, within 1e-12")


NO_JOB = ("launcher=slurm", "launcher.hardware=cpu", "launcher.ranks_per_node=1")


def test_a_command_that_starts_ranks_here_says_so(here, capsys, corpus):
    assert main(["bench", "step", "recipe=hello", *NO_JOB]) == 64
    assert "launcher.kind=slurm: megaspec train alone submits jobs" in capsys.readouterr().err


@pytest.mark.slow
def test_commands_of_a_run_start_ranks_here(here, capsys, corpus):
    words = [word for word in TINY if "warmup" not in word]
    words += ["launcher.ranks=1", "train.steps=1", "optim.schedule.warmup_steps=0"]
    assert main(["train", "recipe=hello", *words]) == 0
    for command in (["resume", "runs/hello"], ["eval", "runs/hello"], ["generate", "runs/hello", "a"]):
        capsys.readouterr()
        assert main([*command, *NO_JOB]) == 64
        assert "launcher.kind=slurm: megaspec train alone submits jobs" in capsys.readouterr().err
