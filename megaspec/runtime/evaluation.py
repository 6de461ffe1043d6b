"""Evaluation: the loss of each set, by all ranks together, until one of them is asked to stop.

Note "What is evaluated". Of each set the first `train.eval_samples` sequences, or all where it has fewer: none twice.
The last micro batches are filled up with rows that count nothing. A loss is the mean over the valid tokens of these
sequences, so it depends neither on the layout nor on the micro batch, with two exceptions that training has, too. With
a capacity_factor experts drop tokens by micro batch, and the rows that fill one up raise the capacity and take of it.
In fp8 scales that are not delayed are taken over all rows of a micro batch.

Note "Asked to stop". An evaluation may take longer than the grace time of a scheduler. All ranks vote before each pass
through the pipeline but the first, and leave the evaluation together; what was computed of it is lost. The first pass
is always run, so that a run whose every start is stopped at once still gets on where an evaluation is one pass.
"""

from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from megaspec.core import counted
from megaspec.core.faults import failpoint
from megaspec.data.loader import eval_batches, open_source
from megaspec.data.source import CountedSource, Source
from megaspec.data.spec import ORDER_VERSION, DataSpec, evaluation_sets
from megaspec.data.urls import data_here
from megaspec.launcher.stop import stop_requested
from megaspec.parallelism.mesh import Mesh
from megaspec.runtime.build import TrainState
from megaspec.runtime.plugins import loaded_builders
from megaspec.runtime.step import evaluation_sums, mean_loss


@dataclass(frozen=True)
class SetLoss:
    """Of one evaluation set."""

    loss: float
    """Mean over the valid tokens."""
    tokens: int
    """Valid tokens."""
    sequences: int


@dataclass(frozen=True)
class Evaluated:
    """An evaluation that was not cut."""

    sets: dict[str, SetLoss]
    """By name; `valid` is the share that data.split leaves for it."""

    @property
    def loss(self) -> float:
        """The validation loss of a run: the mean over the sets, each of which counts the same however large it is."""
        return fmean(one.loss for one in self.sets.values())


class StopVote:
    """Whether any rank was asked to stop: a small all-reduce over the world.

    On a GPU the answer is that of the call before, so that the host runs ahead of the device by one pass.
    """

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._is_first = True
        self._before: Tensor | None = None

    def __call__(self) -> bool:
        if self._is_first:
            self._is_first = False
            return False
        failpoint("evaluate_pass")
        votes = torch.full((), int(stop_requested()), device=self._mesh.device)
        if self._mesh.world_size > 1:
            counted.all_reduce(votes)
        if self._mesh.device.type == "cpu":
            return votes.item() > 0
        before = self._before
        self._before = votes
        return before is not None and before.item() > 0


def _sequences(source: Source, most: int) -> int:
    """How many sequences of a set are evaluated: `most`, or all where it has fewer, so that none is taken twice."""
    if isinstance(source, CountedSource):
        return source.count(most)
    return min(most, len(source))


class Evaluation:
    """The evaluation sets of a run. They are opened and checked by the first evaluation."""

    def __init__(self, built: TrainState):
        self._built = built
        self._sources: dict[str, Source] = {}

    def run(self) -> "Evaluated | None":
        """The loss of each set. None: a rank was asked to stop before all of it was computed. All ranks call it."""
        built = self._built
        built.position.mark("evaluation")
        failpoint("evaluate")
        for chunk in built.chunks:
            chunk.eval()
        try:
            return self._all_sets()
        finally:
            for chunk in built.chunks:
                chunk.train()

    def _all_sets(self) -> "Evaluated | None":
        is_cut = StopVote(self._built.mesh)
        sets = {}
        for name, data in evaluation_sets(self._built.spec.data).items():
            source = self._source(name, data)
            sequences = _sequences(source, self._built.spec.train.eval_samples)
            sums = self._sums(source, sequences, is_cut, document_mask=data.document_mask)
            if sums is None:
                return None
            sets[name] = SetLoss(float(mean_loss(sums)), int(sums[1]), sequences)
        return Evaluated(sets)

    def _sums(self, source: Source, sequences: int, is_cut: "StopVote", *, document_mask: bool) -> Tensor | None:
        built = self._built
        batches = eval_batches(
            source,
            sequences,
            micro_batch=built.spec.train.micro_batch,
            dp_rank=built.mesh.index("dp"),
            dp_size=built.mesh.size("dp"),
            device=built.device,
            document_mask=document_mask,
        )
        return evaluation_sums(built, batches, is_cut=is_cut)

    def _source(self, name: str, data: DataSpec) -> Source:
        if name not in self._sources:
            spec = self._built.spec
            assert spec.data_order == ORDER_VERSION, f"order {spec.data_order} of the data, {ORDER_VERSION} is made"
            self._sources[name] = open_source(
                data_here(data, spec.remote),
                split="valid",
                seed=data.seed,
                segments=spec.segments,
                vocab_size=spec.model.vocab_size,
                sources=loaded_builders().sources,
            )
        return self._sources[name]
