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
from megaspec.data.arrow import check_text_type, columns_of, row_texts
from megaspec.data.text_fields import BadLine, TextFields

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


def read_texts(path: str, start: int, stop: int, fields: TextFields) -> Iterator[tuple[int, str | BadLine]]:
    """(row, text or what is wrong) of the row groups start to stop; rows count from 1 at the beginning of the file.

    Raises DataError for a file without such text columns, or a damaged one.
    """
    file = _open(path)
    with _bad_data(path):
        metadata = file.metadata
        names = [_column_name(path, file.schema_arrow, key) for key in fields.keys]
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        if sum(rows) != metadata.num_rows:
            raise DataError(
                f"{path}: its row groups hold {sum(rows)} rows, its footer says {metadata.num_rows}: damaged"
            )
        row = sum(rows[:start])
        for group in range(start, stop):
            before = row
            for batch in file.iter_batches(batch_size=1024, row_groups=[group], columns=names):
                for text in row_texts(columns_of(path, batch, fields), batch.num_rows, fields):
                    row += 1
                    yield row, text
            if row - before != rows[group]:
                found = row - before
                raise DataError(f"{path}: row group {group} gives {found} rows, its footer says {rows[group]}: damaged")


def carries_checksums(path: str, group: int, fields: TextFields) -> bool:
    """Whether the first page of the columns in a row group carries a checksum; writers write all of them or none.

    The columns have to have been read: pyarrow ends the process where it is asked for the place of one whose entry in
    the footer is damaged, which reading tells as an error.
    """
    file = _open(path)
    with _bad_data(path), open(path, "rb") as raw:
        columns = [file.schema.column(number).path for number in range(len(file.schema.names))]
        for key in fields.keys:
            if key not in columns:
                continue  # a list or a struct: no value of it is text
            column = file.metadata.row_group(group).column(columns.index(key))
            raw.seek(_first_page(column))
            if not _has_crc(raw.read(_HEADER_BYTES)):
                return False
    return True


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


def _column_name(path: str, schema: Any, key: str) -> str:
    """What is asked for of a file: a column, or a field within one. Raises DataError where it is not text."""
    if key in schema.names:
        check_text_type(path, key, schema.field(key).type)
        return key
    if key.split(".")[0] in schema.names:
        return key
    raise DataError(f"{path}: no column {key}; --key names one of {', '.join(schema.names)}")


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
