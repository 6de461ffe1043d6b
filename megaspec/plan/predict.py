"""What ranks report beside what they measure, worked out before they start: see log/prediction.py."""

from dataclasses import asdict

from megaspec.estimate.flops import flops_per_token
from megaspec.estimate.hardware import hardware_of
from megaspec.estimate.memory import memory_of
from megaspec.estimate.target import Target
from megaspec.log.prediction import Prediction, Saving
from megaspec.search.remedies import savings
from megaspec.spec import Spec


def predict(spec: Spec, target: Target) -> Prediction:
    """Speed's yardsticks, the memory of every stage, and what would save most of it."""
    hardware = hardware_of(target)
    found = []
    if hardware is not None:
        found = savings(spec, hardware)
    return Prediction(
        flops_per_token=flops_per_token(spec.model, seq_len=spec.data.seq_len, tp=spec.parallelism.tp),
        peak_flops=target.peak_flops(spec.precision.kind),
        memory=tuple(asdict(stage) for stage in memory_of(spec)),
        savings=tuple(Saving(words=one.words, total=one.total) for one in found),
    )
