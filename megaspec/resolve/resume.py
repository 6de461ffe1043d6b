"""resume: a run's Spec and a changed recipe in, the Spec with which it goes on out. Pure.

What is free to change stands in difference.py. The rest is the experiment: it stays as it was decided when the run
began, even where the recipe says auto, and a change of it asks for a fork.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megaspec.core.errors import Problem, RecipeError
from megaspec.core.frozen import AUTO
from megaspec.core.problems import origin_of, show, value_at
from megaspec.data.spec import ORDER_VERSION, StreamSpec
from megaspec.data.stream_files import OTHER_FILES
from megaspec.estimate.target import Target
from megaspec.optim.schedule import learning_rate
from megaspec.recipe import Recipe
from megaspec.resolve.resolver import Refused, Settled, settle
from megaspec.rules.difference import changed, is_free, leaves
from megaspec.rules.run_facts import Facts, RunStart
from megaspec.spec import Decision, ForkPoint, Spec
from megaspec.train.batch_schedule import BatchSchedule


def resume(
    old: Spec,
    recipe: Recipe,
    target: Target,
    facts: Facts,
    origins: Mapping[str, str] | None = None,
    *,
    done_steps: int = 0,
    refused: Refused | None = None,
) -> Spec:
    """The Spec with which a run goes on in its own folder (`old.run_dir`).

    `recipe`: the run's recipe with the changes. `done_steps`: the step of its newest checkpoint. A longer run gets one
    more segment of the training order, so that no earlier sample moves; its schedule stays as it was. Where nothing
    comes out otherwise, `old` itself, with the reasons that it was decided for. RecipeError: all changes of the
    experiment at once, or what `resolve` raises.
    """
    origins = origins or {}
    problems = [_frozen_problem(key, was, now, origins) for key, was, now in changes(old, recipe)]
    problems += _too_short(recipe, done_steps, origins)
    problems += _profiles_what_is_done(old, recipe, done_steps, origins)
    problems += _other_data(old, facts, origins)
    problems += _earlier_order(old, origins)
    if problems:
        raise RecipeError(problems)
    pinned, kept = _pinned(old, recipe)
    kept_keys = frozenset(decision.key for decision in kept)
    # where its weights began is behind it
    facts = replace(facts, run_dir=old.run_dir, start=_start_of(old), weights=None)
    settled = settle(pinned, target, facts, origins, kept=kept_keys, has_begun=True, refused=refused)
    is_decided_anew = any(decision not in old.decisions for decision in settled.decisions)
    settled = replace(settled, decisions=(*settled.decisions, *kept))
    moved = old.samples_moved
    new = settled.spec(
        _longer(old.segments, settled, moved), moved=moved, forked_from=old.forked_from, weights_from=old.weights_from
    )
    # what was decided when the run began is now kept: the same values, for which only the reasons differ
    if not is_decided_anew and new.model_copy(update={"decisions": old.decisions}) == old:
        return old
    return new


def fork(
    old: Spec,
    recipe: Recipe,
    target: Target,
    facts: Facts,
    origins: Mapping[str, str] | None = None,
    *,
    done_steps: int = 0,
    done_samples: int = 0,
    forked_from: ForkPoint | None = None,
    refused: Refused | None = None,
) -> Spec:
    """The Spec of a new run that starts from a checkpoint of `old`: everything may change, and is resolved anew.

    With the same data, sequence length and seed it goes on in the same training order; otherwise it takes the new
    order from the sample at which the checkpoint stands: after `done_steps` steps, that many `done_samples`, whatever
    the batch was and is; another stream from its beginning. `forked_from`: that checkpoint. `facts.run_dir` is its
    folder. RecipeError: it would end before it begins, or what `resolve` raises.
    """
    problems = _too_short(recipe, done_steps, origins or {}) + _other_weights(old, recipe, origins or {})
    problems += _profiles_what_is_done(old, recipe, done_steps, origins or {})
    if problems:
        raise RecipeError(problems)
    start = RunStart(done_steps, learning_rate(old.optim.schedule, old.optim.lr, done_steps))
    settled = settle(recipe, target, replace(facts, start=start, weights=None), origins, refused=refused)
    new = settled.recipe
    is_same_data = _order(new) == _order(old) and facts.fingerprint == old.data_fingerprint
    segments: tuple[int, ...] = ()
    if is_same_data and not _earlier_order(old, {}):
        segments = old.segments
    # what the checkpoint's run had taken by that step, beyond what this run's batches would have
    moved = done_samples - BatchSchedule(new.train).consumed(done_steps)
    if isinstance(new.data, StreamSpec) and not is_same_data:
        # Another stream begins at its beginning: to be behind a sample, all before it would have to be tokenized.
        moved = -BatchSchedule(new.train).consumed(done_steps)
    longer = _longer(segments, settled, moved)
    return settled.spec(longer, moved=moved, forked_from=forked_from, weights_from=old.weights_from)


def changes(old: Spec, recipe: Recipe) -> list[tuple[str, Any, Any]]:
    """(path, value of the run, value of the recipe) of everything in the experiment that a recipe changes."""
    now = recipe.model_dump(mode="json")
    # a Spec says more than a recipe: its sections alone can change
    was = {name: value for name, value in old.model_dump(mode="json").items() if name in now}
    found = []
    for key, before, after in changed(was, now):
        # auto stays what it was decided to be
        if after != AUTO and not is_free(key, was, now):
            found.append((key, before, after))
    return found


def _start_of(run: Spec) -> RunStart:
    """With what a run began. The rate there is kept in its schedule, where that starts from it."""
    if isinstance(run.forked_from, ForkPoint):
        return RunStart(run.forked_from.step)
    return RunStart()


def _too_short(recipe: Recipe, done_steps: int, origins: Mapping[str, str]) -> list[Problem]:
    if recipe.train.steps >= done_steps:
        return []
    text = f"train.steps={recipe.train.steps} must be at least the {done_steps} that are done"
    return [Problem("train.steps", text, origin_of(origins, "train.steps"), "resume-steps")]


def _profiles_what_is_done(old: Spec, recipe: Recipe, done_steps: int, origins: Mapping[str, str]) -> list[Problem]:
    """Steps that are asked for now and can't be profiled any more. What the run began with is told when it starts."""
    steps = recipe.profile.steps
    if steps is None or steps == old.profile.steps or steps[0] > done_steps:
        return []
    text = f"profile.steps={show(list(steps))}: {done_steps} steps are done, and can't be profiled any more"
    first = done_steps + 1
    last = first + max(0, steps[1] - steps[0])
    if first <= recipe.train.steps:
        last = min(last, recipe.train.steps)
    text += f"; take later ones, such as [{first}, {last}]"
    if last > recipe.train.steps:
        text += f" with train.steps={last}"
    return [Problem("profile.steps", text, origin_of(origins, "profile.steps"), "resume-profile")]


