"""What a kind of GPU and the machine around it give, from NVIDIA's data sheets. Torch-free.

How much of it is reached stands in throughput.py.
"""

from typing import Protocol

from megaspec.core.errors import COMMAND_LINE, Problem, RecipeError
from megaspec.core.frozen import Frozen, NonNegativeInt, PositiveFloat, PositiveInt
from megaspec.core.problems import did_you_mean, one_of

LEFT_FREE = 0.05
"""Share of a GPU's memory that a search leaves free: predictions lie within it."""


class Hardware(Frozen):
    """One kind of GPU, its links and its network."""

    name: str
    """What `hardware=` calls it."""
    gpu_names: tuple[str, ...]
    """Parts of the name that the driver gives such a GPU."""
    sm: NonNegativeInt
    """Compute capability, 90 for Hopper."""
    memory: PositiveInt
    """Memory of one GPU in bytes, as the driver reports it."""
    peak: dict[str, PositiveFloat]
    """Dense FLOP/s by format of the factors; a format that is missing can't be used. fp32 is without TF32."""
    best_products: dict[str, PositiveFloat]
    """FLOP/s of the best-shaped matrix products in a short burst, by format, as MEASURED_BY found them; a format that
    is missing was not measured."""
    throttles: bool = True
    """Whether products that come one after the other are slower than in a burst, because power is limited."""
    memory_bandwidth: PositiveFloat
    """Bytes per second, read or written."""
    node_size: PositiveInt
    """GPUs that NVLink joins."""
    link_bandwidth: PositiveFloat
    """NVLink: bytes per second of one GPU in one direction."""
    network_bandwidth: PositiveFloat
    """Between nodes: bytes per second of one GPU in one direction, with one network card per GPU."""
    network_latency: PositiveFloat
    """Seconds of a short message between nodes."""

    @property
    def room(self) -> float:
        """Bytes of a GPU's memory that a layout may be predicted to take."""
        return (1 - LEFT_FREE) * self.memory


class NamedGpu(Protocol):
    """A target, as far as this file needs it."""

    gpu: str | None
    gpu_memory: int


# Large products of every kind of GPU here, measured by one program, means of 100 calls; fp16 runs at bf16's rate.
MEASURED_BY = "Bekman 2026, Machine Learning Engineering, maximum achievable matmul FLOPS"
_MIB = 2**20
# FLOP/s without sparsity, from NVIDIA's data sheets: A100, H100 and H200 (SXM), HGX B200, GB200 NVL72.
_AMPERE = {"fp64": 19.5e12, "fp32": 19.5e12, "bf16": 312e12, "fp16": 312e12}
_HOPPER = {"fp64": 67e12, "fp32": 67e12, "bf16": 989e12, "fp16": 989e12, "fp8": 1979e12}
_B200 = {"fp64": 40e12, "fp32": 80e12, "bf16": 2.25e15, "fp16": 2.25e15, "fp8": 4.5e15}
_GB200 = {"fp64": 45e12, "fp32": 90e12, "bf16": 2.5e15, "fp16": 2.5e15, "fp8": 5e15}
# An A100 may take 400 W for 312 TFLOP/s, an H100 or H200 700 W for 989: whole training steps on A100s reach 79 % of its
# peak (MosaicML's llm-foundry, benchmarks of training, 13B), more than any product of an H200 does that is kept busy.
_AMPERE_BEST = {"bf16": 271.2e12, "fp16": 271.2e12}
# Its H100 and H200 reach the same in bf16.
_HOPPER_BF16 = 794.5e12
# Bytes of a gigabit.
_GBIT = 1e9 / 8
# Seconds of a short message between nodes, taken to be the same of every network.
_LATENCY = 5e-6

