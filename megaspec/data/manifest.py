"""`<prefix>.manifest.json`: what the token files beside it must be, so that damage is an error."""

import hashlib
import json
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from megaspec.core.errors import DataError
from megaspec.core.frozen import Frozen, NonNegativeInt, PositiveInt
from megaspec.data.files import write_atomically

MANIFEST_LIMIT = 64 * 2**20
SMALLEST_BLOCK = 2**20
LARGEST_BLOCK = 64 * 2**20

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# CRC-32 of consecutive blocks, eight hexadecimal digits each, one after the other.
BlockChecksums = Annotated[str, Field(pattern=r"^([0-9a-f]{8})*$")]


class TokenizerRecord(Frozen):
    """The tokenizer that made the tokens."""

    name: str
    """`byte`, or the name under which its file was given."""
    sha256: Sha256
    """Hash of its copy beside the data; for `byte` of the word byte."""
    vocab_size: PositiveInt
    """Token ids are below this."""
    eod: NonNegativeInt | None
    """Token that ends a document; None when the tokenizer has none."""
    eod_token: str | None = None
    """That token as it is written; None for bytes, and in the manifests of versions that didn't say."""
    ending: Literal["", ".json", ".model"] = ".json"
    """Of its copy beside the data: a tokenizer.json or SentencePiece's .model; "" for bytes, which have none."""


class SourceFileRecord(Frozen):
    """One file of an input folder."""

    name: str
    """Path within the folder."""
    bytes: NonNegativeInt
    """Size in bytes."""
    sha256: Sha256
    """Hash of the content."""


class SourceRecord(Frozen):
    """One input: a file, or a folder of them."""

    name: str
    """Path as it was given."""
    bytes: NonNegativeInt
    """Size in bytes."""
    sha256: Sha256
    """Hash of the content; of a folder the hash of its files' hashes and names."""
    files: tuple[SourceFileRecord, ...] = ()
    """Files of a folder; none for a file, and in the manifests of versions that kept the folder's hash alone."""


class SampleRecord(Frozen):
    """Documents that went through the tokenizer and back, and what did not come back of them."""

    documents: NonNegativeInt
    """Documents that were tried: the same for the same input."""
    characters: NonNegativeInt
    """Characters of these."""
    lossy_documents: NonNegativeInt
    """Documents of which something was lost."""
    lost_characters: NonNegativeInt
    """Characters that were lost."""
    lost: dict[str, PositiveInt]
    """Those that were lost most often, and how often."""


class DataManifest(Frozen):
    """What `<prefix>.bin` and `<prefix>.idx` hold."""

    version: Literal[1] = 1
    """Version of this file's format."""
    tokens: NonNegativeInt
    """Tokens in .bin."""
    documents: NonNegativeInt
    """Documents."""
    sequences: NonNegativeInt
    """Sequences; one per document unless the files were made elsewhere."""
    dtype: Literal["uint8", "int8", "int16", "uint16", "int32", "int64"]
    """Number format of .bin."""
    tokenizer: TokenizerRecord
    """The tokenizer."""
    append_eod: bool
    """Every document ends with the eod token."""
    bad_lines: dict[str, NonNegativeInt] = Field(default_factory=dict)
    """Input lines that were left out, by kind."""
    bad_lines_file: str | None = None
    """File beside these that lists them with file, line and reason; None where none were left out."""
    sample: SampleRecord | None = None
    """What the tokenizer lost of a sample; None in the files of versions that tried none."""
    sources: tuple[SourceRecord, ...]
    """The inputs."""
    job: Sha256
    """Hash of the inputs' names, sizes and times, the tokenizer and the options."""
    bin_bytes: NonNegativeInt
    """Size of .bin."""
    idx_bytes: NonNegativeInt
    """Size of .idx."""
    idx_sha256: Sha256
    """Hash of .idx: the identity of the data order."""
    block_bytes: Annotated[int, Field(ge=SMALLEST_BLOCK, le=LARGEST_BLOCK)]
    """Size of the blocks that are checked on their own, in bytes; the last one of a file may be shorter."""
    bin_crc32: BlockChecksums
    """Checksums of the blocks of .bin."""
    idx_crc32: BlockChecksums
    """Checksums of the blocks of .idx."""

    @property
    def fingerprint(self) -> str:
        """Hash of everything that the files hold."""
        return hashlib.sha256((self.idx_sha256 + self.bin_crc32).encode()).hexdigest()

    @property
    def digest(self) -> str:
        """Hash of what the files hold and of the tokenizer that says what it means."""
        return hashlib.sha256((self.fingerprint + self.tokenizer.model_dump_json()).encode()).hexdigest()


