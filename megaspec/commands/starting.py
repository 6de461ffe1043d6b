"""How `train` and `resume` start a run: resolve, write its folder under its lock, start its ranks, say how it ended."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megaspec.checkpoint.fallback import adopt, file_elsewhere
from megaspec.checkpoint.folders import CHECKPOINTS, remove_hidden
from megaspec.checkpoint.lock import RunLock
from megaspec.checkpoint.remote import Remote
from megaspec.commands.layouts import LayoutOption, Taken, first_that_fits, layout_options
from megaspec.compose.compose import Composed, recompose
from megaspec.core.errors import HangError, MegaspecError, Preempted, RecipeError, WriteError, printable
from megaspec.core.frozen import AUTO
from megaspec.core.remote_files import is_url
from megaspec.core.terminal import terminal
from megaspec.data.fetch import bring_here, data_in_words
from megaspec.data.files import is_of_disk
from megaspec.data.spec import IndexedSpec
from megaspec.estimate.target import Target, detect_target
from megaspec.hf.companions import kept_companions, read_companions, refuse_other_vocabulary
from megaspec.launcher import exit_file
from megaspec.launcher.attempts import last_step
from megaspec.launcher.loopback import bind_to_loopback
from megaspec.launcher.run_secret import job_of_parent, take_secret
from megaspec.launcher.stop import before_leaving
from megaspec.log.environment import write_environment
from megaspec.log.events import RunEnded
from megaspec.log.jsonl import ended_at, losses_by_step
from megaspec.log.remote import logged_run
from megaspec.log.sinks import METRICS
from megaspec.log.webhook import address_of, tell_end
from megaspec.plan.promise import promise_of_change
from megaspec.plan.report import print_plan
from megaspec.plugins import loaded
from megaspec.recipe import Recipe
from megaspec.resolve.gather import gather_facts, planned_run_dir, with_digest
from megaspec.resolve.resolver import resolve
from megaspec.resolve.resume import resume
from megaspec.rules.belonging import owner_of, refuse_copies_of_another
from megaspec.run_folder import (
    has_ended_well,
    is_run,
    keep_companions,
    make_folder,
    newest_step,
    own_checkpoint,
    read_run,
    refuse_gone_kernels,
    refuse_last_of_weights,
    refuse_links,
    refuse_lost_fork,
    refuse_place_in_a_run,
    refuse_weights_alone,
    saved_in_words,
    write_run,
)
from megaspec.search.fits import memory_warning, start_problems
from megaspec.spec import Spec
from megaspec_launchers.environment import rank_from_environment
from megaspec_launchers.local import launch
from megaspec_launchers.signals import end_with
from megaspec_launchers.tasks import refuse_lone_tasks


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start: its folder is written."""

    folder: Path
    spec: Spec
    lock: RunLock | None = None
    is_finished: bool = False
    """There is nothing to start."""


def refuse_tasks() -> None:
    """RecipeError: this process is one of several that srun or mpirun started, and torchrun none of them.

    Before anything is composed: each task would otherwise tell what is wrong, or begin the same run.
    """
    refuse_lone_tasks(os.environ, sys.argv[1:])


def start(
    composed: Composed, prepare: Callable[[Target, Composed], Prepared], *, memory: str, config_dirs: Sequence[str]
) -> int:
    """Prepare the run and train it: in a world that torchrun made, or with ranks of our own.

    `prepare` makes the run, or finds it, in a layout of `composed`: its own, or, since torchrun says how many ranks
    there are, the first of launcher.layouts that has as many.
    """
    target, place = detect_target(), rank_from_environment(os.environ)
    if place is not None:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            end_with(os.getppid())  # torchrun dies of SIGUSR1 and tells nobody: its ranks save then, too
        from megaspec.runtime.join import join  # torch, only where it is needed

        def prepare_fitting() -> Prepared:
            options = layout_options(composed, config_dirs)
            _, prepared = first_that_fits(options, target, lambda option: prepare(target, option.composed))
            return prepared

        def make_again(folder: str) -> None:
            make_ready(prepare_layout(Path(folder), target, memory=memory, config_dirs=config_dirs)[1])

        def make() -> str:
            return make_ready(prepare_fitting())

        def make_ready(prepared: Prepared) -> str:
            with before_leaving(partial(_ended, prepared, Preempted.exit_code)):
                _record(prepared.folder)
                _show(prepared.spec, target)
                if prepared.lock is not None:
                    prepared.lock.release()
            return str(prepared.folder)

        secret = take_secret(os.environ, world_size=place.world_size, job=job_of_parent(place.store.prefix))
        bind_to_loopback(os.environ, world_size=place.world_size)
        return join(make, **vars(place), secret=secret, prepare_again=make_again)
    prepared = prepare(target, composed)
    code = start_ranks(prepared, target, record=partial(_record, prepared.folder), is_shown=True)
    if code == HangError.exit_code:
        print(printable(f"megaspec: {saved_in_words(prepared.folder)}"), file=sys.stderr)
    return code


