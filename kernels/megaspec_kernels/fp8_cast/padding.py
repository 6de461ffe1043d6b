"""How many rows groups have once each is padded; torch-free. Why they are: groups.py, note "Padding"."""

UNIT = 16


def padded_rows(rows: int, groups: int) -> int:
    """So many are enough for the padded groups and the rows of none, however the rows are spread over them: known
    without a look at the device."""
    return -(-rows // UNIT) * UNIT + groups * UNIT
