"""Looking for ranks that compute or remember wrongly (train.checks): which, where, in which tensor.

Note "Three questions".
- Do copies agree? What several ranks hold alike has the same checksum on all of them: it is taken before each update,
  added up, and compared every so many steps by one small all-gather.
- Is memory what it was? After an update the checksum of a rank's own weights and states is taken, and again before the
  next one.
- Does a step give the same twice? Its forward and backward passes are computed again, and loss and gradients compared,
  before ranks sum them and after.
What is found is summed beside the gradient's norm, so that all ranks skip the update, and read by the host when it
reads the loss.

Note "What is trusted". Before a checkpoint is written its content is compared, so that every checkpoint of a run that
compares was agreed on when it was written; none is written once something was found. A step with bad numbers is looked
at at once: a flipped exponent makes NaN, and the rank is named before anything is skipped for it.

Note "A step, not a micro batch". Gradients of micro batches are added up inside of matrix products, so that what one of
them brought can't be told apart afterwards; the smallest whole is a step's. A share of the steps costs as much as the
same share of all micro batches.
"""

import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import torch
from torch import Tensor

from megaspec.checkpoint.comm import Comm
from megaspec.core import counted
from megaspec.core.errors import HardwareError, Problem, RecipeError
from megaspec.core.layout import Layout
from megaspec.log.events import HardwareSuspected
from megaspec.parallelism.bucket import Bucket
from megaspec.parallelism.expert import buffers_of, routers_of
from megaspec.runtime.build import TrainState
from megaspec.runtime.checksums import Checksums, Summed, checksum
from megaspec.train.guard import sampled

# Sums of one step after the other are folded so: an odd factor loses nothing modulo 2^64.
_FOLD = 0xD1342543DE82EF95 - 2**64
# Steps whose evidence is kept: the host reads a step's numbers one step late.
_KEPT = 3
_MOST_NAMED = 8

Difference = tuple[bool, str]
"""Of a step that was computed twice: whether it was there before ranks summed anything, and what it is."""


@dataclass
class _Evidence:
    """Of one step, on the device, for who has to say what was found."""

    compared: Tensor | None = None
    """[pieces]: what copies were compared by."""
    changed: Tensor | None = None
    """[kept pieces]: whose memory changed."""
    differences: tuple[list[str], Tensor] | None = None
    """What was computed twice, and whether it differed."""


@dataclass(frozen=True)
class _Accused:
    """Ranks that are suspected, with the first tensor of each."""

    what: str
    tensors: dict[int, str]
    is_certain: bool
    others: tuple[int, ...] = ()
    """That agree with each other."""


