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
    sizes = {"seq_len": spec.data.seq_len, "tp": spec.parallelism.tp, "trainable": spec.train.trainable}
    peak_flops = target.peak_flops(spec.precision.kind)
    no_peak = None
    if peak_flops is None:
        no_peak = _why_no_peak(spec, target)
    return Prediction(
        flops_per_token_causal=flops_per_token(spec.model, convention="causal", **sizes),
        flops_per_token_full=flops_per_token(spec.model, convention="full", **sizes),
        peak_flops=peak_flops,
        no_peak=no_peak,
        memory=tuple(asdict(stage) for stage in memory_of(spec)),
        savings=tuple(Saving(words=one.words, total=one.total) for one in found),
    )


def _why_no_peak(spec: Spec, target: Target) -> str:
    """Why MFU can't be told."""
    if target.device != "cuda":
        return "the run is on CPUs, of which no peak is known"
    if hardware_of(target) is None:
        return f"the GPU {target.gpu} is not in megaspec/estimate/hardware.py"
    return f"no peak in {spec.precision.kind} is known of the GPU {target.gpu}"
