"""The README's section on kernels names what it does not hold."""

import json
from pathlib import Path

from megaspec_kernels.catalog import CATALOG

HERE = Path(__file__).parent


def test_every_kernel_was_measured_or_is_named_as_one_that_was_not():
    measured = set()
    for line in (HERE / "results" / "kernels_one_h200.jsonl").read_text().splitlines():
        row = json.loads(line)
        measured.add((row["operation"], row["implementation"]))
    section = (HERE / "README.md").read_text().partition("\n## The kernels\n")[2].partition("\n## ")[0]
    lacking = set()
    for line in section.partition("Not in the table")[2].partition("```bash")[0].splitlines():
        if not line.startswith("- "):
            continue
        # operations, their implementations, where they were measured
        cells = line.removeprefix("- ").split(": ", 2)
        for operation in cells[0].split(", "):
            if operation in CATALOG:
                every = CATALOG[operation].implementations
                named = list(every) if cells[1] == "all" else [name.strip("`") for name in cells[1].split()]
                lacking |= {(operation, name) for name in named}
    in_catalog = {(operation, name) for operation, one in CATALOG.items() for name in one.implementations}
    assert lacking == in_catalog - measured
