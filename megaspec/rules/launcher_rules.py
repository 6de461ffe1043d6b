"""Rules about how a run is started again."""

from megaspec.core.errors import Problem
from megaspec.launcher.spec import SEARCH
from megaspec.rules.case import Case

KEY = "launcher.layouts"
# What a layout of the list may set: how the work is divided, never what is computed.
LAYOUT_SECTIONS = ("parallelism", "kernels")
LAYOUT_KEYS = ("launcher.ranks", "train.micro_batch")


def first_wait_is_shortest(case: Case) -> Problem | None:
    """The first wait before a restart is at most the longest."""
    restarts = case.recipe.launcher.restarts
    first = restarts.first_wait_seconds
    longest = restarts.longest_wait_seconds
    if first <= longest:
        return None
    text = f"launcher.restarts.first_wait_seconds={first:g} must be at most"
    text += f" launcher.restarts.longest_wait_seconds={longest:g}; lower it, or raise the longest"
    return Problem("launcher.restarts.first_wait_seconds", text)


def layouts_divide_the_work_alone(case: Case) -> Problem | None:
    """A layout of the list says how the work is divided, not what is computed."""
    layouts = case.recipe.launcher.layouts
    if layouts == SEARCH:
        return None
    for number, words in enumerate(layouts):
        for word in words:
            path, equals, _ = word.partition("=")
            is_layout = path.partition(".")[0] in LAYOUT_SECTIONS or path in LAYOUT_KEYS
            if equals and is_layout:
                continue
            text = f"{KEY}.{number}: {word} is no layout: keys of parallelism and kernels, launcher.ranks and"
            text += " train.micro_batch may stand there; drop it, or set it for the whole run"
            return Problem(KEY, text)
    return None


def layouts_are_told_apart(case: Case) -> Problem | None:
    """Each layout of the list stands there once."""
    layouts = case.recipe.launcher.layouts
    if layouts == SEARCH:
        return None
    for number, words in enumerate(layouts):
        if words in layouts[:number]:
            return Problem(KEY, f"{KEY}.{number}: [{', '.join(words)}] stands in the list twice; drop it")
    return None
