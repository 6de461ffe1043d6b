"""Tasks that SLURM or MPI started without torchrun: each would train the whole run. Never imports torch."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megaspec.core.errors import Problem, RecipeError


@dataclass(frozen=True)
class Starter:
    """A program that starts tasks, and the variables by which a task knows its place."""

    name: str
    size: str
    rank: str
    local_size: str
    """Tasks on the task's own node, where the starter says so."""


# mpirun in a SLURM job starts its own daemons with srun, and those pass SLURM's variables on: MPI's come first.
# SLURM: of a step, since a batch script and a shell of salloc are one process whatever SLURM_NTASKS says.
STARTERS = (
    Starter("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    Starter("mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    Starter("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE"),
    Starter("srun", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_TASKS_PER_NODE"),
    Starter("mpirun", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
)
# SLURM's numbers of what is no srun: the interactive step of salloc, batch, extern and the one that is pending.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_PORT = 29500


def refuse_lone_tasks(environ: Mapping[str, str], arguments: Sequence[str]) -> None:
    """RecipeError: this process is one of several tasks, and no torchrun has made one world of them.

    The first task says everything, the others a line. `arguments`: what `megaspec` was given, for the command to use.
    """
    if "RANK" in environ:
        return
    starter = _starter(environ)
    if starter is None:
        return
    rank, size = int(environ.get(starter.rank, "0")), int(environ[starter.size])
    if rank > 0:
        raise RecipeError(f"task {rank} of {size} has no torchrun; task 0 says what to do")
    found = " ".join(f"{name}={environ[name]}" for name in (starter.size, starter.rank) if name in environ)
    text = f"{found}: {starter.name} started {size} tasks without torchrun, and each would train the whole run; give "
    text += f"`{_command(starter, environ, arguments, size)}`; runs of their own are a sweep (train -m) or a job array"
    raise RecipeError([Problem("", text, code="launch-tasks")])


def _starter(environ: Mapping[str, str]) -> Starter | None:
    """Who started several tasks of which this process is one."""
    for starter in STARTERS:
        if starter.name == "srun" and not _is_in_step(environ):
            continue
        size = environ.get(starter.size, "")
        if re.fullmatch(r"[0-9]{1,9}", size) and re.fullmatch(r"[0-9]{1,9}", environ.get(starter.rank, "")):
            # what is said of the narrowest group counts: a step of one task in a job of eight is one process
            return starter if int(size) > 1 else None
    return None


def _is_in_step(environ: Mapping[str, str]) -> bool:
    """True in a task of srun."""
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    return re.fullmatch(r"[0-9]{1,10}", step) is not None and int(step) < _FIRST_SPECIAL_STEP


def _command(starter: Starter, environ: Mapping[str, str], arguments: Sequence[str], size: int) -> str:
    """What starts one world on the nodes of these tasks."""
    words = shlex.join(arguments)
    nodes = _n_nodes(starter, environ, size)
    is_sweep = arguments[:1] == ["sweep"] or "-m" in arguments or "--multirun" in arguments
    if nodes == 1 or is_sweep:
        # our own launcher starts a rank for each GPU that it sees
        alone = "srun --nodes=1 --ntasks=1 " if starter.name == "srun" else ""
        return f"{alone}megaspec {words}"
    how_many = str(nodes or "NODES")
    if starter.name == "srun":
        # --ntasks too: in a job srun takes it from SLURM_NTASKS
        once_a_node = f"srun --nodes={how_many} --ntasks={how_many} --ntasks-per-node=1"
    else:
        once_a_node = f"on each of {how_many} nodes:"
    # SLURM writes 4(x2),3
    per_node = re.match(r"[1-9][0-9]{0,5}", environ.get(starter.local_size, ""))
    ranks = per_node[0] if per_node else "GPUS"
    torchrun = f"torchrun --nnodes={how_many} --nproc-per-node={ranks} --rdzv-backend=c10d"
    return f"{once_a_node} {torchrun} --rdzv-endpoint={_first_host(environ)}:{_PORT} -m megaspec.cli {words}"


def _n_nodes(starter: Starter, environ: Mapping[str, str], size: int) -> int | None:
    """How many nodes the tasks are on; None where nothing says so."""
    if starter.name == "srun":
        for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
            if re.fullmatch(r"[1-9][0-9]{0,6}", environ.get(name, "")):
                return int(environ[name])
        return None
    local = environ.get(starter.local_size, "")
    if re.fullmatch(r"[1-9][0-9]{0,6}", local):
        return -(-size // int(local))
    return None


def _first_host(environ: Mapping[str, str]) -> str:
    """The first node of a list such as node[01-04,07],login2; HOST where there is none."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        match = re.match(r"([A-Za-z0-9._-]+)(?:\[([0-9]+)[0-9,-]*\]([A-Za-z0-9._-]*))?", environ.get(name, ""))
        if match:
            return "".join(part for part in match.groups() if part)
    return "HOST"