class Checks:
    """The checks of one rank. All ranks make theirs together, and call each method together."""

    def __init__(self, built: TrainState, comm: Comm, *, step: int):
        """`step`: steps that are done. RecipeError: copies are to be compared, and there are none."""
        self._built = built
        self._comm = comm
        self._spec = built.spec.train.checks
        self._sum_every = self._spec.sum_every
        self._step = step
        self.agreed_step = step
        """The last step that was looked at, of copies the last comparison; at first where the run began."""
        self._kept, self._others = _all_checksums(built)
        pieces = [*self._kept.pieces, *self._others.pieces]
        self._copies = _Copies(comm, [piece.key for piece in pieces], device=built.device)
        if self._spec.replicas_every and not self._copies.exist:
            key = "train.checks.replicas_every"
            text = (
                f"{key}={self._spec.replicas_every} compares what several ranks hold alike, and none do in this layout"
            )
            problem = Problem(key, f"{text}; set {key}=0 and train.checks.state in its place", code="checks-copies")
            raise RecipeError([problem])
        self._evidence: dict[int, _Evidence] = {}
        self._run: Callable[[], Tensor] | None = None
        self._first: _Fingerprint | None = None
        self._second: _Fingerprint | None = None
        self.forget()

    def forget(self) -> None:
        """Weights and states were loaded: what was summed is of others."""
        self._folded = torch.zeros(len(self._copies.keys), dtype=torch.int64, device=self._built.device)
        self._after: Tensor | None = None
        """Checksums behind the last update."""

    @property
    def compares(self) -> bool:
        """Copies are compared, and there are some."""
        return self._spec.replicas_every > 0 and self._copies.exist

    def begin(self, step: int) -> None:
        """A step begins."""
        self._step = step
        self._evidence[step] = _Evidence()
        self._evidence.pop(step - _KEPT, None)

    def before_step(self, run: Callable[[], Tensor]) -> None:
        self._run = run
        self._first = self._second = None
        if sampled(self._step, self._spec.recompute):
            self._first = self._computed(run)
            self._second = _Fingerprint(self._built)

    def before_update(self, local_loss: Tensor) -> tuple[Tensor, Tensor]:
        nothing = torch.zeros((), dtype=torch.float64, device=self._built.device)
        changed = nothing
        recomputed = nothing
        if self._first is not None:
            self._second.end(local_loss)
            names, differ = self._first.differences(self._second)
            self._evidence[self._step].differences = (names, differ)
            recomputed = differ.any().to(torch.float64)
        is_summed = self.compares and self._step % self._sum_every == 0
        if self._after is None and not is_summed:
            return changed, recomputed
        kept = self._kept.take()
        if self._after is not None:
            changed = self._compare_memory(kept)
        if is_summed:
            self._fold(kept)
        return changed, recomputed

    def after_update(self) -> Tensor:
        differing = torch.zeros((), dtype=torch.float64, device=self._built.device)
        if self.compares and self._step % self._spec.replicas_every == 0:
            differing = self._compare()
        self._after = None
        # that of the next step is compared with it
        if sampled(self._step, self._spec.state):
            self._after = self._kept.take()
        return differing

    def look_now(self, step: int) -> "Suspicion | None":
        """Looks at what ranks hold behind a step: before a checkpoint is written, and where its numbers were bad, which
        a bit in an exponent may be the reason of. -> what was found, the same on all ranks; None: nothing."""
        if self._after is None and not self.compares:
            return None
        self._step = step
        self._evidence.setdefault(step, _Evidence())
        changed = differing = torch.zeros((), dtype=torch.float64, device=self._built.device)
        kept = self._kept.take()
        if self._after is not None:
            changed = self._compare_memory(kept)
        if self.compares:
            self._built.data_parallel.wait_weights()
            self._fold(kept)
            differing = self._compare()
        found = torch.stack([changed, differing])
        if self._comm.size > 1:
            counted.all_reduce(found)
        n_changed, n_differing = found.tolist()
        if n_changed or n_differing:
            return self.accuse(step, n_changed=n_changed, n_recomputed=0, n_differing=n_differing)
        self.agreed_step = step
        return None

    def note_clean(self, step: int) -> None:
        """The host has read that nothing was found in a step."""
        looked = sampled(step - 1, self._spec.state) or sampled(step, self._spec.recompute)
        if self.compares:
            looked = step % self._spec.replicas_every == 0
        if looked:
            self.agreed_step = step

    def accuse(self, step: int, *, n_changed: float, n_recomputed: float, n_differing: float) -> "Suspicion":
        """Who is suspected, and why. All ranks call it together, with the same numbers of a step."""
        evidence = self._evidence[step]
        if n_changed:
            accused = self._whose_memory(evidence)
        elif n_recomputed:
            accused = self._who_computed(evidence)
        else:
            assert n_differing, "nothing was found"
            accused = self._whose_copies(evidence)
        return self._suspicion(step, accused)

    def _compare_memory(self, kept: Tensor) -> Tensor:
        """Whether this rank's memory is another than behind the last update: 0 or 1."""
        changed = kept != self._after
        self._evidence[self._step].changed = changed
        return changed.any().to(torch.float64)

    def _fold(self, kept: Tensor) -> None:
        others = self._others.take()
        self._folded = self._folded * _FOLD + torch.cat([kept, others])

    def _compare(self) -> Tensor:
        """How many comparisons of copies come out unequal; starts new sums."""
        self._evidence[self._step].compared = self._folded
        differing = self._copies.differing(self._folded)
        self._folded = torch.zeros_like(self._folded)
        return differing.to(torch.float64)

    def _computed(self, run: Callable[[], Tensor]) -> "_Fingerprint":
        """What a step comes to, without leaving a trace."""
        found = _Fingerprint(self._built)
        found.end(run())
        # what routers have seen of this step's tokens comes once more
        for _, router in routers_of(self._built.chunks):
            router.sums.zero_()
        return found

    def _whose_memory(self, evidence: _Evidence) -> _Accused:
        reports = self._comm.gather(self._names(self._kept.pieces, evidence.changed))
        tensors = {rank: names[0] for rank, names in enumerate(reports) if names}
        return _Accused("memory", tensors, is_certain=True)

    def _names(self, pieces: Sequence[Summed], is_so: Tensor | None) -> list[str]:
        if is_so is None:
            return []
        numbers = is_so.nonzero().flatten().tolist()[:_MOST_NAMED]
        return [_name_of(pieces[number].key) for number in numbers]

    def _who_computed(self, evidence: _Evidence) -> _Accused:
        mine: list[Difference] = []
        if evidence.differences is not None:
            mine = _told(*evidence.differences)
        return _who_differs_from_itself(self._comm.gather(mine))

    def _whose_copies(self, evidence: _Evidence) -> _Accused:
        reports = self._comm.gather(evidence.compared.tolist())
        accused = self._copies.minority(reports)
        if accused.is_certain or self._run is None or not self._built.spec.train.deterministic:
            return accused
        # as many say this as that: who computes the last step otherwise when it is computed again is the one
        first = self._computed(self._run)
        mine = _told(*first.differences(self._computed(self._run)))
        found = _who_differs_from_itself(self._comm.gather(mine))
        both = {rank: name for rank, name in accused.tensors.items() if rank in found.tensors}
        if both and len(both) < len(accused.tensors):
            return _Accused("replicas", both, is_certain=True)
        return accused

    def _suspicion(self, step: int, accused: _Accused) -> "Suspicion":
        places = self._comm.gather([socket.gethostname(), device_name(self._built.device)])
        ranks = sorted(accused.tensors)
        event = HardwareSuspected(
            step=step,
            what=accused.what,
            ranks=ranks,
            hosts=[places[rank][0] for rank in ranks],
            devices=[places[rank][1] for rank in ranks],
            tensors=[accused.tensors[rank] for rank in ranks],
            is_certain=accused.is_certain,
            agreed_step=self.agreed_step,
        )
        text = said(event, accused.others, self._comm.size)
        return Suspicion(event, HardwareError(text, ranks=event.ranks))


