"""What the resolver has to know about the data, read from manifests and index headers only. Torch-free and fast."""

import hashlib
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from megaspec.core.document_lengths import Lengths, mixed
from megaspec.core.errors import DataError, MegaspecError, Problem, UsageError
from megaspec.core.frozen import AUTO
from megaspec.core.remote_files import NOT_THERE, is_url
from megaspec.core.units import plural
from megaspec.data.fetch import changed_there, is_here, listing_here
from megaspec.data.manifest import DataManifest, load_manifest
from megaspec.data.remote_text import list_text, text_urls_of
from megaspec.data.spec import BlendPart, DataSpec, IndexedSpec, RandomSpec, StreamSpec, SyntheticSpec, shares_documents
from megaspec.data.stream_files import file_problems, find_groups, fingerprint, stream_tokenizer
from megaspec.data.token_set import TokenSet, open_set
from megaspec.data.urls import (
    RemoteData,
    StoreAway,
    UrlPlace,
    data_here,
    folder_here,
    noted_of,
    store_of,
    url_places,
)

if TYPE_CHECKING:
    from megaspec.data.counts import Counts

SPLITS = ("train", "valid", "test")
# Data sets that a message names; of more it says how many.
_MOST_NAMED = 8
# What is read as text has no index to count; a sample of it has.
_OF_A_STREAM = (
    "prepare some of the text with `megaspec data prepare`, and set data.document_lengths to what "
    "`megaspec data inspect --json` prints of it"
)


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
    tokenizer_sha256: str | None
    """Of the tokenizer that made all of the data; None when there is none, several, or it isn't known."""
    fingerprint: str
    """Hash that changes with the content of the data; "" for data that is made from the seed."""
    problems: tuple[Problem, ...]
    """What keeps the data from being used (missing or damaged files, data sets that don't belong together)."""
    document_lengths: Lengths = ()
    """Of training data with a document mask, as `megaspec data inspect` has counted it; (): that is not known."""
    how_lengths: str = ""
    """Where the lengths are from, or how they can be known, in words."""
    remote: tuple[RemoteData, ...] = ()
    """What lies at the URLs, of those that could be read."""
    text_urls: frozenset[str] = frozenset()
    """Of each text file that the URLs name."""


def data_facts(data_spec: DataSpec, *, key: str = "data", known: Sequence[RemoteData] = ()) -> DataFacts:
    """The facts for a data spec. What is wrong with the files is told in `problems`, never raised.

    `key`: where the spec stands in a recipe; an evaluation set stands below `data.valid` and trains nothing. `known`:
    what lay at URLs when the run was resolved before: another content is a problem.
    """
    # a plug-in's source is made as it is read
    return FACTS.get(type(data_spec), made)(data_spec, key=key, known=known)


def evaluation_facts(
    data_spec: DataSpec, training: DataFacts, *, known: Sequence[RemoteData] = ()
) -> dict[str, DataFacts]:
    """The facts for each evaluation set. Among their problems: another tokenizer than that of the training data, and
    files that are trained on. `known`: see `data_facts`."""
    found = {}
    for name, one in data_spec.valid.items():
        key = f"data.valid.{name}"
        facts = data_facts(_without_input(one, data_spec), key=key, known=known)
        ours = training.tokenizer_sha256
        theirs = facts.tokenizer_sha256
        if ours is not None and theirs is not None and ours != theirs:
            text = f"{key} was made by the tokenizer {facts.tokenizer} (sha256 {theirs[:8]}), the training data by "
            text += f"{training.tokenizer} ({ours[:8]}): the same id is another token; prepare both with one tokenizer"
            problem = Problem(key, text, code="data-tokenizers")
            facts = replace(facts, problems=(*facts.problems, problem))
        trained = _trained_on(data_spec, one, key=key) or _same_content(data_spec, training, one, facts, key=key)
        if trained is not None:
            facts = replace(facts, problems=(*facts.problems, trained))
        found[name] = facts
    return found


