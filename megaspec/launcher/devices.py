"""Which devices a supervised run may use: what is there, less what is taken away or suspected. Torch-free.

A file `devices` in the run's folder, where there is one, names those that may be used, with commas or spaces between
them: numbers as nvidia-smi counts them, or identifiers such as GPU-8a1f... . A person, or a program that watches the
health of devices, changes it while the run is under way. Without a GPU each name stands for a place of one rank.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from megaspec.core.errors import Problem, RecipeError
from megaspec.core.problems import show
from megaspec.core.regular_files import read_inside

DEVICES = "devices"
_LIMIT = 1 << 16
_NAME = re.compile(r"[0-9]{1,4}|(GPU|MIG)-[0-9A-Za-z-]{1,64}")


def named_devices(run_dir: Path) -> tuple[str, ...] | None:
    """Those that the file names, each once; None where there is no file. RecipeError: it can't be read, or names
    something else."""
    path = run_dir / DEVICES
    try:
        text = read_inside(run_dir, DEVICES, limit=_LIMIT).decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(f"{path} can't be read: {error}; write device numbers with commas, such as 0,1,2") from None
    names = [word for word in re.split(r"[,\s]+", text) if word]
    for name in names:
        if not _NAME.fullmatch(name):
            raise _wrong(f"{path}: {show(name)} is no device; write numbers or GPU-... with commas, such as 0,1,2")
    return tuple(dict.fromkeys(names))


def usable_devices(
    found: Sequence[str], named: Sequence[str] | None, avoided: Sequence[str | None]
) -> tuple[str, ...] | None:
    """Identifiers of the devices that a run may use, those to take first in front; None where nothing limits them.

    `found`: those of this machine, in the order of their numbers; () without a GPU. `named`: see `named_devices`.
    `avoided`: identifiers, or numbers, that are suspected; a None among them is the whole machine.
    """
    if None in avoided:
        return ()
    if not found and named is None:
        return None
    if named is None:
        chosen = list(found)
    elif not found:
        chosen = list(named)
    else:
        chosen = []
        for name in named:
            identifier = name
            if name.isdigit():
                if int(name) >= len(found):
                    continue  # gone, or never there
                identifier = found[int(name)]
            if identifier in found and identifier not in chosen:
                chosen.append(identifier)
    gone = {_identifier(name, found) for name in avoided if name is not None}
    return tuple(name for name in chosen if name not in gone)


def _identifier(name: str, found: Sequence[str]) -> str:
    """The identifier of a device that a person may have named by its number; the name itself where it is none of
    them."""
    if name.isdigit() and int(name) < len(found):
        return found[int(name)]
    return name


def _wrong(text: str) -> RecipeError:
    return RecipeError([Problem("", text, code="supervise-devices")])
