"""Writes the golden files that are our own. `make golden`, then look at the difference."""

import json

from tests.golden_specs import FOLDER, resolved
from tests.launchers import test_kubernetes, test_slurm


def main() -> None:
    # before anything is deleted: a recipe that can't be resolved leaves the files as they were
    specs = resolved()
    jobs = {f"{name}.sh": text for name, text in test_slurm.texts().items()}
    jobs |= {f"{name}.yaml": text for name, text in test_kubernetes.texts().items()}
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.glob("*.json"):
        old.unlink()
    for name, spec in specs.items():
        (FOLDER / name).write_text(json.dumps(spec, indent=1, ensure_ascii=False) + "\n")
    test_slurm.GOLDEN.mkdir(parents=True, exist_ok=True)
    for old in test_slurm.GOLDEN.glob("*.*"):
        if old.suffix != ".md":
            old.unlink()
    for name, text in jobs.items():
        (test_slurm.GOLDEN / name).write_text(text)


if __name__ == "__main__":
    main()
