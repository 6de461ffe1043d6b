"""Points of a sweep as jobs of any Hydra launcher: a real multirun over their numbers, with Hydra's basic sweeper."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig

try:
    from submitit.core.utils import FailedJobError  # the extra `sweep`
except ImportError:
    FailedJobError = None

# What a launcher tells of: its settings, or that sbatch refused a job.
_TOLD = (HydraException,) if FailedJobError is None else (HydraException, FailedJobError)
_NAME = "megaspec_points"


@dataclass
class Job:
    """The configuration of a job: which point of which sweep."""

    folder: str = ""
    point: int = 0
    plugins: list[str] = field(default_factory=list)
    """Packages that the command line named with --plugin."""


def run_points(
    folder: str,
    numbers: Sequence[int],
    launcher: str,
    settings: Sequence[str],
    *,
    logs: Path,
    plugins: Sequence[str] = (),
) -> str:
    """Runs points of a sweep through a Hydra launcher, and returns when all have ended. -> what was wrong, or "".

    `settings` were checked: Hydra calls what a `_target_` in them names. `logs`: an empty folder.
    """
    version.setbase("1.3")
    ConfigStore.instance().store(name=_NAME, node=Job)
    GlobalHydra.instance().clear()
    overrides = [
        f"hydra/launcher={launcher}",
        *settings,
        f"folder={_quoted(folder)}",
        f"plugins=[{','.join(plugins)}]",
        f"point={','.join(map(str, numbers))}",
        f"hydra.sweep.dir={_quoted(str(logs))}",
        "hydra.sweep.subdir=${point}",
        "hydra.output_subdir=null",
        "hydra/hydra_logging=disabled",
        "hydra/job_logging=disabled",
    ]
    try:
        hydra = Hydra.create_main_hydra2("megaspec", create_config_search_path(None))
        hydra.multirun(_NAME, run_job, overrides)
    except _TOLD as error:
        return " ".join(str(error).split())
    finally:
        GlobalHydra.instance().clear()
    return ""


def _quoted(path: str) -> str:
    """A path as a quoted value of Hydra's grammar, none of which OmegaConf takes for an interpolation.

    Both read backslashes as themselves, except right before what they escape.
    """
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", path)
    text = re.sub(r"(\\*)'", r"\1\1\\'", text)
    text = re.sub(r"(\\+)$", r"\1\1", text)
    return f"'{text}'"


def run_job(config: DictConfig) -> int:
    """One point. -> the exit code of its run."""
    from megaspec.sweep.hydra_jobs import run_point  # only in the process of a job

    return run_point(config.folder, config.point, tuple(config.plugins))
