"""What a run was made with: versions, GPUs, commits, command line. Torch-free, and without any secret.

Everything in the record is named here. The environment of the process is not read, and a word of the command line that
is not known to be harmless becomes ***.
"""

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import megaspec
from megaspec.core.errors import WriteError
from megaspec.core.regular_files import write_beside

PACKAGES = (
    "megaspec",
    "torch",
    "triton",
    "transformer-engine",
    "numpy",
    "pydantic",
    "hydra-core",
    "omegaconf",
    "safetensors",
    "tokenizers",
    "tensorboard",
    "wandb",
    "mlflow-skinny",
    "trackio",
    "transformer-engine",
    "flash-attn",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
)
HIDDEN = "***"
FILE_NAME = "environment.json"
COMMAND_SECONDS = 5.0


def write_environment(
    run_dir: Path, *, command: Sequence[str], words: Collection[str], sections: Collection[str]
) -> Path:
    """Writes run_dir/environment.json. `command`: sys.argv; see `harmless` for `words` and `sections`. WriteError."""
    record = {
        "command": harmless(command, words=words, sections=sections),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": _cores(),
        "versions": versions(),
        "gpus": gpus(),
        "source": commit(Path(megaspec.__file__)),
        "project": commit(Path.cwd()),
    }
    path = run_dir / FILE_NAME
    try:
        write_beside(path, [(json.dumps(record, indent=2) + "\n").encode()]).replace(path)
    except OSError as error:
        raise WriteError(f"{path}: {error.strerror}; make room or choose another run_dir") from error
    return path


def _cores() -> int | None:
    """Cores that the process may use; all of the machine's where the system doesn't tell."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def harmless(command: Sequence[str], *, words: Collection[str], sections: Collection[str]) -> list[str]:
    """A command line without what could be a secret.

    What stays: the program's name, `words` (sub-commands, flags, the run's folder), and `a.b=c` where `a` is one of
    `sections` (a recipe holds no secrets), without user, password and query of an address.
    """
    kept = []
    for number, word in enumerate(command):
        key, equals, value = word.partition("=")
        if number == 0:
            kept.append(Path(word).name)
        elif word in words:
            kept.append(word)
        elif equals and re.fullmatch(r"[A-Za-z0-9_.]+", key) and key.partition(".")[0] in sections:
            kept.append(f"{key}={_without_credentials(value)}")
        elif equals and key in words:
            kept.append(f"{key}={HIDDEN}")
        else:
            kept.append(HIDDEN)
    return kept


def versions() -> dict[str, str]:
    """Version by package, of those that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def gpus() -> list[dict[str, str]]:
    """Name, memory and driver of each GPU, as nvidia-smi tells; empty where there is none."""
    fields = ("name", "memory.total", "driver_version")
    out = _output("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    found = []
    for line in (out or "").splitlines():
        values = line.split(", ")
        if len(values) == len(fields):
            found.append(dict(zip(fields, values, strict=True)))
    return found


def commit(path: Path) -> dict[str, Any] | None:
    """The commit that a file or folder is at and whether it was changed since; None outside of git.

    A file that git does not track has no commit, even if it lies in a checkout.
    """
    folder = path if path.is_dir() else path.parent
    if path.is_file() and _output("git", "-C", str(folder), "ls-files", "--error-unmatch", path.name) is None:
        return None
    head = _output("git", "-C", str(folder), "rev-parse", "HEAD")
    changes = _output("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    if head is None or changes is None:
        return None
    return {"commit": head.strip(), "changed": bool(changes)}


def _output(*command: str) -> str | None:
    """What a program prints; None when it is missing, slow or fails."""
    program = shutil.which(command[0])
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *command[1:]], capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _without_credentials(value: str) -> str:
    return re.sub(r"(\w+://)(?:[^/@\s]*@)?([^?\s]*)(?:\?\S*)?", r"\1\2", value)