@dataclass(frozen=True)
class Suspicion:
    """Who is suspected: as plain data, and as the error that ends the run."""

    event: HardwareSuspected
    error: HardwareError


_WHAT = {
    "memory": "holds another {tensor} than it wrote",
    "recompute": "computes the same step twice and comes to another {tensor}",
    "replicas": "holds another {tensor} than other ranks, which should be a copy",
}
_SAVED = {
    "memory": "Nothing was saved since it changed",
    "recompute": "The update was not applied, nothing of this step was saved",
    "replicas": "Nothing was saved since they last agreed",
}


def said(event: HardwareSuspected, others: Sequence[int], world_size: int) -> str:
    """A suspicion in words."""
    told = []
    for rank, host, device, tensor in zip(event.ranks, event.hosts, event.devices, event.tensors, strict=True):
        what = _WHAT[event.what].format(tensor=tensor)
        told.append(f"rank {rank} of {world_size} (host {host}, {device}) {what}")
    text = f"step {event.step}: hardware is suspected: {'; '.join(told[:_MOST_NAMED])}"
    if len(told) > _MOST_NAMED:
        text += f"; and {len(told) - _MOST_NAMED} more"
    if others:
        text += f"; ranks {', '.join(map(str, others[:_MOST_NAMED]))} agree"
    if not event.is_certain:
        text += "; which of them is wrong can't be told from this"
    text += f". {_SAVED[event.what]}; step {event.agreed_step} was the last that was found in order. "
    return f"{text}Take the machine out, and go on with megaspec resume"


def device_name(device: torch.device) -> str:
    """A device that somebody can find: cuda:3 NVIDIA H100 80GB HBM3 GPU-..., or cpu."""
    if device.type != "cuda":
        return str(device)
    properties = torch.cuda.get_device_properties(device)
    return f"{device} {properties.name} GPU-{properties.uuid}"


_LOCAL = "local "


