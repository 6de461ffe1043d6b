"""Secrets stay where they are: twenty of them are planted around runs, and everything that runs write is searched."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.warm import warm_command

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "launchers"))
# In the environment, as what schedulers, services and clouds put there.
VARIABLES = (
    "MEGASPEC_RUN_SECRET",
    "WANDB_API_KEY",
    "HF_TOKEN",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "GITHUB_TOKEN",
    "SLURM_JWT",
    "KUBERNETES_TOKEN",
    "OPENAI_API_KEY",
    "DATABASE_PASSWORD",
)
# In addresses of the environment.
ADDRESSES = {
    "MY_HOOK": "http://127.0.0.1:9/hook/{}",
    "HTTPS_PROXY": "http://me:{}@127.0.0.1:9",
    "DATABASE_URL": "postgres://me:{}@127.0.0.1/db",
    "PIP_INDEX_URL": "https://me:{}@127.0.0.1:9/simple",
}
# In words of the command line that runs are started with, or refuse.
WORDS = (
    "log.sinks=[{{kind: mlflow, tracking_uri: 'https://me:{}@127.0.0.1:9'}}, {{kind: mlflow, tracking_uri: "
    "'https://127.0.0.1:9/?token={}'}}]",
    "log.webhook.url_variable=https://127.0.0.1:9/{}",
    "log.webhook.url=https://127.0.0.1:9/{}",
)


TINY = (
    "recipe=hello data=synthetic data.vocab_size=32 ~data.blend train.sample=null model.vocab_size=32 "
    "model.n_layers=1 model.d_model=16 model.n_heads=2 model.n_kv_heads=1 model.d_ffn=64 model.max_seq_len=16 "
    "data.seq_len=16 train.global_batch=4 train.micro_batch=1 train.eval_every=0 optim.schedule.warmup_steps=1 "
    "launcher.ranks=1 parallelism.tp=1 log=plain"
)


def canary(number: int) -> str:
    return f"canary{number:02d}x7f3a9c5e1b"


def megaspec(folder: Path, environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return warm_command(words, cwd=folder, env=environ, timeout=200)


def written(folder: Path) -> dict[str, bytes]:
    """Everything below a folder, names of files too."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def planted(folder: Path) -> tuple[dict[str, str], list[str]]:
    """An environment with sixteen canaries, and words of a command line with four more."""
    environ = os.environ | {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    numbers = iter(range(20))
    for name in VARIABLES:
        environ[name] = canary(next(numbers))
    for name, form in ADDRESSES.items():
        environ[name] = form.format(canary(next(numbers)))
    words = []
    for form in WORDS:
        words.append(form.format(*[canary(next(numbers)) for _ in range(form.count("{}"))]))
    assert next(numbers, None) is None, "twenty"
    return environ, words


def assert_no_leak(folder: Path, *done: subprocess.CompletedProcess[str]) -> None:
    """In no file below the folder, in no name of one, and on no terminal."""
    told = written(folder)
    assert len(told) > 10
    for number, one in enumerate(done):
        told[f"terminal {number}"] = (one.stdout + one.stderr).encode()
    leaks = []
    for number in range(20):
        for name, data in told.items():
            if canary(number).encode() in data or canary(number) in name:
                leaks.append((number, name))
    assert leaks == []


HOOK = "log.webhook={url_variable: MY_HOOK}"
SLURM = ("launcher=slurm", "launcher.hardware=cpu", "launcher.ranks_per_node=1", "launcher.nodes=2")
PODS = (
    "launcher=kubernetes",
    *SLURM[1:],
    "launcher.image=megaspec",
    "launcher.volumes=[{claim: runs, path: /workspace}]",
)


def test_no_secret_is_written_anywhere(tmp_path):
    """A run that ends well and can't reach its webhook, one that is refused for what it holds, a page, and jobs."""
    environ, words = planted(tmp_path)
    tiny = TINY.split()
    well = megaspec(tmp_path, environ, "train", *tiny, "train.steps=4", "name=well", HOOK)
    assert well.returncode == 0, well.stderr
    assert "an event was not sent: Connection refused" in well.stderr
    refused = megaspec(tmp_path, environ, "train", *tiny, "name=refused", *words)
    assert refused.returncode == 64, refused.stderr
    for key in ("log.sinks.0.tracking_uri=https://***@", "log.webhook.url="):
        assert key in refused.stderr, refused.stderr
    # its page, what a cluster would be given, and what a machine says of itself
    told = [megaspec(tmp_path, environ, "report", "runs/well")]
    for job in (SLURM, PODS):
        words = [word for word in tiny if not word.startswith("launcher.")]
        told.append(megaspec(tmp_path, environ, "train", *words, *job, "train.steps=4", "name=job", HOOK, "--print"))
    told.append(megaspec(tmp_path, environ, "doctor", "--look-only"))
    for one in told:
        assert one.returncode == 0, one.stderr
    assert "<html" in (tmp_path / "runs/well/report.html").read_text()
    assert told[1].stdout.startswith("#!/bin/bash")
    assert "kind: TrainJob" in told[2].stdout
    run = tmp_path / "runs/well"
    assert {"spec.json", "metrics.jsonl", "heartbeat.json"} <= {path.name for path in run.iterdir()}
    assert_no_leak(tmp_path, well, refused, *told)


@pytest.mark.slow
def test_a_run_that_crashes_or_is_killed_tells_none_either(tmp_path):
    environ, _ = planted(tmp_path)
    tiny = TINY.split()
    killed = megaspec(tmp_path, environ | {"MEGASPEC_FAULT": "step:2"}, "train", *tiny, "train.steps=4", "name=k", HOOK)
    assert killed.returncode == 74, killed.stderr
    assert_no_leak(tmp_path, killed)