def start_ranks(
    prepared: Prepared,
    target: Target,
    *,
    record: Callable[[], None],
    is_shown: bool,
    gives_up: bool = True,
    arguments: Mapping[str, object] | None = None,
    **options: Any,
) -> int:
    """Trains a prepared run with ranks of this machine, and gives its lock back. -> exit code.

    `record`: what is written down once the run is ours. `is_shown`: whether its plan is printed. `gives_up`: see
    exit_file.end. `arguments` and `options`: more of `launch`.
    """
    assert prepared.lock is not None, "a run without its lock"
    with ExitStack() as stack:
        stack.callback(prepared.lock.release)
        if prepared.is_finished:
            return 0
        # a request to stop that comes before ranks listen to one, or after: the file says then how this start ended
        stack.enter_context(before_leaving(partial(_ended, prepared, Preempted.exit_code)))
        record()
        if is_shown:
            _show(prepared.spec, target)
        began = time.time()
        launcher = prepared.spec.launcher
        options = {"max_restarts": launcher.max_restarts} | options
        try:
            bring_here(prepared.spec.data, prepared.spec.remote)
            code = launch(
                str(prepared.folder),
                ranks=prepared.spec.world_size,
                grace_seconds=launcher.grace_seconds,
                timeout_seconds=launcher.timeout_seconds,
                arguments={"lock_token": prepared.lock.token, "plugins": loaded(), **(arguments or {})},
                is_ours=prepared.lock.is_ours,
                writes_heartbeat=True,
                **options,
            )
        except MegaspecError as error:
            _ended(prepared, error.exit_code)
            raise
        code = _ended(prepared, code, gives_up=gives_up)
        _tell_webhook(prepared, code, since=began)
        return code


def _tell_webhook(prepared: Prepared, code: int, *, since: float) -> None:
    """Tells the webhook how a start ended whose rank 0 could not: it was killed, or hung."""
    webhook = prepared.spec.log.webhook
    elsewhere = file_elsewhere(prepared.spec.checkpoint.fallback_dir, prepared.folder, METRICS)
    ended = ended_at(prepared.folder / METRICS, elsewhere=elsewhere)
    if webhook is None or (ended is not None and ended >= since):
        return
    meaning = exit_file.MEANINGS.get(code, exit_file.MEANINGS[MegaspecError.exit_code])
    step = last_step(prepared.folder, METRICS, elsewhere=elsewhere)
    event = RunEnded(step=step, how=f"exit code {code}, {meaning}")
    address = address_of(webhook, os.environ)
    why = tell_end(webhook, prepared.folder, name=logged_run(prepared.folder).name, address=address, event=event)
    if why:
        print(printable(f"megaspec: log.webhook: {why}"), file=sys.stderr)


def prepare_layout(folder: Path, target: Target, *, memory: str, config_dirs: Sequence[str]) -> tuple[Taken, Prepared]:
    """A run that goes on with the first of its layouts that fits, its folder written and its lock held. Raises as
    `first_that_fits`."""
    composed = recompose(read_run(folder).recipe, str(folder / "recipe.json"), (), config_dirs)

    def prepare(option: LayoutOption) -> Prepared:
        recipe = option.composed.recipe
        origins = option.composed.origins
        return prepare_resume(folder, recipe, origins, target, memory=memory, kept=composed.recipe)

    return first_that_fits(layout_options(composed, config_dirs), target, prepare)


def prepare_new(
    composed: Composed, target: Target, folder: Path | None, *, memory: str, kept: Recipe | None = None
) -> Prepared:
    """A new run. `folder`: where it is to be, None for the place that the recipe says; another job may have made it.

    `kept`: the recipe that its folder keeps, where `composed` is one of the layouts that it may take.
    """
    facts = with_digest(gather_facts(composed.recipe))
    if folder is not None:
        facts = replace(facts, run_dir=str(folder))
    refused = partial(start_problems, target=target, origins=composed.origins, memory=memory)
    spec = resolve(composed.recipe, target, facts, composed.origins, refused=refused)
    refuse_no_address(spec)
    refuse_other_places(spec, is_new=True)
    warn(spec, target)
    companions = _companions_of_source(composed.recipe, spec)
    place = Path(spec.run_dir)
    if folder is None and composed.recipe.run_dir == AUTO:
        _tell_of_the_one_before(planned_run_dir(composed.recipe), place)
    lock = lock_new(place, goes_on=folder is not None)
    if lock is None:
        return prepare_resume(place, composed.recipe, composed.origins, target, memory=memory, kept=kept)
    with ExitStack() as stack:
        stack.callback(lock.release)
        keep_companions(place, companions)
        write_run(place, kept or composed.recipe, target, spec)
        stack.pop_all()
    return Prepared(place, spec, lock)


