"""Arrow files as text: what the library `datasets` saves to disk, a folder of IPC streams, and single .arrow files.

Files are mapped, never read whole: of a record batch only the wanted columns are looked at.

Note "What a saved data set is". `Dataset.save_to_disk` writes a folder with `state.json`, which names the files in
their order, and `DatasetDict.save_to_disk` one folder for each split beside `dataset_dict.json`. Files that
`state.json` does not name are caches of the library.

Note "What damage shows". Arrow carries no checksums. A stream that was cut off ends without its end mark, offsets are
checked before a text is taken, and a text has to be UTF-8; a letter that became another one is other text.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megaspec.core.errors import DataError
from megaspec.data.text_fields import BadLine, TextFields, bad_utf8, found

STATE = "state.json"
SPLITS = "dataset_dict.json"
_JSON_LIMIT = 16 * 2**20
_FILE_MAGIC = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def saved_files(folder: Path) -> list[Path] | None:
    """The files of a data set that `datasets` saved, in their order; None for another folder.

    Raises DataError for a folder of splits, for a file that is missing, and for rows that were chosen but not written.
    """
    if (folder / SPLITS).exists():
        splits = _read_json(folder / SPLITS).get("splits")
        if not isinstance(splits, list) or not splits or not all(isinstance(name, str) for name in splits):
            raise DataError(f"{folder / SPLITS}: names no splits: damaged; save the data set again")
        named = " or ".join(str(folder / name) for name in splits)
        raise DataError(f"{folder}: a data set with the splits {', '.join(splits)}; name the one to prepare: {named}")
    if not (folder / STATE).exists():
        return None
    state = _read_json(folder / STATE)
    files = state.get("_data_files")
    if not isinstance(files, list) or not files:
        raise DataError(f"{folder / STATE}: names no data files: damaged; save the data set again")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(f"{folder}: holds a choice of rows beside its data; save it again after flatten_indices()")
    paths: list[Path] = []
    for file in files:
        name = file.get("filename") if isinstance(file, dict) else None
        if not isinstance(name, str) or Path(name).name != name:
            raise DataError(f"{folder / STATE}: {name!r} is no name of a file in its folder")
        path = folder / name
        if not path.is_file():
            raise DataError(f"{path}: is missing, {STATE} names it; put it back, or save the data set again")
        paths.append(path)
    return paths


def batch_sizes(path: str) -> list[int]:
    """Bytes of each record batch. Raises DataError for a file that was cut off or is damaged."""
    with _batches(path) as batches, _bad_data(path):
        # nulls alone take none
        return [max(1, batch.nbytes) for batch in batches]


def read_texts(path: str, start: int, stop: int, fields: TextFields) -> Iterator[tuple[int, str | BadLine]]:
    """(row, text or what is wrong) of the record batches start to stop; rows count from 1 at the top of the file.

    Raises DataError for a file without such text columns, or a damaged one.
    """
    row = 0
    with _batches(path) as batches, _bad_data(path):
        for number, batch in enumerate(batches):
            if number >= stop:
                return
            if number >= start:
                yield from _batch_texts(path, batch, row, fields)
            row += batch.num_rows


def columns_of(where: str, table: Any, fields: TextFields) -> list[Any]:
    """The columns of a table or batch that hold the fields, as bytes. Raises DataError where one is not text."""
    columns = []
    for key in fields.keys:
        column = _column(where, table, key)
        check_text_type(where, key, column.type)
        columns.append(column)
    return columns


def check_text_type(where: str, key: str, kind: Any) -> None:
    """Raises DataError for a column that holds something else than text; one of nulls may be part of a larger set."""
    from pyarrow import types

    value = kind.value_type if types.is_dictionary(kind) else kind
    is_text = types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)
    if not is_text and not types.is_null(value):
        raise DataError(
            f"{where}: wrong type: column {key} must hold strings, found {kind}; write it as strings, or name another "
            "column with --key"
        )


def row_texts(columns: list[Any], n_rows: int, fields: TextFields) -> Iterator[str | BadLine]:
    """The documents of rows; columns: of each key, its values as pyarrow has them."""
    values = [_python_values(column) for column in columns]
    for row in range(n_rows):
        of_row: list[str] = []
        wrong: BadLine | None = None
        for key, column in zip(fields.keys, values, strict=True):
            value = column[row]
            if isinstance(value, BadLine):
                wrong = wrong or value
            elif not isinstance(value, str):
                wrong = wrong or BadLine("wrong type", f'"{key}" must be a string, found {found(value)}')
            else:
                of_row.append(value)
        if wrong is not None:
            yield wrong
        else:
            yield fields.joined(of_row)


def _batch_texts(path: str, batch: Any, row: int, fields: TextFields) -> Iterator[tuple[int, str | BadLine]]:
    columns = columns_of(path, batch, fields)
    for column in columns:
        _check_offsets(column)
    for text in row_texts(columns, batch.num_rows, fields):
        row += 1
        yield row, text


def _check_offsets(column: Any) -> None:
    """Raises ArrowInvalid where offsets or indices point outside, which would end the process."""
    from pyarrow import types

    kind = column.type
    if types.is_dictionary(kind):
        column.indices.validate(full=True)
        column.validate()
        column = column.dictionary
        kind = column.type
    if types.is_string(kind):
        column = column.view("binary")
    # as bytes, since a text that is no UTF-8 is one bad line
    elif types.is_large_string(kind):
        column = column.view("large_binary")
    column.validate(full=True)


def _python_values(column: Any) -> list[Any]:
    """Values as Python has them, BadLine for bytes that are no UTF-8."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        pass
    values: list[Any] = []
    for value in column:
        try:
            values.append(value.as_py())
        except UnicodeDecodeError as error:
            values.append(bad_utf8(error))
    return values


