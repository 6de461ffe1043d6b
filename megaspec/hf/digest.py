"""What a folder of Hugging Face's is known by: a hash of all that it says of weights. Torch-free."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megaspec.checkpoint.examine import worker_threads
from megaspec.checkpoint.files import open_folder, pread_into, read_failure
from megaspec.hf.cache import open_file
from megaspec.hf.folder import CONFIG, HfFolder

_BLOCK_BYTES = 4 << 20


def digested_files(folder: HfFolder) -> list[str]:
    """config.json and every file with a tensor, by name."""
    return [CONFIG, *sorted({entry.file for entry in folder.tensors.values()})]


def file_digests(path: Path, names: list[str]) -> dict[str, str]:
    """SHA-256 of each of these files of a folder, several at once. CheckpointError: one can't be read."""
    folder_fd = open_folder(path)
    try:
        with ThreadPoolExecutor(worker_threads()) as pool:
            found = pool.map(lambda name: _sha256(path, folder_fd, name), names)
            return dict(zip(names, found, strict=True))
    finally:
        os.close(folder_fd)


def digest_of(digests: dict[str, str]) -> str:
    """One hash for those of all files."""
    lines = [f"{name} {digests[name]}\n" for name in sorted(digests)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def folder_digest(folder: HfFolder) -> str:
    """SHA-256 over config.json and every byte of the weights' files. CheckpointError."""
    return digest_of(file_digests(folder.path, digested_files(folder)))


def _sha256(path: Path, folder_fd: int, name: str) -> str:
    digest = hashlib.sha256()
    block = memoryview(bytearray(_BLOCK_BYTES))
    fd = open_file(path, folder_fd, name)
    try:
        offset = 0
        while count := pread_into(fd, block, offset):
            digest.update(block[:count])
            offset += count
    except OSError as error:
        raise read_failure(path / name, error) from None
    finally:
        os.close(fd)
    return digest.hexdigest()