def _other_weights(old: Spec, recipe: Recipe, origins: Mapping[str, str]) -> list[Problem]:
    """A fork begins with the weights of its checkpoint, so that nothing else can say where they begin."""
    problems = []
    for key, was, now in changed(old.init.model_dump(mode="json"), recipe.init.model_dump(mode="json"), "init"):
        text = f"{key}={show(now)}, the run has {show(was)}: a fork begins with the weights of its checkpoint; drop it,"
        text += " or start a new run with megaspec train"
        problems.append(Problem(key, text, origin_of(origins, key), "fork-weights"))
    return problems


def _other_data(old: Spec, facts: Facts, origins: Mapping[str, str]) -> list[Problem]:
    """Data of another content than the run began with, where both are known."""
    if not old.data_fingerprint or not facts.fingerprint or old.data_fingerprint == facts.fingerprint:
        return []
    if isinstance(old.data, StreamSpec):
        return [Problem("data", OTHER_FILES, origin_of(origins, "data"), "resume-data")]
    # of data with a manifest it is the manifest's word, of data without one the lengths of its documents
    text = "data: its content has changed since the run began, or a .manifest.json beside it has come or gone; "
    text += "put the old data back, or give --fork NAME"
    return [Problem("data", text, origin_of(origins, "data"), "resume-data")]


def _earlier_order(old: Spec, origins: Mapping[str, str]) -> list[Problem]:
    """A run whose samples come in an order that is no longer made."""
    if old.data_order == ORDER_VERSION:
        return []
    text = "data.blend: the run began in an order in which weights were divided by their sum once, this version "
    text += "divides them twice as Megatron does and would read other samples; end the run with the version that began "
    text += "it, or give --fork NAME to go on in the new order"
    return [Problem("data.blend", text, origin_of(origins, "data.blend"), "resume-order")]


def _frozen_problem(key: str, was: Any, now: Any, origins: Mapping[str, str]) -> Problem:
    text = f"{key}={show(now)} changes the experiment"
    if key == "train.micro_batch":
        text += ": experts are balanced within a micro batch"
    text += f", the run has {show(was)}; give --fork NAME to start another run from its newest checkpoint"
    return Problem(key, text, origin_of(origins, key), "resume-frozen")


def _pinned(old: Spec, recipe: Recipe) -> tuple[Recipe, tuple[Decision, ...]]:
    """The recipe with the experiment as it was decided, and the decisions that this keeps."""
    was = old.model_dump(mode="json")
    now = recipe.model_dump(mode="json")
    kept = []
    # a list, since `now` changes on the way
    for key, value in list(leaves(now)):
        if value != AUTO or is_free(key, was, now) or value_at(was, key) == AUTO:
            continue
        path, _, name = key.rpartition(".")
        section = now
        if path:
            section = value_at(now, path)
        section[name] = value_at(was, key)
        reason = "kept from the beginning of the run"
        if key == "optim.schedule.decay_steps" and recipe.train.steps > old.train.steps:
            reason += ": the rate is at its lowest from there on; a fork may stretch it"
        kept.append(Decision(key=key, value=value_at(was, key), reason=reason))
    now["run_dir"] = old.run_dir
    return Recipe.model_validate_json(json.dumps(now)), tuple(kept)


def _order(recipe: Recipe) -> dict[str, Any]:
    """What the training order is made from."""
    content = recipe.data.model_dump(mode="json")
    # where the index lies, how the data were made and who tokenizes, not what is in them
    content.pop("cache", None)
    # a line that is refused ends the run: what was read before it is the same whether such lines are skipped or not
    content.pop("bad_lines", None)
    content.pop("prepare", None)
    content.pop("workers", None)
    content.pop("download_dir", None)
    # what a plan believes of the documents
    content.pop("document_lengths", None)
    return content


def _longer(segments: tuple[int, ...], settled: Settled, moved: int) -> tuple[int, ...]:
    """The segments, with one more where the run needs more samples than they hold."""
    missing = settled.samples(moved) - sum(segments)
    if missing <= 0:
        return segments
    return (*segments, missing)
