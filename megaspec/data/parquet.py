"""Parquet files as text, read so that damage is an error.

Note "What a flipped bit does". Of a file's bytes pages can carry a CRC-32, which pyarrow verifies only when it is asked
to. The footer and the headers of pages have none: a bit there can make a page or a row group shorter, which the number
of rows tells, or text into bytes, which the column's type tells. All flips of small files were tried, twelve formats of
them: with these checks each gives the same text or an error. In a file without page checksums a flip in a page is other
text, and nothing can tell: its user is told that it carries none.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megaspec.core.errors import DataError

# Of the header of a page, in Thrift's compact protocol: the type of its numbers, the field that holds the CRC-32, and
# bytes that the fields up to it take at most.
_I32 = 5
_CRC_FIELD = 4
_HEADER_BYTES = 32


def row_group_sizes(path: str) -> list[int]:
    """Bytes of each row group, as they are in memory. Raises DataError."""
    file = _open(path)
    with _bad_data(path):
        return [file.metadata.row_group(group).total_byte_size for group in range(file.metadata.num_row_groups)]


def row_group_rows(path: str) -> list[int]:
    """Rows of each row group, as the footer says. Raises DataError."""
    file = _open(path)
    with _bad_data(path):
        return [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]


def read_column(path: str, start: int, stop: int, key: str) -> Iterator[tuple[int, Any]]:
    """(row, value as pyarrow has it) of the row groups start to stop; rows count from 1 at the beginning of the file.

    Raises DataError for a file without a text column of that name, or a damaged one.
    """
    file = _open(path)
    with _bad_data(path):
        metadata = file.metadata
        _check_column(path, file.schema_arrow, key)
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        if sum(rows) != metadata.num_rows:
            raise DataError(
                f"{path}: its row groups hold {sum(rows)} rows, its footer says {metadata.num_rows}: damaged"
            )
        row = sum(rows[:start])
        for group in range(start, stop):
            before = row
            for batch in file.iter_batches(batch_size=1024, row_groups=[group], columns=[key]):
                for value in batch.column(0):
                    row += 1
                    yield row, value
            if row - before != rows[group]:
                found = row - before
                raise DataError(f"{path}: row group {group} gives {found} rows, its footer says {rows[group]}: damaged")


def carries_checksums(path: str, group: int, key: str) -> bool:
    """Whether the first page of a column in a row group carries a checksum; writers write all of them or none.

    The column has to have been read: pyarrow ends the process where it is asked for the place of one whose entry in the
    footer is damaged, which reading tells as an error.
    """
    file = _open(path)
    with _bad_data(path), open(path, "rb") as raw:
        columns = [file.schema.column(number).path for number in range(len(file.schema.names))]
        if key not in columns:
            return True  # a list or a struct: no value of it is text
        column = file.metadata.row_group(group).column(columns.index(key))
        raw.seek(_first_page(column))
        return _has_crc(raw.read(_HEADER_BYTES))


def _open(path: str) -> Any:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise DataError(f"{path}: parquet needs pyarrow; install the extra megaspec[parquet]") from error
    with _bad_data(path, "not a parquet file"):
        return ParquetFile(path, page_checksum_verification=True)


@contextmanager
def _bad_data(path: str, what: str = "can't be read") -> Iterator[None]:
    """Whatever pyarrow raises for a damaged file, as DataError that names it."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError, ValueError, LookupError, OverflowError) as error:
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path}: {what}: {cause}: damaged, or not what its ending says") from error


def _check_column(path: str, schema: Any, key: str) -> None:
    from pyarrow import types

    if key not in schema.names:
        raise DataError(f"{path}: no column {key}; --key names one of {', '.join(schema.names)}")
    kind = schema.field(key).type
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        raise DataError(f"{path}: column {key} is of type {kind}, not text: damaged, or write it as strings")


def _first_page(column: Any) -> int:
    """Byte at which a column's first page begins."""
    if column.has_dictionary_page and column.dictionary_page_offset:
        return min(column.dictionary_page_offset, column.data_page_offset)
    return column.data_page_offset


def _has_crc(header: bytes) -> bool:
    """Whether the header of a page has the field of the CRC: numbers 1 to 3 come before it, 5 and more after it."""
    # Thrift's compact protocol: a byte with the step to the field's number and its type, then the value, here a
    # number of seven bits a byte whose last byte has the high bit clear.
    position = 0
    field = 0
    while field < _CRC_FIELD and position < len(header):
        step = header[position] >> 4
        kind = header[position] & 15
        field += step
        position += 1
        if kind != _I32 or not step:
            return False
        while position < len(header) and header[position] & 0x80:
            position += 1
        position += 1
    return field == _CRC_FIELD
