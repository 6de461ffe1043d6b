"""Rules about when checkpoints are saved, and which of them stay."""

import os

from megaspec.core.errors import Problem
from megaspec.core.problems import one_of
from megaspec.core.remote_files import local_path, unknown_scheme, wrong_in_url
from megaspec.data.spec import evaluation_sets
from megaspec.rules.case import Case

APART = "folder-apart"
"""Code of the rule that a run's other places lie outside its folder, also where only the disk tells."""


def keeping_all_leaves_nothing_to_choose(case: Case) -> Problem | None:
    """Where every checkpoint is kept, none is chosen."""
    spec = case.recipe.checkpoint
    if spec.keep != "all":
        return None
    for name in ("keep_every", "keep_best"):
        value = getattr(spec, name)
        if value:
            key = f"checkpoint.{name}"
            return Problem(key, f"{key}={value} chooses what checkpoint.keep=all keeps anyway; set it to 0")
    return None


def steps_that_are_kept_are_saved(case: Case) -> Problem | None:
    """A checkpoint that is kept for its step has to be saved there."""
    spec = case.recipe.checkpoint
    if not spec.keep_every:
        return None
    key = "checkpoint.keep_every"
    if not spec.every:
        return Problem(key, f"{key}={spec.keep_every} needs checkpoints between: set checkpoint.every, or it to 0")
    if spec.keep_every % spec.every:
        nearest = spec.every * max(1, round(spec.keep_every / spec.every))
        text = f"{key}={spec.keep_every} must be a multiple of checkpoint.every={spec.every}; try {nearest}"
        return Problem(key, text)
    return None


def best_checkpoints_are_evaluated(case: Case) -> Problem | None:
    """The best checkpoints are found by an evaluation of each."""
    spec = case.recipe.checkpoint
    eval_every = case.recipe.train.eval_every
    if not spec.keep_best:
        return None
    key = "checkpoint.keep_best"
    if not spec.every:
        return Problem(
            key, f"{key}={spec.keep_best} needs checkpoints to choose from: set checkpoint.every, or it to 0"
        )
    if not eval_every:
        text = f"{key}={spec.keep_best} chooses by evaluations, and train.eval_every=0 makes none"
        return Problem(key, f"{text}; set train.eval_every={spec.every}, or {key}=0")
    if spec.every % eval_every:
        text = f"{key}={spec.keep_best}: checkpoint.every={spec.every} must be a multiple of "
        text += f"train.eval_every={eval_every}"
        return Problem(key, f"{text}, so that each checkpoint is evaluated; try train.eval_every={spec.every}")
    return None


def best_is_by_a_set_that_is_there(case: Case) -> Problem | None:
    """What is best is said by the mean of the evaluation sets, or by one of them."""
    spec = case.recipe.checkpoint
    key = "checkpoint.best_by"
    if spec.best_by == "mean":
        return None
    if not spec.keep_best:
        return Problem(key, f"{key}={spec.best_by} chooses nothing while checkpoint.keep_best=0; set it to mean")
    names = ["mean", *evaluation_sets(case.recipe.data)]
    if spec.best_by not in names:
        return Problem(key, f"{key}={spec.best_by} must be an evaluation set of this run, or mean; try {one_of(names)}")
    return None


def another_place_is_tried(case: Case) -> Problem | None:
    """Another place to save is of use where a save that failed is tried again."""
    spec = case.recipe.checkpoint
    if spec.fallback_dir is None or spec.retries:
        return None
    key = "checkpoint.retries"
    return Problem(key, f"{key}=0 never tries checkpoint.fallback_dir={spec.fallback_dir}; set it to 1, or drop that")


def no_secret_in_a_url(case: Case) -> Problem | None:
    """The URL of copies holds no user and no password: recipes and run folders are read by others."""
    url = case.recipe.checkpoint.copy_to
    if url is None:
        return None
    wrong = wrong_in_url(url, example="s3://bucket/run")
    if not wrong:
        return None
    return Problem("checkpoint.copy_to", f"checkpoint.copy_to={wrong}")


def copies_go_where_fsspec_reaches(case: Case) -> Problem | None:
    """The URL of copies has a scheme that fsspec knows, and names what outlives the process that copies."""
    url = case.recipe.checkpoint.copy_to
    # what is no URL is told by itself
    if url is None or wrong_in_url(url, example=""):
        return None
    wrong = unknown_scheme(url)
    if "memory" in url.partition("://")[0].split("::"):
        wrong = "memory:// is that of one process, and gone with it; try s3://"
    if not wrong:
        return None
    return Problem("checkpoint.copy_to", f"checkpoint.copy_to={url}: {wrong}")


def other_places_are_outside_the_run(case: Case) -> Problem | None:
    """What is saved or copied elsewhere lies outside the run's own folder."""
    spec = case.recipe.checkpoint
    places = {"fallback_dir": spec.fallback_dir}
    if spec.copy_to is not None:
        places["copy_to"] = local_path(spec.copy_to)
    run_dir = _absolute(case.recipe.run_dir, case)
    for name, place in places.items():
        if place is not None and is_inside(_absolute(place, case), run_dir):
            value = getattr(spec, name)
            return Problem(f"checkpoint.{name}", inside_the_run(name, value, case.recipe.run_dir))
    return None


def _absolute(path: str, case: Case) -> str:
    """A path without `..`, as far as no file is looked at; relative where nobody knows the folder of the start."""
    return os.path.normpath(os.path.join(case.facts.started_in, path))


def is_inside(path: str, folder: str) -> bool:
    """Whether a path is a folder, or below it. Both absolute, or both relative; of one each nothing is known."""
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def inside_the_run(name: str, value: str, run_dir: str) -> str:
    """What is wrong with a place inside the run's own folder."""
    text = (
        f"checkpoint.{name}={value} is in run_dir={run_dir}, the run's own folder: what is lost with that is lost there"
    )
    return f"{text}, too; set it to a folder outside, or drop it"
