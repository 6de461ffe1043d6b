"""Whether the tensors of a folder are those of a model, as far as its headers say. Torch-free."""

from collections.abc import Mapping

from megaspec.checkpoint.format import DTYPE_BYTES
from megaspec.hf.folder import HfFolder, TheirEntry
from megaspec.hf.names import WeightTable


def entries_of(folder: HfFolder, table: WeightTable) -> dict[str, TheirEntry]:
    """A folder's tensors by the family's names.

    A model that was saved without its head lacks the first word of every name: GPT-2 on the hub has `h.0.ln_1.weight`
    for `transformer.h.0.ln_1.weight`. Either all names have that word, or none has.
    """
    # the embedding, which comes first, is a part of what is saved without its head
    prefix = next(iter(table.theirs)).partition(".")[0] + "."
    if any(name.startswith(prefix) for name in folder.tensors):
        return folder.tensors
    entries = {}
    for name, entry in folder.tensors.items():
        full = prefix + name
        is_known = full in table.theirs or full in table.copies or table.is_ignored(full)
        entries[full if is_known else name] = entry
    return entries


def misfits(entries: Mapping[str, TheirEntry], table: WeightTable) -> list[str]:
    """Every tensor that is missing, left over, of another shape or of a format that holds no weights."""
    found = []
    for name, theirs in table.theirs.items():
        entry = entries.get(name)
        if entry is None:
            found.append(f"{name} is missing: this model's configuration needs it, of shape {list(theirs.shape)}")
        elif entry.shape != theirs.shape:
            expected = f"the configuration makes it {list(theirs.shape)}"
            found.append(f"{name} has shape {list(entry.shape)}, {expected}")
        elif not entry.dtype.startswith(("F", "BF")):
            found.append(f"{name} has dtype {entry.dtype}, weights are floating-point numbers")
        elif DTYPE_BYTES[entry.dtype] == 1:
            found.append(f"{name} has dtype {entry.dtype}: quantised weights are not read, save them in bfloat16")
    for name in entries:
        if name not in table.theirs and name not in table.copies and not table.is_ignored(name):
            found.append(f"{name} is left over: the configuration has no such parameter")
    return found
