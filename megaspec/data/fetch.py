"""Token files from an object store to this machine: whole and verified by their manifest, or not there. Torch-free.

Ranges of a file could be read from the store in each step; a store that is slow or away would then stop a training that
has run for days, on every rank. A local file fails before it begins.
"""

import contextlib
import os
import secrets
from pathlib import Path

from megaspec.core.errors import DataError, WriteError
from megaspec.core.remote_files import RemoteFiles
from megaspec.data.files import publish, write_error
from megaspec.data.manifest import MANIFEST_LIMIT, Crc32Blocks, DataManifest, load_manifest

_READ_BYTES = 8 << 20
_TOKENIZER_LIMIT = 1 << 30


def fetch(url: str, prefix: Path, *, wait_seconds: float | None = None) -> DataManifest:
    """Brings `URL.bin`, `.idx`, the tokenizer and last `.manifest.json` to `prefix`. What is there already, and is what
    the manifest there says, is not fetched again.

    DataError: there is no such data set, it is damaged, or the store does not answer; WriteError: it can't be written
    here. UsageError: a package is missing.
    """
    options = {} if wait_seconds is None else {"wait_seconds": wait_seconds}
    folder, _, name = url.rstrip("/").rpartition("/")
    remote = RemoteFiles(folder, name="", error=DataError, **options)
    incoming = prefix.with_name(f".{prefix.name}.fetching-{secrets.token_hex(4)}")
    endings = [".manifest.json", ".idx", ".bin"]
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        remote.fetch(f"{remote.root}/{name}.manifest.json", _at(incoming, ".manifest.json"), limit=MANIFEST_LIMIT)
        manifest = load_manifest(incoming)
        assert manifest is not None, f"{incoming}: fetched, and not there"
        if _is_here(prefix, manifest):
            return manifest
        tokenizer = manifest.tokenizer.ending
        if manifest.tokenizer.name != "byte" and tokenizer:
            endings.append(f".tokenizer{tokenizer}")
            source = f"{remote.root}/{name}.tokenizer{tokenizer}"
            remote.fetch(source, _at(incoming, endings[-1]), limit=_TOKENIZER_LIMIT)
        for ending, n_bytes in ((".idx", manifest.idx_bytes), (".bin", manifest.bin_bytes)):
            remote.fetch(f"{remote.root}/{name}{ending}", _at(incoming, ending), limit=n_bytes)
        problems = damage(incoming, manifest)
        if problems:
            raise DataError([f"{url}: {problem}" for problem in problems])
        # the manifest last: who sees it sees all
        for ending in [*endings[1:], ".manifest.json"]:
            publish(_at(incoming, ending), _at(prefix, ending))
    except OSError as error:
        raise write_error(error.filename or prefix, error) from None
    finally:
        for ending in endings:
            with contextlib.suppress(OSError):
                _at(incoming, ending).unlink()
    return manifest


def damage(prefix: Path, manifest: DataManifest) -> list[str]:
    """In what files are not what a manifest says, a line each: every byte is read."""
    problems = []
    of_files = ((".idx", manifest.idx_bytes, manifest.idx_crc32), (".bin", manifest.bin_bytes, manifest.bin_crc32))
    for ending, n_bytes, expected in of_files:
        path = _at(prefix, ending)
        found = path.stat().st_size
        if found != n_bytes:
            problems.append(f"{ending}: expected {n_bytes} bytes, found {found}")
            continue
        blocks = Crc32Blocks(manifest.block_bytes)
        with open(path, "rb") as file:
            while data := file.read(_READ_BYTES):
                blocks.update(data)
        if blocks.hex() != expected:
            problems.append(f"{ending}: its bytes have other checksums than its manifest says")
    return problems


def _is_here(prefix: Path, manifest: DataManifest) -> bool:
    """Whether a data set of the same content is there, whole."""
    try:
        if load_manifest(prefix) != manifest:
            return False
        return not damage(prefix, manifest)
    except (OSError, DataError):
        return False


def _at(prefix: Path, ending: str) -> Path:
    return prefix.with_name(prefix.name + ending)


def refuse_folder(prefix: Path) -> None:
    """WriteError: `prefix` is a folder, and the files of a data set are PREFIX.bin, PREFIX.idx, ..."""
    if os.path.isdir(prefix):
        raise WriteError(f"{prefix} is a folder; give the name that the files begin with, as {prefix}/web")