@dataclass
class _Fingerprint:
    """Checksums of what one rank computes in a step: its loss, the gradients before ranks sum them, and those of its
    shards after it. Collects from when it is made to `end`."""

    built: TrainState
    names: list[str] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.built.data_parallel.on_reduce = self._take

    def _take(self, bucket: Bucket) -> None:
        # each by itself: what lies between them holds anything
        for name in bucket.names:
            self.names.append(f"{_LOCAL}gradient of {name}")
            self.sums.append(checksum(bucket.division.view(bucket.sums.whole, name)))

    def end(self, local_loss: Tensor) -> None:
        self.built.data_parallel.on_reduce = None
        self.names.append(f"{_LOCAL}loss")
        self.sums.append(checksum(local_loss))
        for name, gradient in self.built.data_parallel.gradients.items():
            self.names.append(f"gradient of {name}")
            self.sums.append(checksum(gradient))

    def differences(self, other: "_Fingerprint") -> tuple[list[str], Tensor]:
        """What was computed, and whether it differs."""
        assert self.names == other.names, f"{len(self.names)} and {len(other.names)} parts of the same step"
        return self.names, torch.stack(self.sums) != torch.stack(other.sums)


def _told(names: Sequence[str], differ: Tensor) -> list[Difference]:
    """The first differences of a rank, for the others: those before ranks summed anything come first."""
    found = []
    for name, is_so in zip(names, differ.tolist(), strict=True):
        if is_so:
            found.append((name.startswith(_LOCAL), name))
    return found[:_MOST_NAMED]


def _who_differs_from_itself(reports: Sequence[Sequence[Difference]]) -> _Accused:
    """`reports`: of each rank, what differed. What a rank computed by itself comes before what ranks summed, which a
    wrong part spoils on all of them."""
    local = {}
    any_part = {}
    for rank, report in enumerate(reports):
        for is_local, name in report:
            any_part.setdefault(rank, name)
            if is_local:
                local.setdefault(rank, name.removeprefix(_LOCAL))
    tensors = local or any_part
    # ranks of one micro batch exchange activations: one of them spoils what the others compute
    return _Accused("recompute", tensors, is_certain=len(tensors) == 1)


class _Copies:
    """Which pieces several ranks hold alike, and the comparison of them."""

    def __init__(self, comm: Comm, keys: Sequence[str], *, device: torch.device):
        self.keys = list(keys)
        self._size = comm.size
        self._device = device
        hashes = [int.from_bytes(blake2b(key.encode(), digest_size=6).digest(), "big") for key in self.keys]
        assert len(set(hashes)) == len(hashes), "two pieces have one hash"
        self._reports: list[list[int]] = comm.gather(hashes)
        self._hashes = hashes
        holders: dict[int, list[int]] = {}
        for rank, report in enumerate(self._reports):
            for one in report:
                holders.setdefault(one, []).append(rank)
        self._holders = {one: tuple(ranks) for one, ranks in holders.items() if len(ranks) > 1}
        self.exist = bool(self._holders)
        # Pieces that the same ranks hold are compared together: each rank has a number for each such set of ranks.
        sets = [self._sets_of(report) for report in self._reports]
        self._most = max((len(one) for one in sets), default=0)
        place_of = {}
        for rank, mine in enumerate(sets):
            for number, ranks in enumerate(mine):
                place_of[rank, ranks] = rank * self._most + number
        here: list[int] = []
        first: list[int] = []
        for ranks in dict.fromkeys(self._holders.values()):
            for rank in ranks[1:]:
                here.append(place_of[rank, ranks])
                first.append(place_of[ranks[0], ranks])
        self._here = torch.tensor(here, dtype=torch.int64, device=device)
        self._first = torch.tensor(first, dtype=torch.int64, device=device)
        number_of = {ranks: number for number, ranks in enumerate(sets[comm.rank])}
        # pieces that nobody else holds go to a number that is not sent
        numbers = [number_of.get(self._holders.get(one, ()), self._most) for one in hashes]
        self._set_of_piece = torch.tensor(numbers, dtype=torch.int64, device=device)
        # by its own odd number, so that pieces that change places are found
        self._weights = torch.tensor([2 * one + 1 for one in hashes], dtype=torch.int64, device=device)

    def _sets_of(self, report: Sequence[int]) -> list[tuple[int, ...]]:
        """The sets of ranks with which a rank holds anything, in the order of its pieces."""
        return list(dict.fromkeys(self._holders[one] for one in report if one in self._holders))

    def differing(self, sums: Tensor) -> Tensor:
        """How many ranks have other sums than the first of their set. int64 scalar. `sums`: of this rank's pieces."""
        digests = torch.zeros(self._most + 1, dtype=torch.int64, device=self._device)
        digests.scatter_add_(0, self._set_of_piece, sums * self._weights)
        gathered = torch.empty(self._size * self._most, dtype=torch.int64, device=self._device)
        counted.all_gather_single(gathered, digests[: self._most].contiguous())
        return (gathered[self._here] != gathered[self._first]).sum()

    def minority(self, reports: Sequence[Sequence[int]]) -> _Accused:
        """Who holds something else than most. `reports`: of each rank, the sums of its pieces."""
        names = {one: _name_of(key) for one, key in zip(self._hashes, self.keys, strict=True)}
        by_rank = [dict(zip(mine, sums, strict=True)) for mine, sums in zip(self._reports, reports, strict=True)]
        certain: dict[int, str] = {}
        open_ones: dict[int, str] = {}
        agreeing: tuple[int, ...] = ()
        for one, ranks in self._holders.items():
            values = {rank: by_rank[rank][one] for rank in ranks}
            (common, count), *others = Counter(values.values()).most_common()
            if not others:
                continue
            name = names.get(one, "a tensor of another stage")
            if 2 * count > len(ranks):
                agreeing = tuple(rank for rank in ranks if values[rank] == common)
                for rank in ranks:
                    if values[rank] != common:
                        certain.setdefault(rank, name)
            else:
                for rank in ranks:
                    open_ones.setdefault(rank, name)
        if certain:
            return _Accused("replicas", certain, is_certain=True, others=agreeing)
        return _Accused("replicas", open_ones, is_certain=False)


