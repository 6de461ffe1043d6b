"""`megaspec hf recipe FOLDER --out FILE`: a recipe whose model is that of a folder of Hugging Face's."""

import argparse
import json
from pathlib import Path
from typing import Any

from megaspec.checkpoint.files import refuse_existing
from megaspec.core.errors import WriteError, printable
from megaspec.data.files import write_atomically
from megaspec.hf.folder import read_config
from megaspec.hf.hub import described, local_folder
from megaspec.hf.short import short_section
from megaspec.hf.table import family_of, read_model


def add_parser(commands: Any) -> None:
    """The parser of `hf recipe`."""
    text = "write a recipe whose model is that of a Hugging Face folder; it needs no weights"
    command = commands.add_parser("recipe", help=text, description=text, allow_abbrev=False)
    command.add_argument("folder", metavar="FOLDER", help="folder with a config.json, or ORG/NAME on the hub")
    command.add_argument(
        "--out", required=True, metavar="FILE", type=Path, help="recipes/NAME.yaml, which is not there"
    )
    command.add_argument("--revision", metavar="REV", help="branch, tag or commit on the hub (default: main)")


def run(args: argparse.Namespace) -> int:
    """Write the recipe and say how to train it. Raises CheckpointError, WriteError."""
    refuse_existing(args.out)
    given = local_folder(args.folder, revision=args.revision, with_weights=False)
    text = recipe_text(read_config(given), described(args.folder, given))
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(f"{args.out.parent} can't be made: {error.strerror}") from None
    write_atomically(args.out, [text.encode()])
    print(printable(f"{args.out}: megaspec train recipe={args.out.stem} init.from_hf={given}"))
    return 0


def recipe_text(config: dict[str, Any], source: str) -> str:
    """The file. CheckpointError: what config.json says can't be said."""
    family = family_of(config, source)
    model = read_model(config, f"{source}/config.json")
    lines = [
        f"# The model of {json.dumps(source)} ({family.model_type}), as megaspec hf recipe wrote it.",
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
