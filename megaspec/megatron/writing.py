"""A draft as the YAML of a recipe, with a comment for every flag that sets no key."""

import textwrap
from typing import Any

import yaml

from megaspec.megatron.draft import Draft
from megaspec.megatron.flag import COMMIT, COMMIT_DATE, Fate
from megaspec.megatron.flags import BY_NAME

_WIDTH = 110
_ORDER = ("model", "parallelism", "precision", "data", "train", "optim", "checkpoint", "log", "launcher")
_ANYWAY = "what is done here anyway"
_SOURCE = f"Flags of a Megatron-LM command, read as at commit {COMMIT[:8]} ({COMMIT_DATE})"
_NO_EFFECT = "says nothing in this command"


def recipe_text(draft: Draft, *, name: str | None = None) -> str:
    """The recipe. `name`: of the run; None: that of the file."""
    gpus = f"{draft.gpus:,} GPU{'' if draft.gpus == 1 else 's'}"
    lines = [
        f"# From the flags of a pretrain_gpt.py command, for {gpus}. {_counted(draft)}",
        f"# What flags mean, and their defaults: those of NVIDIA/Megatron-LM at commit {COMMIT[:8]} ({COMMIT_DATE}).",
    ]
    lines += _told("How the command was read", [(note, "") for note in draft.command.notes])
    lines += _told("What Megatron changes without a word", draft.silent)
    lines += _told("Lost: this recipe trains something else", [(p.message, "") for p in draft.lost])
    lines += _told("No key of this recipe", _without_key(draft))
    lines += ["defaults:"] if draft.choices else []
    lines += [f"  - override /{group}: {choice}" for group, choice in sorted(draft.choices.items())]
    lines += [f"name: {name}"] if name else []
    for section in _ORDER:
        if section in draft.content:
            lines += [f"{section}:", *_section(draft, section, draft.content[section], 1)]
    return "\n".join([*lines, "about:", f"  source: {_SOURCE}", ""])


def _counted(draft: Draft) -> str:
    n_lost = f", {len(draft.lost)} lost" if draft.lost else ""
    return f"{len(draft.command.values)} flags{n_lost}; {len(_without_key(draft))} set no key."


def _told(heading: str, entries: list[tuple[str, str]]) -> list[str]:
    """A list in comments; flags with the same reason share a line."""
    by_reason: dict[str, list[str]] = {}
    for name, why in entries:
        by_reason.setdefault(why, []).append(name)
    lines = []
    for why, names in by_reason.items():
        for text in [", ".join(names) + f": {why}"] if why else names:
            plain = "".join(c if c.isprintable() else "?" for c in text)
            wrapped = textwrap.wrap(plain, _WIDTH, break_long_words=False, break_on_hyphens=False)
            lines += [f"#   {'  ' if n else ''}{line}" for n, line in enumerate(wrapped)]
    return [f"# {heading}:", *lines] if lines else []


def _without_key(draft: Draft) -> list[tuple[str, str]]:
    """Given flags that set no key, and why; those that are told elsewhere left out."""
    told = {name for name, _ in draft.silent} | {p.message.split()[0].rstrip(":") for p in draft.lost}
    told |= {word.rstrip(",;") for remark in draft.remarks.values() for word in remark.split()}
    entries = []
    for name in draft.command.values:
        flag = BY_NAME[name]
        if name in told:
            continue
        if flag.fate is Fate.TRANSLATED:
            entries.append((name, draft.notes.get(name) or (_ANYWAY if name in draft.used else _NO_EFFECT)))
        elif flag.fate is Fate.DETAIL:
            entries.append((name, f"belongs to {flag.text}"))
        else:
            entries.append((name, _ANYWAY if flag.fate is Fate.LOST else flag.reason))
    return entries


def _section(draft: Draft, path: str, content: dict[str, Any], depth: int) -> list[str]:
    lines = []
    for name, value in content.items():
        key, indent = f"{path}.{name}", "  " * depth
        if isinstance(value, dict) and key not in draft.remarks:
            lines += [f"{indent}{name}:", *_section(draft, key, value, depth + 1)]
        else:
            remark = draft.remarks.get(key, "")
            lines.append(f"{indent}{name}: {_flow(value)}{f'  # {remark}' if remark else ''}")
    return lines


def _flow(value: Any) -> str:
    """A value on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
