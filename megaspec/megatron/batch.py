"""The options in a batch script's `#SBATCH` lines, as sbatch reads them."""

import shlex

from megaspec.megatron.shell import Source

_MAGIC = "#SBATCH"
# Behind such a line stand the options of another part of the job; srun starts its tasks in the first one.
_PARTS = ("hetjob", "packjob")


def directives(source: Source) -> list[str]:
    """The options of all lines in front of the first command. RecipeError: a quote is missing.

    sbatch stops reading at the first line that is neither empty nor a comment, and takes the rest of a line behind a
    plain `#` for a comment.
    """
    words: list[str] = []
    for number, line in enumerate(source.text.split("\n"), start=1):
        if not line.startswith(_MAGIC):
            if line.strip() and not line.lstrip().startswith("#"):
                break
            continue
        reader = shlex.shlex(line.removeprefix(_MAGIC), posix=True)
        reader.whitespace_split = True
        try:
            options = list(reader)
        except ValueError:
            source.refuse(number, "a quote is missing, or a backslash ends the line")
        if options and options[0] in _PARTS:
            break
        words += options
    return words