def _key(stored: str, start: Sequence[int], shape: Sequence[int]) -> str:
    return f"{stored} {list(start)} {list(shape)}"


def _name_of(key: str) -> str:
    """The tensor of a key, without its rectangle."""
    return key.split(" [", 1)[0]


def _pieces_of(source: str, stored: str, name: str, layout: Layout) -> list[Summed]:
    found = []
    for piece in layout.pieces:
        found.append(Summed(_key(stored, piece.global_start, piece.shape), source, name, piece.local_slices))
    n_rows = sum(piece.shape[0] for piece in layout.pieces)
    if n_rows < layout.local_shape[0]:
        # rows that pad the vocabulary: zero on all ranks
        padding = slice(n_rows, layout.local_shape[0])
        key = _key(stored, (layout.shape[0], n_rows), layout.local_shape)
        found.append(Summed(key, source, name, (padding,)))
    return found


def _all_checksums(built: TrainState) -> tuple[Checksums, Checksums]:
    """Of what nobody writes between updates; and of the rest that ranks hold alike."""
    data = built.data_parallel

    def kept() -> dict[str, Mapping[str, Tensor]]:
        state = built.optimizer.state()
        return {"weights": data.weights, "master": built.optimizer.masters, **state}

    kept_pieces: list[Summed] = []
    masters = built.optimizer.masters
    for name in masters:
        kept_pieces += _pieces_of("master", f"model/{name}", name, built.shards[name])
    for kind, tensors in built.optimizer.state().items():
        for name in tensors:
            kept_pieces += _pieces_of(kind, f"optim/{kind}/{name}", name, built.shards[name])
    for name, weight in data.weights.items():
        layout = built.shards[name]
        # a master of the weight's own format is that weight
        if name not in masters or masters[name].dtype != weight.dtype:
            kept_pieces += _pieces_of("weights", f"weights/{name}", name, layout)

    def others() -> dict[str, Mapping[str, Tensor]]:
        return {"gathered": data.gathered, "router": buffers_of(built.chunks), "fp8": built.fp8.state()}

    other_pieces: list[Summed] = []
    for name in data.gathered:
        other_pieces += _pieces_of("gathered", f"gathered/{name}", name, built.tensor_parallel.layouts[name])
    for source, tensors in others().items():
        if source == "gathered":
            continue
        for name, tensor in tensors.items():
            whole = tuple(slice(0, size) for size in tensor.shape)
            key = _key(f"{source}/{name}", [0] * tensor.dim(), tensor.shape)
            other_pieces.append(Summed(key, source, name, whole))
    return (
        Checksums(kept_pieces, kept, device=built.device),
        Checksums(other_pieces, others, device=built.device),
    )


def build_checks(built: TrainState, comm: Comm, *, step: int) -> Checks | None:
    """The checks that a Spec asks for; None where it asks for none. All ranks call it together."""
    if not built.spec.train.checks.is_on:
        return None
    return Checks(built, comm, step=step)