def _companions_of_source(recipe: Recipe, spec: Spec) -> dict[str, bytes]:
    """The tokenizer files that belong to the weights that a run begins with. None where its vocabulary is another one.

    CheckpointError: one can't be read, or is of another model.
    """
    if spec.weights_from is not None and spec.weights_from.vocab_size != spec.model.vocab_size:
        return {}
    if recipe.init.from_hf is not None:
        files = read_companions(Path(recipe.init.from_hf).resolve())
        refuse_other_vocabulary(files, vocab_size=spec.model.vocab_size, where=recipe.init.from_hf)
        return files
    if recipe.init.load is not None:
        return kept_companions(Path(recipe.init.load))
    return {}


def _tell_of_the_one_before(planned: Path, place: Path) -> None:
    """That a run of this name is there already, so that this one gets a number."""
    if place != planned and is_run(planned):
        text = f"{planned} holds a run of this name: this is another one, in {place}"
        print(printable(f"{text}; megaspec resume {planned} goes on with the first"))


def lock_new(place: Path, *, goes_on: bool) -> RunLock | None:
    """The lock of a run that is to be made. RecipeError: the folder is in use.

    None with `goes_on` (resume=auto) where another job has made the run since this one looked.
    """
    try:
        make_folder(place)
    except RecipeError:
        if goes_on and is_run(place):
            return None
        raise
    lock = RunLock(place).acquire()
    if not is_run(place):
        return lock
    lock.release()
    if not goes_on:
        make_folder(place)  # raises
    return None


def prepare_resume(
    folder: Path,
    recipe: Recipe,
    origins: dict[str, str],
    target: Target,
    *,
    memory: str,
    kept: Recipe | None = None,
) -> Prepared:
    """A run that goes on in its own folder, with what may change changed. `kept`: see `prepare_new`."""
    refuse_links(folder)
    lock = RunLock(folder).acquire()
    with ExitStack() as stack:
        stack.callback(lock.release)
        saved = read_run(folder, allows_gone=True)
        refuse_gone_kernels(saved, recipe, origins, command="resume")
        old = saved.spec
        refuse_weights_alone(folder, old)
        # what a kill left of a save may fill the disk: its ranks would remove it, behind what is written and moved here
        with suppress(OSError):
            remove_hidden(folder / CHECKPOINTS, "saving", "deleted")
        # what was saved elsewhere counts: the order of data goes on after the newest step
        # where it was saved, and what is to be kept from now on
        checkpoint = recipe.checkpoint.model_copy(update={"fallback_dir": old.checkpoint.fallback_dir})
        elsewhere = file_elsewhere(checkpoint.fallback_dir, folder, METRICS)
        losses = losses_by_step(folder / METRICS, checkpoint.best_by, elsewhere=elsewhere)
        # what stays elsewhere its ranks will tell: they look once more
        for line in adopt(folder, checkpoint, own_checkpoint(old), losses=losses).lines:
            print(printable(f"megaspec: {line}"), file=sys.stderr)
        refuse_lost_fork(folder, old)
        done = newest_step(folder)
        refuse_last_of_weights(folder, old, recipe.train.steps)
        is_finished = done == recipe.train.steps and has_ended_well(folder) and not _asks_for_more(old, recipe)
        refused = None
        if not is_finished:
            refused = partial(start_problems, target=target, origins=origins, memory=memory)
        facts = gather_facts(recipe, old.remote)
        spec = resume(old, recipe, target, facts, origins, done_steps=done, refused=refused)
        if is_finished:
            more = f"megaspec resume {folder} train.steps=N trains it to step N"
            print(printable(f"{folder} is finished: all {done:,} steps are done; {more}"))
        else:
            refuse_no_address(spec)
            refuse_other_places(spec, is_new=False)
            warn(spec, target)
        if done and not is_finished:
            gone = [one.key for one in saved.gone]
            print(printable(f"{folder} after step {done:,} {promise_of_change(old, spec, gone)}"))
        write_run(folder, kept or recipe, target, spec)
        stack.pop_all()
    return Prepared(folder, spec, lock, is_finished)


