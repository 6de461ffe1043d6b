"""Specs of jobs for tests, and programs that stand in for a scheduler's."""

import json
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from megaspec.commands.planned import cluster_target
from megaspec.compose.compose import compose
from megaspec.estimate.target import Target
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec.spec import Spec

ROOT = Path(__file__).parents[2]
HERE = Target(cores=2, versions={"torch": "2.13.0+cpu", "tensorboard": "2.21.0"})
FACTS = Facts(run_dir="runs/hello", vocab_size=257, train_tokens=10**6, valid_tokens=10**5)
SLURM = ("launcher=slurm", "launcher.hardware=H100", "launcher.nodes=2", "train.global_batch=64")
PODS = (
    "launcher=kubernetes",
    "launcher.hardware=H100",
    "launcher.nodes=2",
    "train.global_batch=64",
    "launcher.image=nvcr.io/team/megaspec:1.0",
    "launcher.volumes=[{claim: runs, path: /workspace}, {claim: corpus, path: /workspace/data, read_only: true}]",
)
ON_CPU = ("launcher.hardware=cpu", "launcher.ranks_per_node=1")


def spec_of(*overrides: str, recipe: str = "hello") -> Spec:
    """The resolved recipe with overrides."""
    composed = compose(recipe, overrides)
    target = cluster_target(composed.recipe, composed.recipe.launcher, HERE)
    return resolve(composed.recipe, target, FACTS, composed.origins)


def with_fields(spec: Spec, **changed: object) -> Spec:
    """A Spec with other values below dotted names, `__` for a dot; typed as from a file."""
    content = json.loads(spec.model_dump_json())
    for name, value in changed.items():
        *above, last = name.split("__")
        section = content
        for part in above:
            section = section[part]
        section[last] = value
    return Spec.model_validate_json(json.dumps(content))


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


# Addresses of this machine, all of them: a job meets at the name of its first node.
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


def write_slurm(folder: Path, hosts: Sequence[str] = HOSTS) -> Path:
    """sbatch, srun, scontrol and python3 in a folder: what SLURM does with a job, on one machine that is all `hosts`.

    srun starts a task for each node beside each other, on those of --nodelist where it is given, returns the highest
    code, and writes its words to srun.json and the tasks' process ids to tasks. sbatch keeps the script of stdin.
    scontrol gives a job the first NODES (2) of the hosts that it does not exclude, or as many as there are, writes what
    is requeued to requeued, what is held to held and what is excluded to excluded, and says JOB_SAYS of the job. As
    slurmctld it changes what is excluded only of a job that waits, and knows its own nodes alone; a file `refuses` has
    it refuse all changes.
    """
    write_program(folder / "python3", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / "hosts").write_text("".join(f"{host}\n" for host in hosts))
    write_program(
        folder / "scontrol",
        f"""#!/bin/sh
cd "{folder}" || exit 1
touch excluded
case "$1 $2" in
"show hostnames") grep -F -x -v -f excluded hosts | head -n "${{NODES:-2}}" ;;
"show node") grep -F -x -q -e "$3" hosts ;;
"show job")
  echo "JobId=$3 JobState=COMPLETING $JOB_SAYS"
  echo "   ReqNodeList=(null) ExcNodeList=${{EXCLUDED:-(null)}}" ;;
"requeue "*) echo "$2" >> requeued ;;
"hold "*) echo "$2" >> held ;;
"update JobId="*)
  if [ ! -e requeued ] || [ -e refuses ]; then
    echo "Job is no longer pending execution for job ${{2#JobId=}}" >&2
    exit 1
  fi
  echo "${{3#ExcNodeList=}}" | tr , "\\n" > excluded ;;
*) exit 1 ;;
esac
""",
    )
    write_program(folder / "srun", f"#!{sys.executable}\n{_SRUN.format(folder=str(folder))}")
    write_program(
        folder / "sbatch",
        f"""#!/bin/sh
cat > "{folder}/job.sh"
echo 4711
""",
    )
    return folder


_SRUN = """
import json, os, subprocess, sys, time
words = sys.argv[1:]
options = {{}}
while words and words[0].startswith("--"):
    name, _, value = words.pop(0).partition("=")
    options[name] = value
with open({folder!r} + "/srun.json", "w") as file:
    json.dump({{"options": options, "command": words, "environment": dict(os.environ)}}, file)
if os.environ.get("TELLS_THE_SHELL"):
    # SLURM's own end of a job: every process of the batch step is sent SIGTERM
    os.kill(os.getppid(), 15)
if os.environ.get("ONLY_DUMP"):
    sys.exit(int(os.environ["ONLY_DUMP"]))
tasks = []
hosts = subprocess.run(["scontrol", "show", "hostnames", "x"], stdout=subprocess.PIPE, text=True).stdout.split()
if "--nodelist" in options:
    named = options["--nodelist"].split(",")
    assert set(named) <= set(hosts), "srun: nodes of another job"
    # SLURM numbers nodes in the order of the job, whatever that of the list
    hosts = [host for host in hosts if host in named]
for node in range(int(options["--nodes"])):
    environment = os.environ | {{"SLURM_NODEID": str(node), "SLURM_PROCID": str(node), "SLURMD_NODENAME": hosts[node]}}
    tasks.append(subprocess.Popen(words, env=environment))
with open({folder!r} + "/tasks", "w") as file:
    file.write(" ".join(str(task.pid) for task in tasks))
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""


def slurm_environment(programs: Path, **more: str) -> dict[str, str]:
    """What a batch script of SLURM finds."""
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    sources = os.pathsep.join(str(ROOT / source) for source in ("", "kernels", "launchers"))
    made = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "RANK", "WORLD"))}
    made |= {"PATH": path, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return made | {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[1-2]", **more}
