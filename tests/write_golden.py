"""Writes the golden files that are our own. `make golden`, then look at the difference."""

import json

from tests.golden_specs import FOLDER, resolved


def main() -> None:
    # before anything is deleted: a recipe that can't be resolved leaves the files as they were
    specs = resolved()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.glob("*.json"):
        old.unlink()
    for name, spec in specs.items():
        (FOLDER / name).write_text(json.dumps(spec, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