def manifest_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.manifest.json")


def block_bytes_for(size: int) -> int:
    """The block size for a file: a power of two from 1 to 64 MiB, at most 65,536 blocks where 64 MiB allow it."""
    block = SMALLEST_BLOCK
    while block < LARGEST_BLOCK and size > 65536 * block:
        block *= 2
    return block


class Crc32Blocks:
    """Checksums of consecutive blocks of a stream of bytes."""

    def __init__(self, block_bytes: int):
        self._block_bytes = block_bytes
        self._done: list[int] = []
        self._crc = 0
        self._filled = 0

    def update(self, data: Any) -> None:
        """Add bytes (any contiguous buffer of bytes)."""
        view = memoryview(data).cast("B")
        while len(view):
            piece = view[: self._block_bytes - self._filled]
            self._crc = zlib.crc32(piece, self._crc)
            self._filled += len(piece)
            view = view[len(piece) :]
            if self._filled == self._block_bytes:
                self._done.append(self._crc)
                self._crc = self._filled = 0

    def hex(self) -> str:
        """The checksums so far, the begun block included."""
        crcs = list(self._done)
        # a last block that is not full
        if self._filled:
            crcs.append(self._crc)
        return "".join(f"{crc:08x}" for crc in crcs)


def crc32_of_blocks(buffer: Any, block_bytes: int) -> str:
    """Checksums of all blocks of a buffer."""
    blocks = Crc32Blocks(block_bytes)
    blocks.update(buffer)
    return blocks.hex()


def write_manifest(prefix: str | Path, manifest: DataManifest) -> None:
    """Write the manifest with a hash of its own, atomically."""
    body = manifest.model_dump(mode="json")
    text = json.dumps(body | {"sha256": _own_hash(body)}, indent=1, sort_keys=False)
    write_atomically(manifest_path(prefix), [text.encode() + b"\n"])


def load_manifest(prefix: str | Path) -> DataManifest | None:
    """The manifest beside the files, None when there is none.

    Raises DataError when it is damaged, too large or inconsistent.
    """
    path = manifest_path(prefix)
    try:
        with open(path, "rb") as file:
            raw = file.read(MANIFEST_LIMIT + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror}") from error
    if len(raw) > MANIFEST_LIMIT:
        raise DataError(f"{path}: larger than {MANIFEST_LIMIT} bytes, so no manifest; prepare the data again")
    return parse_manifest(raw, where=str(path))


def parse_manifest(raw: bytes, *, where: str) -> DataManifest:
    """The manifest in the bytes of its file; `where` names it. Raises DataError when it is damaged or inconsistent."""
    try:
        body = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not a manifest ({error}); prepare the data again") from error
    if not isinstance(body, dict):
        raise DataError(f"{where}: not a manifest (no JSON object); prepare the data again")
    # before the content is looked at: what is damaged may look well-formed
    claimed = body.pop("sha256", None)
    found = _own_hash(body)
    if claimed != found:
        raise DataError(f"{where}: sha256={claimed}, but its content hashes to {found}: damaged or edited")
    try:
        manifest = DataManifest.model_validate_json(json.dumps(body))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{where}: {field}: {first['msg']}") from error
    for field, size, checksums in (
        ("bin_crc32", manifest.bin_bytes, manifest.bin_crc32),
        ("idx_crc32", manifest.idx_bytes, manifest.idx_crc32),
    ):
        expected = -(-size // manifest.block_bytes)
        if len(checksums) != 8 * expected:
            raise DataError(f"{where}: {field} has {len(checksums) // 8} checksums, {expected} blocks need as many")
    return manifest


def sha256_of_files(paths: Iterable[Path]) -> str:
    """Hash of the contents, one after the other. Raises DataError for a file that can't be read."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            with open(path, "rb") as file:
                while chunk := file.read(2**20):
                    digest.update(chunk)
        except OSError as error:
            raise DataError(f"{path}: can't be read: {error.strerror or error}") from error
    return digest.hexdigest()


def _own_hash(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    repeated = {re.sub(r"[^ -~]", "?", key) for key in keys if keys.count(key) > 1}
    if repeated:
        raise ValueError(f"key {sorted(repeated)[0]!r} twice")
    return dict(pairs)
