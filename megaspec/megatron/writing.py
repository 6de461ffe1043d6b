"""A draft as the YAML of a recipe, with a comment for every flag that sets no key."""

import textwrap
from typing import Any

from megaspec.core.units import plural
from megaspec.core.yaml_text import flow
from megaspec.megatron.draft import RecipeDraft
from megaspec.megatron.flag import COMMIT, COMMIT_DATE, Fate
from megaspec.megatron.flags import BY_NAME

# Characters of a line of comments, without its indent.
_WIDTH = 110
_ORDER = ("model", "parallelism", "precision", "data", "train", "optim", "checkpoint", "log", "launcher")
# Why flags set no key, where the table of flags gives no reason.
_ANYWAY = "what is done here anyway"
_SOURCE = f"Flags of a Megatron-LM command, read as at commit {COMMIT[:8]} ({COMMIT_DATE})"
_NO_EFFECT = "says nothing in this command"


def recipe_text(draft: RecipeDraft, *, name: str | None = None) -> str:
    """The recipe. `name`: of the run; None: that of the file."""
    gpus = f"{draft.gpus:,} {plural('GPU', draft.gpus)}"
    lines = [
        f"# From the flags of a pretrain_gpt.py command, for {gpus}. {_counted(draft)}",
        f"# What flags mean, and their defaults: those of NVIDIA/Megatron-LM at commit {COMMIT[:8]} ({COMMIT_DATE}).",
    ]
    lines += _told("How the command was read", [(note, "") for note in draft.command.notes])
    lines += _told("What Megatron changes without a word", draft.silent)
    lines += _told("Lost: this recipe trains something else", [(problem.message, "") for problem in draft.lost])
    lines += _told("No key of this recipe", _without_key(draft))
    if draft.choices:
        lines.append("defaults:")
        for group, choice in sorted(draft.choices.items()):
            lines.append(f"  - override /{group}: {choice}")
    if name:
        lines.append(f"name: {name}")
    for section in _ORDER:
        if section in draft.content:
            lines += [f"{section}:", *_section(draft, section, draft.content[section], 1)]
    return "\n".join([*lines, "about:", f"  source: {_SOURCE}", ""])


def _counted(draft: RecipeDraft) -> str:
    """`31 flags, 2 lost; 5 set no key.`"""
    text = f"{len(draft.command.values)} flags"
    if draft.lost:
        text += f", {len(draft.lost)} lost"
    return f"{text}; {len(_without_key(draft))} set no key."


def _told(heading: str, entries: list[tuple[str, str]]) -> list[str]:
    """A list in comments, of names and reasons; names with the same reason share a line. Without a reason "", a name is
    a line of its own."""
    names_of: dict[str, list[str]] = {}
    for name, reason in entries:
        names_of.setdefault(reason, []).append(name)
    lines: list[str] = []
    for reason, names in names_of.items():
        if reason:
            lines += _comment(f"{', '.join(names)}: {reason}")
            continue
        for name in names:
            lines += _comment(name)
    if not lines:
        return []
    return [f"# {heading}:", *lines]


def _comment(text: str) -> list[str]:
    """A text as lines of a comment, those behind the first one further in."""
    # a line break from a command line must not end the comment
    plain = "".join(character if character.isprintable() else "?" for character in text)
    lines = []
    indent = "#   "
    for line in textwrap.wrap(plain, _WIDTH, break_long_words=False, break_on_hyphens=False):
        lines.append(f"{indent}{line}")
        indent = "#     "
    return lines


def _without_key(draft: RecipeDraft) -> list[tuple[str, str]]:
    """Given flags that set no key, and why; those that are told elsewhere left out."""
    told = _told_elsewhere(draft)
    entries = []
    for name in draft.command.values:
        if name not in told:
            entries.append((name, _why_no_key(draft, name)))
    return entries


def _told_elsewhere(draft: RecipeDraft) -> set[str]:
    """The flags that stand in another list, or behind a value of the recipe."""
    told = {name for name, _ in draft.silent}
    told |= {problem.message.split()[0].rstrip(":") for problem in draft.lost}
    for remark in draft.remarks.values():
        told |= {word.rstrip(",;") for word in remark.split()}
    return told


def _why_no_key(draft: RecipeDraft, name: str) -> str:
    """Why a flag sets no key."""
    flag = BY_NAME[name]
    if flag.fate is Fate.DETAIL:
        return f"belongs to {flag.text}"
    if flag.fate is Fate.LOST:
        return _ANYWAY
    if flag.fate is not Fate.TRANSLATED:
        return flag.reason
    note = draft.notes.get(name)
    if note:
        return note
    if name in draft.used:
        return _ANYWAY
    return _NO_EFFECT


def _section(draft: RecipeDraft, path: str, content: dict[str, Any], depth: int) -> list[str]:
    """The lines of a section, with what is remarked about a key behind its value."""
    indent = "  " * depth
    lines = []
    for name, value in content.items():
        key = f"{path}.{name}"
        remark = draft.remarks.get(key)
        if isinstance(value, dict) and remark is None:
            lines += [f"{indent}{name}:", *_section(draft, key, value, depth + 1)]
            continue
        line = f"{indent}{name}: {flow(value)}"
        if remark:
            line += f"  # {remark}"
        lines.append(line)
    return lines
