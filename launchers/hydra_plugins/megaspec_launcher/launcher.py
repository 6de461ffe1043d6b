"""`hydra/launcher=megaspec` for an application of one's own: every job in a process and on GPUs that are its own.

    python my_app.py -m hydra/launcher=megaspec hydra.launcher.gpus_per_job=2 lr=1e-3,3e-4

All jobs are composed before the first starts, and one that fails doesn't stop the others.
"""

import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from megaspec.estimate.target import detect_target
from megaspec.sweep.slots import CORES_OF_A_SLOT, Slots, visible_gpus
from megaspec_launchers.signals import end_with


@dataclass
class MegaspecLauncherConf:
    """What `hydra.launcher.*` may say."""

    _target_: str = "hydra_plugins.megaspec_launcher.launcher.MegaspecLauncher"
    gpus_per_job: int = 1
    slots: int = 0


ConfigStore.instance().store(
    group="hydra/launcher", name="megaspec", node=MegaspecLauncherConf, provider="megaspec_launcher"
)


class MegaspecLauncher(Launcher):
    """Runs jobs on disjoint slots.

    `gpus_per_job`: GPUs that each sees, where there are any. `slots`: jobs at once; 0: as many as find GPUs, and
    without a GPU one per two cores.
    """

    def __init__(self, gpus_per_job: int = 1, slots: int = 0):
        if gpus_per_job < 1 or slots < 0:
            raise ValueError(f"gpus_per_job={gpus_per_job} must be at least 1, and slots={slots} at least 0")
        self.gpus_per_job = gpus_per_job
        self.slots = slots

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Takes what the jobs need."""
        self.hydra_context = hydra_context
        self.task_function = task_function
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs every job. -> what each returned, in their order; a job that died has failed."""
        setup_globals()
        configs = [self._config(list(words), initial_job_idx + i) for i, words in enumerate(job_overrides)]
        slots = self._make_slots()
        waiting = list(enumerate(configs))
        # by the pipe that a job's result comes through: its number, its process, its GPUs
        running: dict[Connection, tuple[int, BaseProcess, tuple[str, ...]]] = {}
        returns: dict[int, JobReturn] = {}
        try:
            while waiting or running:
                while waiting and slots.fits(self.gpus_per_job):
                    number, config = waiting.pop(0)
                    gpus = slots.take(self.gpus_per_job)
                    pipe, process = self._start(config, gpus)
                    running[pipe] = (number, process, gpus)
                for pipe in wait(list(running)):
                    number, process, gpus = running.pop(pipe)
                    returns[number] = _receive(pipe, process, configs[number])
                    slots.give(gpus)
        finally:
            for _, process, _ in running.values():
                process.terminate()
        return [returns[number] for number in range(len(configs))]

    def _config(self, overrides: list[str], number: int) -> DictConfig:
        config = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id = number
            config.hydra.job.num = number
        return config

    def _make_slots(self) -> Slots:
        target = detect_target()
        gpus = visible_gpus(target, os.environ)
        if gpus and self.gpus_per_job > len(gpus):
            raise ValueError(f"hydra.launcher.gpus_per_job={self.gpus_per_job} must be at most {len(gpus)} GPUs")
        most = self.slots
        if most == 0:
            most = len(gpus) or max(1, target.cores // CORES_OF_A_SLOT)
        return Slots(most=most, gpus=gpus)

    def _start(self, config: DictConfig, gpus: Sequence[str]) -> tuple[Connection, BaseProcess]:
        """Forks, so that a task function needs no importable name; GPUs must not be in use before."""
        ours, theirs = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(
            target=self._job, args=(config, gpus, theirs, os.getpid())
        )
        process.start()
        theirs.close()
        return ours, process

    def _job(self, config: DictConfig, gpus: Sequence[str], result: Connection, parent: int) -> None:
        os.setsid()
        if not end_with(parent):
            return
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        done = run_job(
            hydra_context=self.hydra_context,
            task_function=self.task_function,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        result.send({"status": done.status, "value": _sendable(done), "working_dir": done.working_dir})


def _sendable(done: JobReturn) -> Any:
    """What a job returned; an error as its text, as not every error survives the way to another process."""
    if done.status == JobStatus.COMPLETED:
        return done._return_value
    return f"{type(done._return_value).__name__}: {done._return_value}"


def _receive(pipe: Connection, process: BaseProcess, config: DictConfig) -> JobReturn:
    try:
        message = pipe.recv()
    except EOFError:
        message = None
    pipe.close()
    process.join()
    result = JobReturn(cfg=config, overrides=list(config.hydra.overrides.task), task_name=config.hydra.job.name)
    if message is None:
        result.status = JobStatus.FAILED
        result.return_value = RuntimeError(f"job {config.hydra.job.num} died with exit code {process.exitcode}")
        return result
    result.status = message["status"]
    result.working_dir = message["working_dir"]
    if result.status == JobStatus.COMPLETED:
        result.return_value = message["value"]
    else:
        # what failed comes as its text
        result.return_value = RuntimeError(message["value"])
    return result
