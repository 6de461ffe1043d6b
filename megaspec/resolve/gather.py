"""Facts from disk: manifests of the data, and which run folders exist. Torch-free."""

from pathlib import Path

from megaspec.core.frozen import AUTO
from megaspec.data.facts import data_facts
from megaspec.recipe import Recipe
from megaspec.rules.run_facts import Facts

RUNS = Path("runs")


def gather_facts(recipe: Recipe) -> Facts:
    """What the resolver has to know about a recipe's data and run folder. What is wrong with the data is told in
    `problems`, never raised."""
    data = data_facts(recipe.data)
    return Facts(
        run_dir=str(free_run_dir(recipe.name)),
        vocab_size=data.vocab_size,
        train_tokens=None if data.problems else data.tokens["train"],
        train_samples=None if data.problems else data.samples["train"],
        valid_tokens=None if data.problems else data.tokens["valid"],
        fingerprint=data.fingerprint if not data.problems else "",
        problems=data.problems,
    )


def free_run_dir(name: str) -> Path:
    """runs/<name>, or with the first number that makes it new: runs/<name>-2, -3, ..."""
    folder, number = RUNS / name, 1
    while folder.exists():
        number += 1
        folder = RUNS / f"{name}-{number}"
    return folder


def planned_run_dir(recipe: Recipe) -> Path:
    """The run folder that a restarted job has to find again: the one that is set, else runs/<name>."""
    return RUNS / recipe.name if recipe.run_dir == AUTO else Path(recipe.run_dir)
