"""JSON from a file that somebody else may have written, within fixed bounds. Torch-free."""

import json
from typing import Any

# Of a file that is read whole; the spec.json of the largest shipped recipes has some 30 kB.
MAX_BYTES = 16 << 20
# Of what any of our files is nested to: a recipe may be 32 deep, and a file has it some levels down.
MAX_DEPTH = 100


def parse_json(data: bytes) -> Any:
    """What `data` says. ValueError: not UTF-8, not JSON, or lists and objects in each other deeper than MAX_DEPTH."""
    too_deep = ValueError(f"nested deeper than {MAX_DEPTH}")
    try:
        content = json.loads(data)
    except RecursionError:
        raise too_deep from None
    # level by level, since what reads the content later may go down by calling itself
    level = [content]
    for _ in range(MAX_DEPTH + 1):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list):
                inner += one
        if not inner:
            return content
        level = inner
    raise too_deep
