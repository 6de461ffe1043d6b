"""Facts from disk: manifests of the data, and which run folders exist. Torch-free."""

from pathlib import Path

from megaspec.core.frozen import AUTO
from megaspec.data.facts import data_facts, evaluation_facts
from megaspec.recipe import Recipe
from megaspec.rules.run_facts import Facts, SetFacts

RUNS = Path("runs")


def gather_facts(recipe: Recipe) -> Facts:
    """What the resolver has to know about a recipe's data and run folder. What is wrong with the data is told in
    `problems`, never raised."""
    data = data_facts(recipe.data)
    run_dir = str(free_run_dir(recipe.name))
    problems = list(data.problems)
    sets = {}
    for name, facts in evaluation_facts(recipe.data, data).items():
        problems += facts.problems
        if not facts.problems:
            sets[name] = SetFacts(facts.vocab_size, facts.samples["valid"])
    if data.problems:
        # a tokenizer may be known beside documents that can't be read
        return Facts(run_dir=run_dir, vocab_size=data.vocab_size, valid_sets=sets, problems=tuple(problems))
    return Facts(
        run_dir=run_dir,
        vocab_size=data.vocab_size,
        train_tokens=data.tokens["train"],
        train_samples=data.samples["train"],
        valid_tokens=data.tokens["valid"],
        valid_sets=sets,
        fingerprint=data.fingerprint,
        problems=tuple(problems),
    )


def free_run_dir(name: str) -> Path:
    """runs/<name>, or with the first number that makes it new: runs/<name>-2, -3, ..."""
    folder = RUNS / name
    number = 1
    while folder.exists():
        number += 1
        folder = RUNS / f"{name}-{number}"
    return folder


def planned_run_dir(recipe: Recipe) -> Path:
    """The run folder that a restarted job has to find again: the one that is set, else runs/<name>."""
    if recipe.run_dir == AUTO:
        return RUNS / recipe.name
    return Path(recipe.run_dir)
