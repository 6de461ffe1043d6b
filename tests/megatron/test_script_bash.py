"""Scripts as people write them, beside what bash does with them: the words are the same, or the script is refused."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megaspec.core.errors import RecipeError
from megaspec.megatron.script import script_words

BASH = shutil.which("bash")
ARGUMENTS = ("out/run 1", "7", "")
LAUNCHERS = ("torchrun", "python")
# Prints the words that it is started with.
RECORDS = """#!/bin/sh
printf '%s\\0' "${0##*/}" "$@" >> "$RECORDED"
printf '\\n\\0' >> "$RECORDED"
"""
# Launchers that start their command as the real ones do: with the environment, on another machine, in a container.
SRUN = '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nexec "$@"\n'
SSH = '#!/bin/sh\nshift\nexec env -i PATH="$PATH" RECORDED="$RECORDED" sh -c "$*"\n'
DOCKER = '#!/bin/sh\nshift 2\nexec env -i PATH="$PATH" RECORDED="$RECORDED" "$@"\n'
STUBS = {"torchrun": RECORDS, "python": RECORDS, "srun": SRUN, "ssh": SSH, "docker": DOCKER}

# So many are followed; the rest is refused, or holds a variable that is left for the user to give.
LEAST_FOLLOWED = 62


def scripts() -> dict[str, str]:
    """Name -> text; a heading stands in front of each."""
    text = Path(__file__).with_name("scripts.txt").read_text()
    named: dict[str, str] = {}
    for section in re.split(r"(?m)^=== ", text)[1:]:
        heading, _, script = section.partition("\n")
        named[heading] = script
    return named


SCRIPTS = scripts()


def run_by_bash(text: str, folder: Path) -> list[list[str]]:
    """The commands that a script starts a stub with."""
    assert BASH is not None, "bash is what the reading is compared with"
    stubs = folder / "stubs"
    stubs.mkdir()
    for name, content in STUBS.items():
        (stubs / name).write_text(content)
        (stubs / name).chmod(0o755)
    work = folder / "work"
    work.mkdir()
    (work / "train.sh").write_text(text)
    recorded = folder / "recorded"
    recorded.touch()
    environment = {"PATH": f"{stubs}:{os.defpath}", "HOME": str(folder), "RECORDED": str(recorded)}
    subprocess.run(
        [BASH, "train.sh", *ARGUMENTS],
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=20,
        check=False,
    )
    commands: list[list[str]] = []
    for record in recorded.read_text().split("\n\0")[:-1]:
        commands.append(record.split("\0")[:-1])
    return commands


def followed(text: str) -> list[str] | None:
    """The words that a script is read as, from the launcher on. None: it is refused, or asks for a variable."""
    try:
        words = script_words(text, label="train.sh", arguments=ARGUMENTS).words
    except RecipeError:
        return None
    begin = next(n for n, word in enumerate(words) if word in LAUNCHERS)
    return words[begin:]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_refused_or_read_word_for_word_as_by_bash(name, tmp_path):
    ours = followed(SCRIPTS[name])
    commands = run_by_bash(SCRIPTS[name], tmp_path)
    if ours is None:
        return
    n_certain = left_open(ours, commands)
    if n_certain is not None:
        assert all(command[:n_certain] == ours[:n_certain] for command in commands)
        return
    # one that is started several times is several trainings
    assert [ours] == commands


def left_open(ours: list[str], commands: list[list[str]]) -> int | None:
    """Where the first word stands that is a variable that from-megatron asks for; None: none is."""
    theirs = [word for command in commands for word in command]
    for n, word in enumerate(ours):
        if "$" in word and word not in theirs:
            return n
    return None


def test_most_scripts_are_followed():
    n_followed = 0
    for text in SCRIPTS.values():
        ours = followed(text)
        n_followed += ours is not None and not any("$" in word for word in ours)
    assert n_followed >= LEAST_FOLLOWED