def _column(where: str, table: Any, key: str) -> Any:
    """A column, or a field of one that holds structs. Raises DataError."""
    from pyarrow import types

    names = table.schema.names
    if key in names:
        return table.column(names.index(key))
    first, *rest = key.split(".")
    if rest and first in names:
        column = table.column(names.index(first))
        path = first
        for name in rest:
            if not types.is_struct(column.type) or name not in [field.name for field in column.type]:
                raise DataError(f"{where}: no {key}: {path} is of type {column.type}; --key names another")
            # flattened, so that the nulls of the struct are nulls of the field
            numbers = [field.name for field in column.type]
            column = column.flatten()[numbers.index(name)]
            path += f".{name}"
        return column
    raise DataError(f"{where}: no column {key}; --key names one of {', '.join(names)}")


@contextmanager
def _batches(path: str) -> Iterator[Iterator[Any]]:
    """The record batches of a file. Raises DataError."""
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(f"{path}: Arrow needs pyarrow; install the extra megaspec[parquet]") from error
    with _bad_data(path, "not an Arrow file"), pyarrow.memory_map(path) as mapped:
        if mapped.read(len(_FILE_MAGIC)) == _FILE_MAGIC:
            mapped.seek(0)
            yield _of_file(pyarrow.ipc.open_file(mapped))
            return
        mapped.seek(max(0, mapped.size() - len(_END_OF_STREAM)))
        if mapped.read() != _END_OF_STREAM:
            raise DataError(
                f"{path}: ends without Arrow's end mark: cut off while it was written or copied, or damaged"
            )
        mapped.seek(0)
        yield iter(pyarrow.ipc.open_stream(mapped))


def _of_file(reader: Any) -> Iterator[Any]:
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)


@contextmanager
def _bad_data(path: str, what: str = "can't be read") -> Iterator[None]:
    """Whatever pyarrow raises for a damaged file, as DataError that names it."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError, ValueError, LookupError, OverflowError) as error:
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path}: {what}: {cause}: damaged, or not what its ending says") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read(_JSON_LIMIT))
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: no JSON: {error}: damaged; save the data set again") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: no JSON object: damaged; save the data set again")
    return content