# The SXM parts in NVIDIA's own machines (DGX, HGX, NVL72).
_ALL = (
    Hardware(
        name="A100-40",
        gpu_names=("A100",),
        sm=80,
        memory=40960 * _MIB,
        peak=_AMPERE,
        best_products=_AMPERE_BEST,
        throttles=False,
        memory_bandwidth=1.555e12,
        node_size=8,
        link_bandwidth=300e9,
        network_bandwidth=200 * _GBIT,
        network_latency=_LATENCY,
    ),
    Hardware(
        name="A100-80",
        gpu_names=("A100",),
        sm=80,
        memory=81920 * _MIB,
        peak=_AMPERE,
        best_products=_AMPERE_BEST,
        throttles=False,
        memory_bandwidth=2.039e12,
        node_size=8,
        link_bandwidth=300e9,
        network_bandwidth=200 * _GBIT,
        network_latency=_LATENCY,
    ),
    Hardware(
        name="H100",
        gpu_names=("H100",),
        sm=90,
        memory=81559 * _MIB,
        peak=_HOPPER,
        best_products={"bf16": _HOPPER_BF16, "fp16": _HOPPER_BF16, "fp8": 1402.6e12},
        memory_bandwidth=3.35e12,
        node_size=8,
        link_bandwidth=450e9,
        network_bandwidth=400 * _GBIT,
        network_latency=_LATENCY,
    ),
    Hardware(
        name="H200",
        gpu_names=("H200",),
        sm=90,
        memory=143771 * _MIB,
        peak=_HOPPER,
        best_products={"bf16": _HOPPER_BF16, "fp16": _HOPPER_BF16, "fp8": 1453.4e12},
        memory_bandwidth=4.8e12,
        node_size=8,
        link_bandwidth=450e9,
        network_bandwidth=400 * _GBIT,
        network_latency=_LATENCY,
    ),
    Hardware(
        name="B200",
        gpu_names=("B200",),
        sm=100,
        memory=183359 * _MIB,
        peak=_B200,
        best_products={"bf16": 1745e12, "fp16": 1745e12, "fp8": 3432.5e12},
        memory_bandwidth=7.7e12,
        node_size=8,
        link_bandwidth=900e9,
        network_bandwidth=400 * _GBIT,
        network_latency=_LATENCY,
    ),
    Hardware(
        name="GB200",
        gpu_names=("GB200",),
        sm=100,
        memory=189471 * _MIB,
        peak=_GB200,
        best_products={"bf16": 1822e12, "fp16": 1822e12, "fp8": 3615.6e12},
        memory_bandwidth=8e12,
        node_size=72,
        link_bandwidth=900e9,
        network_bandwidth=400 * _GBIT,
        network_latency=_LATENCY,
    ),
)
HARDWARE: dict[str, Hardware] = {one.name: one for one in _ALL}


def hardware_named(word: str) -> Hardware:
    """The GPU that a user names, whatever the case. RecipeError: no such one, or several."""
    # A100-80GB is A100-80
    wanted = word.lower().removesuffix("gb")
    near = []
    for one in _ALL:
        name = one.name.lower()
        if name == wanted:
            return one
        if wanted and name.startswith(wanted):
            near.append(one.name)
    if len(near) > 1:
        text = f"hardware={word} may be one of several; choose {one_of(near)}"
    else:
        text = f"hardware={word} is not known; "
        hint = did_you_mean(word.upper(), HARDWARE)
        if hint and not near:
            text += f"{hint} "
        text += f"choose {one_of(list(HARDWARE))}"
    raise RecipeError([Problem("hardware", text, COMMAND_LINE)])


def hardware_called(gpu: str, memory: int) -> Hardware | None:
    """The entry for the driver's name of a GPU and its memory in bytes, 0 when it is not known; None for no entry.

    The nearest memory decides where a name has several; a GPU with another amount keeps its own.
    """
    part = _part_of_name(gpu)
    found = [one for one in _ALL if part in one.gpu_names]
    if not found:
        return None
    if not memory:
        return found[-1]
    nearest = min(found, key=lambda one: abs(one.memory - memory))
    return nearest.model_copy(update={"memory": memory})


def _part_of_name(gpu: str) -> str | None:
    """The entry of `gpu_names` that stands in the driver's name."""
    # a GH200's processor is an H100's
    parts = {"GH200": "H100"}
    for hardware in _ALL:
        for part in hardware.gpu_names:
            parts[part] = part
    # longest first: B200 is a part of GB200, H200 of GH200
    for part in sorted(parts, key=len, reverse=True):
        if part in gpu:
            return parts[part]
    return None


def hardware_of(target: NamedGpu) -> Hardware | None:
    """The entry for a target's GPUs; None without a GPU, or with one that the table does not know."""
    if target.gpu is None:
        return None
    return hardware_called(target.gpu, target.gpu_memory)
