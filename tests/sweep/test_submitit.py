"""Points as jobs of SLURM by Submitit: what it gives to sbatch, run by programs that stand in for SLURM's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launchers.jobs import ROOT, write_program
from tests.sweep.conftest import states, sweep

# A job array, its tasks beside each other and apart from who submitted it.
SBATCH = """
import os, re, shutil, subprocess, sys
here, script = os.path.dirname(os.path.abspath(__file__)), sys.argv[-1]
text = open(script).read()
shutil.copy(script, here + "/job.sh")
first, last = map(int, re.search(r"^#SBATCH --array=(\\d+)-(\\d+)", text, re.MULTILINE).groups())
for task in range(first, last + 1):
    job = {"SLURM_JOB_ID": str(4711 + task), "SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": str(task)}
    # of a step of one task
    job |= {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    job |= {"SLURM_JOB_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "node1"}
    done = f'bash "{script}"; touch {here}/done-{task}'
    out = open(f"{here}/out-{task}", "w")
    subprocess.Popen(["bash", "-c", done], env=os.environ | job, stdout=out, stderr=out, start_new_session=True)
print("Submitted batch job 4711")
"""
SRUN = """
import os, sys
words = sys.argv[1:]
while words[0].startswith("--"):
    # the only one of Submitit's that has a word of its own behind it
    words = words[2:] if words[0] in ("--output", "--error") else words[1:]
os.execvp(words[0], words)
"""
SACCT = """
import os
here = os.path.dirname(os.path.abspath(__file__))
print("JobID|State|NodeList")
for task in range(2):
    state = "COMPLETED" if os.path.exists(f"{here}/done-{task}") else "RUNNING"
    print(f"4711_{task}|{state}|node1")
"""


@pytest.mark.slow
def test_submitit_trains_points_by_sbatch(tmp_path, monkeypatch):
    programs = tmp_path / "programs"
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("sacct", SACCT)):
        write_program(programs / name, f"#!{sys.executable}\n{text}")
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    # jobs begin in processes of their own
    sources = (ROOT / source for source in ("", "kernels", "launchers"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, sources)))
    words = ("hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu", "hydra.launcher.timeout_min=5")
    assert sweep("optim.lr=1e-3,1e-2", *words, steps=2) == 0, "".join(p.read_text() for p in programs.glob("out-*"))
    assert states() == ["done", "done"]
    text = (programs / "job.sh").read_text()
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert "#SBATCH --partition=gpu\n" in text
    assert "#SBATCH --array=0-1" in text
    for point in Path("sweeps/s").glob("[0-9]*-*"):
        assert (point / "exit_code.json").is_file()
