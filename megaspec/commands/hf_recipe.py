"""`megaspec hf recipe FOLDER --out FILE`: a recipe whose model is that of a folder of Hugging Face's."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from megaspec.core.errors import WriteError, printable
from megaspec.data.files import write_atomically
from megaspec.hf.folder import read_config
from megaspec.hf.short import short_section
from megaspec.hf.table import family_of, read_model


def add_parser(commands: Any) -> None:
    """The parser of `hf recipe`."""
    text = "write a recipe whose model is that of a Hugging Face folder; it needs no weights"
    command = commands.add_parser("recipe", help=text, description=text, allow_abbrev=False)
    command.add_argument("folder", metavar="FOLDER", type=Path, help="folder with a config.json")
    command.add_argument(
        "--out", required=True, metavar="FILE", type=Path, help="recipes/NAME.yaml, which is not there"
    )


def run(args: argparse.Namespace) -> int:
    """Write the recipe and say how to train it. Raises CheckpointError, WriteError."""
    config = read_config(args.folder)
    text = recipe_text(config, args.folder)
    if os.path.lexists(args.out):
        raise WriteError(f"{args.out} exists; name a file that does not, or remove it")
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(f"{args.out.parent} can't be made: {error.strerror}") from None
    write_atomically(args.out, [text.encode()])
    print(printable(f"{args.out}: megaspec train recipe={args.out.stem} init.from_hf={args.folder}"))
    return 0


def recipe_text(config: dict[str, Any], folder: Path) -> str:
    """The file. CheckpointError: what config.json says can't be said."""
    family = family_of(config, str(folder))
    model = read_model(config, f"{folder}/config.json")
    lines = [
        f"# The model of {json.dumps(str(folder))} ({family.model_type}), as megaspec hf recipe wrote it.",
        "# The tokens are random until you choose data: conf/README.md says how.",
        "defaults:",
        "  - override /data: random",
        "model:",
        *_yaml(short_section(model), "  "),
        "data:",
        f"  seq_len: {min(model.max_seq_len, 4096)}",
        "train:",
        "  steps: 1000",
        "  global_batch: 8",
        "about:",
        f"  purpose: Goes on from the weights of a {family.model_type} of Hugging Face's.",
    ]
    return "\n".join(lines) + "\n"


def _yaml(section: dict[str, Any], indent: str) -> list[str]:
    """A line for each key; sections below the first are written in one line, as JSON, which YAML reads."""
    lines = []
    for name, value in section.items():
        text = json.dumps(value)
        lines.append(f"{indent}{name}: {text}")
    return lines
