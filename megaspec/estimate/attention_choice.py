"""The attention that `auto` takes: the fastest that was measured on such a GPU, else the first of the catalog."""

from megaspec.estimate.attention_rates import AttentionRate, fastest, kind_of
from megaspec.estimate.hardware import hardware_of
from megaspec.estimate.target import Target
from megaspec.estimate.throughput import MeasuredThroughput, throughput_of
from megaspec_kernels.catalog import Use, choose, runs_on


def attention_for(target: Target, use: Use) -> str:
    """What `auto` takes."""
    measured = fastest_attention(target, use)
    if measured is not None:
        return measured
    return choose("attention", device=target.device, sm=target.sm, use=use, packages=target.versions)


def fastest_attention(target: Target, use: Use) -> str | None:
    """By the shipped table of such a GPU, in the order of sums that is asked for; None where it has nothing to
    compare."""
    if use.head_size is None:
        return None
    names = runs_on("attention", device=target.device, sm=target.sm, use=use, packages=target.versions)
    kind = kind_of(documents=use.documents, window=use.window)
    return fastest(
        attention_rates(target), among=names, kind=kind, head_size=use.head_size, deterministic=use.deterministic
    )


def attention_rates(target: Target) -> tuple[AttentionRate, ...]:
    """Of such a GPU, in any order of sums and in one; none of a CPU, and of GPUs that nobody measured."""
    throughput = _throughput(target)
    return () if throughput is None else throughput.attention_rates


def one_order_measured_on(target: Target) -> str | None:
    """The kind of GPU whose rates in one order of sums stand in for this one's; None: it has its own, or none."""
    throughput = _throughput(target)
    if throughput is None or throughput.one_order_measured_on == throughput.hardware.name:
        return None
    return throughput.one_order_measured_on


def _throughput(target: Target) -> MeasuredThroughput | None:
    hardware = hardware_of(target)
    if target.device != "cuda" or hardware is None:
        return None
    return throughput_of(hardware)