def _asks_for_more(old: Spec, recipe: Recipe) -> bool:
    """Whether a run whose steps are all done has something left to do, by words that it had not: to evaluate its last
    step, or to write a text."""
    evaluates_now = old.train.eval_every == 0 and recipe.train.eval_every > 0
    writes_now = recipe.train.sample is not None and recipe.train.sample != old.train.sample
    return evaluates_now or writes_now


def refuse_no_address(spec: Spec) -> None:
    """RecipeError: the variable with the webhook's address is not set, or holds none. Before a folder is made: the next
    start, with the variable, is to train in it."""
    if spec.log.webhook is not None:
        address_of(spec.log.webhook, os.environ)


def refuse_other_places(spec: Spec, *, is_new: bool) -> None:
    """Refuses places beside the run's folder before anything is written there or a rank started; whether they can be
    written its ranks will see.

    RecipeError: one is in the folder of a run. WriteError: another run's copies lie where this one is to copy its
    checkpoints to, or, where it `is_new`, anyone's; or it can't be looked there. UsageError: a package is missing.
    """
    checkpoint = spec.checkpoint
    run_dir = Path(spec.run_dir)
    if checkpoint.fallback_dir is not None:
        place = Path(checkpoint.fallback_dir)
        refuse_place_in_a_run("fallback_dir", checkpoint.fallback_dir, place, run_dir)
    if checkpoint.copy_to is None:
        return
    remote = Remote(checkpoint.copy_to, owner=owner_of(spec))
    if remote.is_local():
        refuse_place_in_a_run("copy_to", checkpoint.copy_to, Path(remote.root), run_dir)
    if not is_new and remote.is_claimed():
        return
    found = remote.holdings()
    refuse_copies_of_another(found, spec)
    if is_new and found:
        text = (
            f"checkpoint.copy_to={remote.url} holds copies of a run of this recipe, which one that starts anew would "
        )
        text += (
            f"overwrite; go on with that: megaspec checkpoint fetch {remote.url} --out RUN, then megaspec resume RUN; "
        )
        raise WriteError(f"{text}or name another URL")


def warn(spec: Spec, target: Target) -> None:
    """On stderr: that a run barely fits the GPUs' memory, and which sources of its data changed since."""
    warning = memory_warning(spec, target)
    if warning:
        print(printable(f"megaspec: {warning}"), file=sys.stderr)
    if isinstance(spec.data, IndexedSpec):
        from megaspec.data.source_sums import changes_at_start  # numpy, only where there are token files

        for part in spec.data.blend:
            if is_url(part.prefix):
                continue
            for change in changes_at_start(part.prefix):
                print(printable(f"megaspec: {change}"), file=sys.stderr)


def step_saved(folder: Path) -> int:
    """As `newest_step`, for who writes down how a start or an attempt ended: that a failing disk doesn't let
    checkpoints be looked at is told, and changes no end. The step is then the one that was written down last."""
    try:
        return newest_step(folder)
    except MegaspecError as error:
        print(
            printable(f"megaspec: {error}; which step is saved can't be seen", keep="\n"), file=sys.stderr, flush=True
        )
    former = exit_file.read_exit(folder)
    return 0 if former is None else former.step


def _ended(prepared: Prepared, code: int, *, gives_up: bool = True) -> int:
    """Writes how this start ended into the run's folder while it is this job's. -> the code to end with."""
    assert prepared.lock is not None, "a run without its lock"
    if not prepared.lock.is_ours():
        return code
    return exit_file.end(prepared.folder, code, step=step_saved(prepared.folder), gives_up=gives_up)


def _record(folder: Path) -> None:
    """What the run is made with, and that it is under way, in place of how it ended before."""
    exit_file.begin(folder, step=step_saved(folder))
    record_environment(folder)


def record_environment(folder: Path) -> None:
    """Keeps what the run is made with in its folder: versions, GPUs, commits, and this command line without secrets."""
    words = {"train", "resume", "--fork", "--config-dir", "--plugin", "--supervise", *loaded(), str(folder)}
    try:
        write_environment(folder, command=sys.argv, words=words, sections={*Recipe.model_fields, "recipe", "resume"})
    except WriteError as error:
        if not is_of_disk(error):
            raise
        # a disk that is full or fails costs the record, never the run
        print(printable(f"megaspec: {error}; the run goes on without it"), file=sys.stderr, flush=True)


def _show(spec: Spec, target: Target) -> None:
    print_plan(spec, target, terminal(), data=data_in_words(spec.data, spec.remote))