def _trained_on(training: DataSpec, one: DataSpec, *, key: str) -> Problem | None:
    """A problem where an evaluation set reads a file of the training data. Of token files by the same path a rule
    tells, which looks at no files."""
    if isinstance(training, IndexedSpec) and isinstance(one, IndexedSpec) and shares_documents(training, one):
        prefixes = {Path(part.prefix).resolve(): PurePath(part.prefix) for part in training.blend}
        for number, part in enumerate(one.blend):
            given = PurePath(part.prefix)
            if prefixes.get(Path(part.prefix).resolve(), given) != given:
                return _also_trained(f"{key}.blend.{number}.prefix", part.prefix)
    if isinstance(training, StreamSpec) and isinstance(one, StreamSpec):
        trained = _streamed_files(training)
        for real, path in _streamed_files(one).items():
            if real in trained:
                return _also_trained(f"{key}.files", path)
    return None


def _same_content(
    training: DataSpec, training_facts: DataFacts, one: DataSpec, facts: DataFacts, *, key: str
) -> Problem | None:
    """A problem where an evaluation set fetches what is trained on: the same text file, or, under another URL, the same
    token files."""
    for url in sorted(facts.text_urls & training_facts.text_urls):
        return _also_trained(f"{key}.files", url)
    if isinstance(training, IndexedSpec) and isinstance(one, IndexedSpec) and shares_documents(training, one):
        trained = {record.digest: record.url for record in training_facts.remote}
        for record in facts.remote:
            # of the same URL a rule tells, which looks at no files
            if trained.get(record.digest, record.url) != record.url:
                return _also_trained(key, record.url)
    return None


def _also_trained(key: str, path: str) -> Problem:
    text = f"{key}: {path} is training data, too: the model would be evaluated on what it has seen; take other data"
    return Problem(key, text, code="valid-trained")


def _streamed_files(spec: StreamSpec) -> dict[Path, str]:
    """Where each file of a stream really lies that is here, and its path; none where that is told as a problem of the
    stream."""
    try:
        groups = find_groups(_of_this_machine(spec))
    except DataError:
        return {}
    return {Path(file.path).resolve(): file.path for group in groups for file in group.files}


def _without_input(one: DataSpec, training: DataSpec) -> DataSpec:
    """A set without the INPUT that it follows the training data in: what it is made from is another text."""
    prepare = getattr(one, "prepare", None)
    if prepare is None or prepare != getattr(training, "prepare", None):
        return one
    return one.model_copy(update={"prepare": prepare.model_copy(update={"input": None})})


def made(spec: SyntheticSpec | RandomSpec, *, key: str, known: Sequence[RemoteData] = ()) -> DataFacts:
    """Of data that is made as it is read: no files, no end."""
    endless = dict.fromkeys(SPLITS)
    return DataFacts(
        vocab_size=spec.vocab_size,
        eod=None,
        train_samples_per_epoch=None,
        tokens=endless,
        samples=endless,
        tokenizer=None,
        tokenizer_sha256=None,
        fingerprint="",
        problems=(),
    )


