"""What the resolver has to know about the data, read from manifests and index headers only. Torch-free and fast."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megaspec.core.errors import DataError, Problem
from megaspec.data.manifest import Manifest, load_manifest
from megaspec.data.spec import DataSpec, IndexedSpec, RandomSpec, SyntheticSpec

if TYPE_CHECKING:
    from megaspec.data.counts import Counts

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class DataFacts:
    """Facts about a data spec."""

    vocab_size: int | None
    """Token ids are below this; None when no manifest says so."""
    eod: int | None
    """Token that ends a document; None when there is none or it isn't known."""
    train_samples_per_epoch: int | None
    """Whole training sequences in one pass over all data sets; None for a source without end."""
    tokens: dict[str, int | None]
    """Tokens of `train`, `valid` and `test`; None for a source without end."""
    samples: dict[str, int | None]
    """Whole sequences of `train`, `valid` and `test` in one pass; None for a source without end."""
    tokenizer: str | None
    """Name of the tokenizer; None when there is none or it isn't known."""
    fingerprint: str
    """Hash that changes with the content of the data; "" for data that is made from the seed."""
    problems: tuple[Problem, ...]
    """What keeps the data from being used (missing or damaged files, data sets that don't belong together)."""


def data_facts(data_spec: DataSpec) -> DataFacts:
    """The facts for a data spec. What is wrong with the files is told in `problems`, never raised."""
    return FACTS[type(data_spec)](data_spec)


def made(spec: SyntheticSpec | RandomSpec) -> DataFacts:
    """Of data that is made as it is read: no files, no end."""
    endless = dict.fromkeys(SPLITS)
    return DataFacts(
        vocab_size=spec.vocab_size,
        eod=None,
        train_samples_per_epoch=None,
        tokens=endless,
        samples=endless,
        tokenizer=None,
        fingerprint="",
        problems=(),
    )


def _indexed(spec: IndexedSpec) -> DataFacts:
    problems: list[Problem] = []
    manifests: list[Manifest] = []
    tokens, samples = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
    digest = hashlib.sha256()
    for number, part in enumerate(spec.blend):
        key = f"data.blend.{number}.prefix"
        try:
            manifest = load_manifest(part.prefix)
            counts = _counts(part.prefix, spec.split)
            if manifest is not None:
                _check_sizes(part.prefix, manifest)
        except DataError as error:
            hint = "" if Path(f"{part.prefix}.idx").exists() else "; make it with `megaspec data prepare`"
            problems.append(Problem(key, f"{key}={part.prefix}: {error}{hint}", code="data-files"))
            continue
        for name, n_tokens in zip(SPLITS, counts.tokens, strict=True):
            tokens[name] += n_tokens
            samples[name] += max(0, (n_tokens - 1) // spec.seq_len)
        if manifest is not None:
            manifests.append(manifest)
        digest.update(manifest.fingerprint.encode() if manifest else counts.lengths)
        if len(spec.blend) > 1 and part.weight is None and counts.tokens[0] <= spec.seq_len:
            problems.append(_nothing_to_count(key, part.prefix, spec, counts.tokens[0]))
    problems += _mixed_tokenizers(spec, manifests)
    if not problems and not tokens["train"]:
        problems.append(
            Problem(
                "data.split", f"data.split={list(spec.split)} leaves no document for training; raise its first share"
            )
        )
    names = {manifest.tokenizer.name for manifest in manifests}
    return DataFacts(
        vocab_size=max((m.tokenizer.vocab_size for m in manifests), default=None),
        eod=manifests[0].tokenizer.eod if manifests else None,
        train_samples_per_epoch=samples["train"],
        tokens=tokens,
        samples=samples,
        tokenizer=names.pop() if len(names) == 1 else None,
        fingerprint=digest.hexdigest(),
        problems=tuple(problems),
    )


def _counts(prefix: str, split: tuple[float, float, float]) -> "Counts":
    index = Path(f"{prefix}.idx")
    try:
        index.stat()
    except OSError as error:
        raise DataError(f"{index}: can't be read: {error.strerror}") from error
    from megaspec.data.counts import count_tokens  # numpy, only where there are token files

    return count_tokens(prefix, split)


def _check_sizes(prefix: str, manifest: Manifest) -> None:
    for ending, said in ((".bin", manifest.bin_bytes), (".idx", manifest.idx_bytes)):
        path = Path(f"{prefix}{ending}")
        try:
            found = path.stat().st_size
        except OSError as error:
            raise DataError(f"{path}: can't be read: {error.strerror}") from error
        if found != said:
            raise DataError(f"{path}: size={found}, its manifest says {said}: damaged or not its file")


def _nothing_to_count(key: str, prefix: str, spec: IndexedSpec, tokens: int) -> Problem:
    text = f"{key}={prefix} has {tokens} tokens for training, data.seq_len={spec.seq_len} needs {spec.seq_len + 1} "
    text += "of each data set of a blend without weights; leave it out, or give every data set a weight"
    return Problem(key, text, code="data-files")


def _mixed_tokenizers(spec: IndexedSpec, manifests: list[Manifest]) -> list[Problem]:
    by_hash = {manifest.tokenizer.sha256: manifest.tokenizer for manifest in manifests}
    if len(by_hash) < 2:
        return []
    names = " and ".join(f"{t.name} ({t.vocab_size} ids, sha256 {t.sha256[:8]})" for t in by_hash.values())
    prefixes = ", ".join(part.prefix for part in spec.blend)
    return [
        Problem(
            "data.blend",
            f"data.blend={prefixes} mixes tokens of {names}; prepare all data sets with one tokenizer",
            code="data-tokenizers",
        )
    ]


FACTS: dict[type[DataSpec], Callable[..., DataFacts]] = {
    IndexedSpec: _indexed,
    SyntheticSpec: made,
    RandomSpec: made,
}
