"""Tasks that srun or mpirun started without torchrun. The variables are those of srun(1), sbatch(1) and salloc(1)."""

import re

import pytest

from megaspec.cli import main
from megaspec.core.errors import RecipeError
from megaspec_launchers.tasks import STARTERS, refuse_lone_tasks

WORDS = ["train", "recipe=hello", "train.loss={kind: x}"]
JOB = {"SLURM_JOB_ID": "71", "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "4(x2)"}
JOB |= {"SLURM_JOB_NODELIST": "node[07-08]"}
# sbatch sets the place of its one process, too
BATCH = JOB | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
STEP = BATCH | {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "node[07-08]",
}
ONE_NODE = STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "MASTER_ADDR": "node07", "MASTER_PORT": "29500"}


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


ONE_PROCESS = {
    "no scheduler": {},
    "a shell of salloc": JOB,
    "a shell of salloc in its interactive step": STEP | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
    "the same of an older SLURM": BATCH | {"SLURM_STEP_ID": "4294967290"},
    "a batch script of many tasks": BATCH,
    "a batch script of one task": BATCH | {"SLURM_NTASKS": "1", "SLURM_NNODES": "1"},
    "a batch script, as its step is numbered": BATCH | {"SLURM_STEP_ID": "4294967291"},
    "a job array": BATCH | {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "9", "SLURM_NTASKS": "1"},
    "a step of one task in a job of eight": STEP | {"SLURM_STEP_NUM_TASKS": "1"},
    "torchrun in a step of one task a node": STEP | {"SLURM_STEP_NUM_TASKS": "2"} | TORCHRUN,
    "mpirun of one": OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"},
    "mpirun of one in a step of eight": STEP | OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"},
    "mpirun whose tasks have torchrun's variables": OPEN_MPI | TORCHRUN,
    "sizes that are no numbers": STEP | {"SLURM_STEP_NUM_TASKS": "many", "SLURM_NTASKS": ""},
}


@pytest.mark.parametrize("environ", ONE_PROCESS.values(), ids=ONE_PROCESS)
def test_one_process_may_train(environ: dict[str, str]) -> None:
    refuse_lone_tasks(environ, WORDS)


SAID = "train recipe=hello 'train.loss={kind: x}'"
TORCHRUN_TWICE = "torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint={}:29500 -m megaspec.cli"
SRUN_TWICE = "srun --nodes=2 --ntasks=2 --ntasks-per-node=1"
SEVERAL = {
    "srun on two nodes": (STEP, f"{SRUN_TWICE} {TORCHRUN_TWICE.format('node07')} {SAID}"),
    "srun of an older SLURM": (
        without(STEP, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE"),
        f"{SRUN_TWICE} {TORCHRUN_TWICE.format('node07')} {SAID}",
    ),
    "srun on one node": (ONE_NODE, f"srun --nodes=1 --ntasks=1 megaspec {SAID}"),
    "other variables than torchrun's": (
        ONE_NODE | {"WORLD_SIZE": "2", "MASTER_ADDR": "node07"},
        f"srun --nodes=1 --ntasks=1 megaspec {SAID}",
    ),
    "Open MPI on two nodes": (OPEN_MPI, f"on each of 2 nodes: {TORCHRUN_TWICE.format('HOST')} {SAID}"),
    "Open MPI on one node": (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, f"megaspec {SAID}"),
    "Open MPI in a job of SLURM": (
        STEP | {"SLURM_STEP_NUM_TASKS": "1"} | OPEN_MPI,
        f"on each of 2 nodes: {TORCHRUN_TWICE.format('node07')} {SAID}",
    ),
    "MPICH": ({"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALNRANKS": "2"}, f"megaspec {SAID}"),
}


@pytest.mark.parametrize(("environ", "command"), SEVERAL.values(), ids=SEVERAL)
def test_the_first_of_several_tasks_names_the_command(environ: dict[str, str], command: str) -> None:
    with pytest.raises(RecipeError) as refused:
        refuse_lone_tasks(environ, WORDS)
    text = str(refused.value)
    assert f"`{command}`" in text
    # the variables, as they are
    name, value = re.match(r"(\w+)=(\d+) ", text).groups()
    assert environ[name] == value
    assert name in {starter.size for starter in STARTERS}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n[01-04,07],login2", "n01"),
        ("a[3,5]-ib", "a3-ib"),
        ("gpu-1.cluster,gpu-2", "gpu-1.cluster"),
        ("", "HOST"),
    ],
)
def test_ranks_meet_on_the_first_node(nodes: str, first: str) -> None:
    environ = STEP | {"SLURM_STEP_NODELIST": nodes, "SLURM_JOB_NODELIST": ""}
    with pytest.raises(RecipeError, match=f"--rdzv-endpoint={first}:29500"):
        refuse_lone_tasks(environ, WORDS)


def test_other_tasks_say_a_line() -> None:
    with pytest.raises(RecipeError) as refused:
        refuse_lone_tasks(STEP | {"SLURM_PROCID": "5"}, WORDS)
    assert str(refused.value) == "task 5 of 8 has no torchrun; task 0 says what to do"


@pytest.mark.parametrize("words", [["train", "-m", "optim.lr=1,2"], ["sweep", "resume", "sweeps/s"]])
def test_a_sweep_starts_its_ranks_itself(words: list[str]) -> None:
    with pytest.raises(RecipeError) as refused:
        refuse_lone_tasks(STEP, words)
    assert "srun --nodes=1 --ntasks=1 megaspec" in str(refused.value)
    assert "torchrun -" not in str(refused.value)


@pytest.fixture
def in_a_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    for name, value in ONE_NODE.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("in_a_step")
@pytest.mark.parametrize(
    "words",
    [["train", "recipe=hello"], ["train", "-m", "optim.lr=1,2"], ["resume", "runs/x"], ["sweep", "resume", "s"]],
)
def test_what_trains_is_refused_before_anything_is_read(words: list[str], tmp_path, capsys) -> None:
    assert main(words) == 64
    err = capsys.readouterr().err
    assert "SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=0: srun started 2 tasks without torchrun" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("in_a_step")
@pytest.mark.parametrize("words", [["plan", "recipe=hello"], ["recipes"], ["explain", "launch-tasks"]])
def test_what_does_not_train_is_not_refused(words: list[str]) -> None:
    assert main(words) == 0