def _indexed(spec: IndexedSpec, *, key: str, known: Sequence[RemoteData] = ()) -> DataFacts:
    is_training = key == "data"
    problems: list[Problem] = []
    manifests: list[DataManifest] = []
    counted = _CountedLengths()
    tokens = dict.fromkeys(SPLITS, 0)
    samples = dict.fromkeys(SPLITS, 0)
    remote: list[RemoteData] = []
    wrong = _wrong_urls(spec, key=key)
    away: dict[str, str] = {}
    digest = hashlib.sha256()
    for number, part in enumerate(spec.blend):
        prefix_key = f"{key}.blend.{number}.prefix"
        if prefix_key in wrong:
            # told by a rule as well, and not asked for
            problems.append(wrong[prefix_key])
            continue
        if store_of(part.prefix) in away:
            # every one would wait as long
            problems.append(_not_asked(prefix_key, part.prefix, away[store_of(part.prefix)]))
            continue
        try:
            files, record = open_set(part.prefix, key=prefix_key, download_dir=spec.download_dir, known=known)
            manifest = files.manifest
            counts = _counts(files, spec.split)
            files.check_sizes()
            # lengths that are given stand, whatever lies beside the files
            if is_training and spec.document_mask and spec.document_lengths == AUTO:
                counted.add(part, files)
        except (DataError, UsageError) as error:
            if isinstance(error, StoreAway):
                away[store_of(part.prefix)] = part.prefix
            problems.append(_unreadable(prefix_key, part.prefix, error, spec, number))
            continue
        if record is not None:
            remote.append(record)
        for name, n_tokens in zip(SPLITS, counts.tokens, strict=True):
            tokens[name] += n_tokens
            # the last sequence needs one token more, its last label
            samples[name] += max(0, (n_tokens - 1) // spec.seq_len)
        if manifest is not None:
            manifests.append(manifest)
            digest.update(manifest.fingerprint.encode())
        else:
            digest.update(counts.lengths)
        is_counted = is_training and len(spec.blend) > 1 and part.weight is None
        if is_counted and counts.tokens[0] <= spec.seq_len:
            problems.append(_nothing_to_count(prefix_key, part.prefix, spec, counts.tokens[0]))
    problems += _mixed_tokenizers(spec, manifests, key=f"{key}.blend")
    if is_training and not problems and not tokens["train"]:
        problems.append(
            Problem(
                "data.split", f"data.split={list(spec.split)} leaves no document for training; raise its first share"
            )
        )
    vocab_size = None
    eod = None
    tokenizer = None
    hashes = {manifest.tokenizer.sha256 for manifest in manifests}
    if manifests:
        tokenizers = [manifest.tokenizer for manifest in manifests]
        vocab_size = max(one.vocab_size for one in tokenizers)
        eod = tokenizers[0].eod
        if all(one.name == tokenizers[0].name for one in tokenizers):
            tokenizer = tokenizers[0].name
    return DataFacts(
        vocab_size=vocab_size,
        eod=eod,
        train_samples_per_epoch=samples["train"],
        tokens=tokens,
        samples=samples,
        tokenizer=tokenizer,
        tokenizer_sha256=hashes.pop() if len(hashes) == 1 else None,
        fingerprint=digest.hexdigest(),
        problems=tuple(problems),
        document_lengths=counted.lengths,
        how_lengths=counted.how,
        remote=tuple(remote),
    )


def _not_asked(key: str, url: str, before: str) -> Problem:
    text = f"{key}={url}: not asked for, since the store did not answer for {before}"
    return Problem(key, text, code="data-files")


def _wrong_urls(spec: IndexedSpec | StreamSpec, *, key: str) -> dict[str, Problem]:
    """Where a URL can't be asked for -> why."""
    found = {}
    for place in url_places(spec, key=key):
        if place.wrong:
            found[place.key] = Problem(place.key, place.wrong, code="data-url")
    return found


def _unreadable(key: str, prefix: str, error: MegaspecError, spec: IndexedSpec, number: int) -> Problem:
    """A data set that is not there, or is no data set, and what to do about it."""
    text = str(error)
    if not text.startswith(f"{prefix}: "):
        text = f"{prefix}: {text}"
    text = f"{key}={text}"
    if is_url(prefix):
        if NOT_THERE in text:
            text += "; a data set is its .bin, .idx and .manifest.json, as `megaspec data prepare` makes them: upload"
            text += " all of them under that name"
    elif not Path(f"{prefix}.idx").exists():
        text += f"; make it with `{prepare_command(spec, number)}`"
    return Problem(key, text, code="data-files")


class _CountedLengths:
    """The histograms of a blend's data sets, put together by the share of the tokens that each has.

    They decide what a plan believes and nothing of a run: one that can't be used is told, and keeps nobody from
    training.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[Lengths, float]] = []
        self._files: list[str] = []
        self._uncounted: list[str] = []
        self._unusable: list[str] = []

    def add(self, part: BlendPart, files: TokenSet) -> None:
        """A data set, with what was counted of it."""
        try:
            record = files.histogram()
        except DataError as error:
            self._unusable.append(str(error))
            record = None
        if record is None:
            self._uncounted.append(part.prefix)
        elif record.tokens:
            # without weights each counts by its tokens
            share = float(record.tokens) if part.weight is None else part.weight
            self._parts.append((record.lengths, share))
            self._files.append(files.lengths_file)

    @property
    def lengths(self) -> Lengths:
        """Of the blend; () where a data set has not been counted."""
        if self._uncounted:
            return ()
        return mixed(self._parts)

    @property
    def how(self) -> str:
        """Where they are from, or why they can't be used and what counts them."""
        if not self._uncounted:
            return ", ".join(self._files)
        reasons = self._unusable[:_MOST_NAMED]
        more = len(self._unusable) - len(reasons)
        if more:
            reasons.append(f"{more} more can't be used")
        return "; ".join([*reasons, self._what_counts])

    @property
    def _what_counts(self) -> str:
        """The command for the data sets that have not been counted."""
        named = self._uncounted[:_MOST_NAMED]
        more = len(self._uncounted) - len(named)
        counts = "counts how long documents are"
        if len(self._uncounted) == 1:
            return f"`megaspec data inspect {shlex.join(named)}` {counts}"
        sets = ", ".join(map(shlex.quote, named))
        if more:
            sets += f" and {more} more"
        return f"`megaspec data inspect PREFIX` {counts}, here of {len(self._uncounted)} data sets: {sets}"


def prepare_command(spec: IndexedSpec, number: int) -> str:
    """The command that makes a data set of the blend. INPUT and NAME stand for what nothing says."""
    given = "INPUT"
    tokenizer = None
    if spec.prepare is not None:
        given = spec.prepare.input or given
        tokenizer = spec.prepare.tokenizer
    # all data sets of a blend have one tokenizer
    for part in spec.blend:
        tokenizer = _tokenizer_beside(part.prefix) or tokenizer
    words = [given, "--out", spec.blend[number].prefix, "--tokenizer", tokenizer or "NAME"]
    return f"megaspec data prepare {shlex.join(words)}"


def _tokenizer_beside(prefix: str) -> str | None:
    """What makes further data sets of the tokenizer of one that is there; None where it isn't there, or doesn't say."""
    try:
        manifest = load_manifest(prefix)
    except DataError:
        return None
    if manifest is None:
        return None
    if not manifest.tokenizer.ending or manifest.tokenizer.name == "byte":
        return "byte"
    copy = f"{prefix}.tokenizer{manifest.tokenizer.ending}"
    return copy if Path(copy).exists() else None


def _counts(files: TokenSet, split: tuple[float, float, float]) -> "Counts":
    lengths = files.lengths()
    from megaspec.data.counts import count_tokens  # numpy, only where there are token files

    return count_tokens(lengths, split)


def _nothing_to_count(key: str, prefix: str, spec: IndexedSpec, tokens: int) -> Problem:
    text = f"{key}={prefix} has {tokens} {plural('token', tokens)} for training, data.seq_len={spec.seq_len} needs"
    text += f" {spec.seq_len + 1} of each data set of a blend without weights; leave it out, or give every data set"
    text += " a weight"
    return Problem(key, text, code="data-files")


def _mixed_tokenizers(spec: IndexedSpec, manifests: list[DataManifest], *, key: str) -> list[Problem]:
    """A problem where the data sets of a blend were made by different tokenizers."""
    by_hash = {manifest.tokenizer.sha256: manifest.tokenizer for manifest in manifests}
    if len(by_hash) < 2:
        return []
    names = []
    for tokenizer in by_hash.values():
        names.append(f"{tokenizer.name} ({tokenizer.vocab_size} ids, sha256 {tokenizer.sha256[:8]})")
    prefixes = ", ".join(part.prefix for part in spec.blend)
    text = f"{key}={prefixes} mixes tokens of {' and '.join(names)}; prepare all data sets with one tokenizer"
    return [Problem(key, text, code="data-tokenizers")]


def _stream(spec: StreamSpec, *, key: str = "data", known: Sequence[RemoteData] = ()) -> DataFacts:
    """Of text files: how many tokens they have is not known before they are read."""
    problems: list[Problem] = []
    remote: list[RemoteData] = []
    text_urls: set[str] = set()
    tokenizer = None
    wrong = _wrong_urls(spec, key=key)
    away: dict[str, str] = {}
    for place in url_places(spec, key=key):
        if place.key in wrong:
            problems.append(wrong[place.key])
            continue
        if store_of(place.url) in away:
            problems.append(_not_asked(place.key, place.url, away[store_of(place.url)]))
            continue
        try:
            record, urls = _text_there(place, known)
        except (DataError, UsageError) as error:
            if isinstance(error, StoreAway):
                away[store_of(place.url)] = place.url
            text = str(error)
            if not text.startswith(f"{place.url}: "):
                text = f"{place.url}: {text}"
            problems.append(Problem(place.key, f"{place.key}={text}", code="data-files"))
            continue
        remote.append(record)
        text_urls.update(urls)
    if not problems:
        problems += _text_problems(spec, remote, key=key)
    try:
        tokenizer = stream_tokenizer(spec)
    except DataError as error:
        problems.append(Problem(f"{key}.tokenizer", str(error), code="data-files"))
    known_by = ""
    if not problems and tokenizer is not None:
        known_by = fingerprint(spec, tokenizer, remote)
    endless = dict.fromkeys(SPLITS)
    return DataFacts(
        vocab_size=None if tokenizer is None else tokenizer.vocab_size,
        eod=None if tokenizer is None else tokenizer.eod,
        train_samples_per_epoch=None,
        tokens=endless,
        samples=endless,
        tokenizer=None if tokenizer is None else tokenizer.name,
        tokenizer_sha256=None if tokenizer is None else tokenizer.sha256,
        fingerprint=known_by,
        problems=tuple(problems),
        how_lengths=_OF_A_STREAM,
        remote=tuple(remote),
        text_urls=frozenset(text_urls),
    )


def _text_there(place: UrlPlace, known: Sequence[RemoteData]) -> tuple[RemoteData, list[str]]:
    """What lies at a URL of text files, and the URL of each. Raises as `open_set`."""
    before = noted_of(place.url, known)
    if before is not None:
        names = listing_here(folder_here(before, place.download_dir), before)
        if names is not None:
            return before, text_urls_of(place.url, names)
    listing = list_text(place.url)
    if before is not None and before.digest != listing.record.digest:
        raise DataError(changed_there(place.url, before.digest, listing.record.digest))
    return listing.record, text_urls_of(place.url, [file.name for file in listing.files])


def _text_problems(spec: StreamSpec, remote: Sequence[RemoteData], *, key: str) -> list[Problem]:
    """What is wrong with the names and weights of a stream's files, and with the first document of each that is here:
    what is fetched later is looked at when it is read."""
    if all(is_here(place, noted_of(place.url, remote)) for place in url_places(spec, key=key)):
        spec = data_here(spec, remote)
    else:
        spec = _of_this_machine(spec)
        if not spec.files:
            return []
    try:
        groups = find_groups(spec)
    except DataError as error:
        return [Problem(f"{key}.files", str(error), code="data-files")]
    return [
        Problem(f"{key}.files", f"{key}.files: {wrong}", code="data-files") for wrong in file_problems(spec, groups)
    ]


def _of_this_machine(spec: StreamSpec) -> StreamSpec:
    """A stream without the files that URLs name."""
    entries = tuple(entry for entry in spec.files if not is_url(entry.path))
    if len(entries) == len(spec.files):
        return spec
    return spec.model_copy(update={"files": entries})


FACTS: dict[type[DataSpec], Callable[..., DataFacts]] = {
    IndexedSpec: _indexed,
    SyntheticSpec: made,
    RandomSpec: made,
    StreamSpec: _stream,
}
