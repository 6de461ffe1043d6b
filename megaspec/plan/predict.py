"""What ranks report beside what they measure, worked out before they start: see log/prediction.py."""

from dataclasses import asdict

from megaspec.estimate.flops import flops_per_token
from megaspec.estimate.hardware import hardware_of
from megaspec.estimate.memory import memory_of
from megaspec.estimate.step_kinds import by_kind, rank_work
from megaspec.estimate.step_time import step_time
from megaspec.estimate.target import Target
from megaspec.estimate.throughput import MeasuredThroughput, throughput_of
from megaspec.log.prediction import Prediction, RankWork, Saving
from megaspec.search.remedies import savings
from megaspec.spec import Spec


def predict(spec: Spec, target: Target, *, throughput: MeasuredThroughput | None = None) -> Prediction:
    """Speed's yardsticks, a step's time and work by kind, the memory of every stage, and what would save most of it.

    `throughput`: what the machine was measured to reach; None: what is known of its kind of GPU.
    """
    hardware = hardware_of(target)
    found = []
    if hardware is not None:
        found = savings(spec, hardware)
    sizes = {"seq_len": spec.data.seq_len, "tp": spec.parallelism.tp, "trainable": spec.train.trainable}
    peak_flops = target.peak_flops(spec.precision.kind)
    no_peak = None
    if peak_flops is None:
        no_peak = _why_no_peak(spec, target)
    step_seconds = None
    no_step_seconds = None
    if hardware is not None and spec.device == "cuda":
        time = step_time(spec, hardware, throughput or throughput_of(hardware))
        step_seconds = by_kind(time).by_kind()
    else:
        no_step_seconds = _why_no_times(target)
    works = [rank_work(spec, rank) for rank in range(spec.parallelism.pp)]
    return Prediction(
        flops_per_token_causal=flops_per_token(spec.model, convention="causal", **sizes),
        flops_per_token_full=flops_per_token(spec.model, convention="full", **sizes),
        peak_flops=peak_flops,
        no_peak=no_peak,
        memory=tuple(asdict(stage) for stage in memory_of(spec)),
        step_seconds=step_seconds,
        no_step_seconds=no_step_seconds,
        works=tuple(RankWork(**asdict(work)) for work in works),
        savings=tuple(Saving(words=one.words, total=one.total) for one in found),
    )


def _why_no_times(target: Target) -> str:
    """Why a step's time can't be told."""
    if target.device != "cuda":
        return "of CPUs no speeds are known"
    return f"of the GPU {target.gpu} no speeds are known"


def _why_no_peak(spec: Spec, target: Target) -> str:
    """Why MFU can't be told."""
    if target.device != "cuda":
        return "the run is on CPUs, of which no peak is known"
    if hardware_of(target) is None:
        return f"the GPU {target.gpu} is not in megaspec/estimate/hardware.py"
    return f"no peak in {spec.precision.kind} is known of the GPU {target.gpu}"
