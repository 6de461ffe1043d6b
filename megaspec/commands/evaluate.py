"""`megaspec eval RUN a.b=c ...`: the loss of a run's checkpoint on its evaluation sets, or on others."""

import argparse
import json
import math
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from megaspec.commands.planned import refuse_jobs
from megaspec.compose.compose import recompose
from megaspec.compose.words import take
from megaspec.core.errors import COMMAND_LINE, Problem, RecipeError
from megaspec.core.terminal import escape, terminal
from megaspec.data.fetch import bring_here
from megaspec.estimate.target import Target, detect_target
from megaspec.plugins import loaded
from megaspec.resolve.gather import gather_facts
from megaspec.resolve.resume import resume
from megaspec.rules.run_facts import Facts
from megaspec.run_folder import SavedRun, read_run, refuse_gone_kernels, refuse_no_checkpoint
from megaspec.search.fits import MEMORY, start_problems
from megaspec.spec import Spec
from megaspec_launchers.local import launch

_ENTRY = "megaspec.runtime.evaluation_rank:main"
_FILES = ("trained.json", "evaluated.json")


def add_parser(commands: Any) -> None:
    """The parser of `eval`."""
    text = "the loss of a run's checkpoint on its evaluation sets, or on others"
    command = commands.add_parser("eval", help=text, description=text, allow_abbrev=False)
    command.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    command.add_argument(
        "words", nargs="*", default=[], metavar="a.b=c", help="path=value, such as another layout or data.valid"
    )
    text = "evaluate on these token files, and on no other set; may be given again"
    command.add_argument("--data", action="append", default=[], metavar="NAME=PREFIX", help=text)
    command.add_argument("--step", type=int, metavar="N", help="step of the checkpoint (the newest good one)")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("--config-dir", action="append", default=[], metavar="DIR", help="more groups")


def run(args: argparse.Namespace) -> int:
    """Resolve the run anew for this machine, start ranks that only evaluate, print what they found."""
    saved = read_run(args.run, allows_gone=True)
    refuse_no_checkpoint(saved, args.step)
    spec = evaluation_spec(saved, args, detect_target())
    folder = Path(tempfile.mkdtemp(prefix="megaspec-eval-"))
    trained, evaluated = (folder / name for name in _FILES)
    try:
        (folder / "spec.json").write_text(spec.model_dump_json())
        trained.write_text(saved.spec.model_dump_json())
        bring_here(spec.data, spec.remote, with_training=False)
        code = launch(
            str(folder),
            ranks=spec.world_size,
            entry=_ENTRY,
            grace_seconds=spec.launcher.grace_seconds,
            timeout_seconds=spec.launcher.timeout_seconds,
            arguments={"step": args.step, "plugins": loaded()},
        )
        if code:
            return code
        found = json.loads(evaluated.read_text())
    finally:
        shutil.rmtree(folder)
    if args.json:
        print(json.dumps({"run": str(args.run), "world_size": spec.world_size, **_finite(found)}, indent=1))
    else:
        show(found)
    return 0


def evaluation_spec(saved: SavedRun, args: argparse.Namespace, target: Target) -> Spec:
    """The run on this machine, with an optimizer that keeps nothing. Raises what `resume` does."""
    memory, words = take(args.words, "memory", MEMORY)
    recipe = saved.recipe
    if args.data:
        # these alone: a word may still say more of one
        recipe = json.loads(json.dumps(recipe))
        recipe["data"]["valid"] = dict(_named_prefix(text) for text in args.data)
    # whatever the run does: here it is asked to evaluate
    composed = recompose(recipe, str(args.run / "recipe.json"), [*words, "train.eval_every=1"], args.config_dir)
    refuse_gone_kernels(saved, composed.recipe, composed.origins, command="eval")
    refuse_jobs(composed.recipe, composed.origins, "eval")
    facts = gather_facts(composed.recipe, saved.spec.remote)
    if composed.recipe.data.valid:
        facts = _without_training_data(facts)
    spec = resume(saved.spec, composed.recipe, target, facts, composed.origins)
    fields = spec.model_dump(mode="json")
    fields["optim"] = {"kind": "sgd", "lr": spec.optim.lr, "momentum": 0.0, "schedule": fields["optim"]["schedule"]}
    fields["parallelism"]["offload"]["optimizer"] = 0.0
    fields["kernels"]["adamw"] = "torch"
    spec = Spec.model_validate_json(json.dumps(fields))
    problems = start_problems(spec, target=target, origins=composed.origins, memory=memory)
    if problems:
        raise RecipeError(problems)
    return spec


def _named_prefix(text: str) -> tuple[str, str]:
    name, sign, prefix = text.partition("=")
    if not (name and sign and prefix):
        what = f"--data {text}: must be NAME=PREFIX, such as --data web=data/web"
        raise RecipeError([Problem("data.valid", what, COMMAND_LINE, "key.type")])
    return name, prefix


def _without_training_data(facts: Facts) -> Facts:
    """Facts in which the training data may be missing or changed: sets of their own are read."""
    problems = [problem for problem in facts.problems if problem.key.startswith("data.valid.")]
    return replace(facts, problems=tuple(problems), fingerprint="")


def show(found: dict[str, Any]) -> None:
    """A row for each set, and the mean of several."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(f"step {found['step']}", justify="left")
    for name in ("loss", "perplexity", "tokens", "sequences"):
        table.add_column(name, justify="right")
    for name, one in found["sets"].items():
        counts = (f"{one['tokens']:,}", f"{one['sequences']:,}")
        table.add_row(escape(name), f"{one['loss']:.6f}", _perplexity(one["loss"]), *counts)
    if len(found["sets"]) > 1:
        table.add_row("mean of the sets", f"{found['valid_loss']:.6f}", "", "", "")
    terminal().print(table)


def _perplexity(loss: float) -> str:
    if not loss < 20:
        return "over 10^8"
    return f"{math.exp(loss):.2f}"


def _finite(content: Any) -> Any:
    """Plain data with null for numbers that are not finite, which JSON has not."""
    if isinstance(content, dict):
        return {name: _finite(one) for name, one in content.items()}
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content
