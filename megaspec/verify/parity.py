"""Does a layout train the same model as one rank? Runs steps, gathers every gradient by its layout, compares.

The error of a gradient is max|g − g₁| / max(max|g₁|, ‖all g₁‖/√N), N elements in all: some gradients are zero in exact
arithmetic, and their rounding noise is measured against the size that gradients have here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, isnan, prod, sqrt

import torch
from torch import Tensor

from megaspec.core import counted
from megaspec.core.layout import Layout, layouts_as_json, layouts_of_json, whole
from megaspec.data.batch import Batch
from megaspec.parallelism.expert import RouterStatistics, buffers_of
from megaspec.parallelism.mesh import Mesh
from megaspec.precision.scaler import build_scaler
from megaspec.runtime.build import TrainState, build, initialise
from megaspec.runtime.position import Position
from megaspec.runtime.step import evaluate, train_step
from megaspec.spec import Spec

# What this rank holds, before it is gathered: "gradient" or "weight", tensors and their layouts by global name.
Look = Callable[[str, Mapping[str, Tensor], Mapping[str, Layout]], None]


@dataclass(frozen=True)
class Gathered:
    """Tensors of all ranks, put together by their layouts. All float64 on the CPU."""

    values: dict[str, Tensor]
    """Global tensors by global name."""
    replica_gap: dict[str, float]
    """Largest difference between two ranks' copies of one element."""
    padding: dict[str, float]
    """Largest absolute value in elements that no piece covers, which must be zero."""


@dataclass(frozen=True)
class Trajectory:
    """What a run of a few steps showed. The gathered parts are empty on ranks other than 0."""

    losses: list[float]
    """Mean over the valid tokens of each step's global batch."""
    norms: list[float]
    """Gradient norm of each step, before clipping."""
    evaluation: float
    """Evaluation loss of the last batch after the last step."""
    gradients: Gathered
    """Of the first step, without loss scale."""
    weights: Gathered
    """Master weights after the last step."""
    routers: Gathered = field(default_factory=lambda: Gathered({}, {}, {}))
    """What routers did with the last step's tokens and what they keep from it: loads, drops, losses, biases, shares."""


@dataclass(frozen=True)
class Tolerances:
    """Largest errors that count as equal."""

    loss: float
    norm: float
    gradient: float
    weight: float


# Rounding alone: measured at most 2e-15 (loss) and 1e-13 (gradients) in fp64, 1e-6 and 1e-5 in fp32.
TOLERANCES = {
    "fp64": Tolerances(loss=1e-12, norm=1e-10, gradient=1e-10, weight=1e-10),
    "fp32": Tolerances(loss=1e-5, norm=1e-4, gradient=1e-4, weight=1e-4),
}


@dataclass(frozen=True)
class Finding:
    """One comparison."""

    what: str
    """Which quantity, and where it was worst."""
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # False for NaN

    @property
    def margin(self) -> float:
        """Error in units of the tolerance: above 1 the comparison failed."""
        if not isfinite(self.error):
            return float("inf")
        return _ratio(self.error, self.tolerance)

    def __str__(self) -> str:
        return f"{self.what}: error {self.error:.2e}, tolerance {self.tolerance:.0e}"


def divide(batch: Batch, *, mesh: Mesh, micro_batch: int) -> list[Batch]:
    """This rank's micro batches of a global batch, on the mesh's device.

    Micro batch j of data-parallel rank r takes the sequences from (j · dp + r) · micro_batch on.
    """
    dp = mesh.size("dp")
    rank = mesh.index("dp")
    n = len(batch.ids)
    assert n % (dp * micro_batch) == 0, f"{n} sequences don't divide into dp={dp} times micro batches of {micro_batch}"
    out = []
    for j in range(n // (dp * micro_batch)):
        first = (j * dp + rank) * micro_batch
        out.append(batch.sequences(slice(first, first + micro_batch)).to(mesh.device))
    return out


def run_steps(
    spec: Spec,
    *,
    mesh: Mesh,
    batches: Sequence[Batch],
    loss_scale: float | None = None,
    round_weights_to: torch.dtype | None = None,
    position: Position | None = None,
    look: Look | None = None,
) -> Trajectory:
    """Trains from the spec's seed on the given global batches, one a step, at the spec's highest learning rate.

    `loss_scale` None: the precision's own. `round_weights_to` rounds the initial weights, so that runs of different
    precision start from equal ones. `position`: where a watchdog looks. `look` gets what is gathered.
    """
    built = build(spec, mesh=mesh, position=position)
    initialise(built)
    # the master weights are rounded, and the model's follow them
    if round_weights_to is not None:
        for name, master in built.optimizer.masters.items():
            built.optimizer.put("master", name, master.to(round_weights_to))
        built.optimizer.write_back()
        built.data_parallel.gather_weights()
    scaler = build_scaler(spec.precision, device=built.device)
    if loss_scale is not None:
        scaler.scale.fill_(loss_scale)
    losses: list[float] = []
    norms: list[float] = []
    gradients: list[Gathered] = []  # of the first step alone

    def take_gradients() -> None:
        unscaled: dict[str, Tensor] = {}
        for name, gradient in built.data_parallel.gradients.items():
            unscaled[name] = gradient.to(torch.float64) / scaler.scale
        if look is not None:
            look("gradient", unscaled, built.shards)
        gradients.append(gather_global(unscaled, built.shards, mesh=mesh))

    for batch in batches:
        result = train_step(
            built,
            divide(batch, mesh=mesh, micro_batch=spec.train.micro_batch),
            lr=spec.optim.lr,
            weight_decay=spec.optim.weight_decay,
            scaler=scaler,
            on_gradients=None if gradients else take_gradients,  # of the first step
        )
        losses.append(result.loss.item())
        norms.append(result.grad_norm.item())
    evaluation = evaluate(built, divide(batches[-1], mesh=mesh, micro_batch=spec.train.micro_batch)).item()
    if look is not None:
        look("weight", built.optimizer.masters, built.shards)
    weights = gather_global(built.optimizer.masters, built.shards, mesh=mesh)
    trajectory = Trajectory(losses, norms, evaluation, gradients[0], weights)
    if spec.model.moe is None:
        return trajectory
    return replace(trajectory, routers=_routers(built, result.routers))


def _routers(built: TrainState, statistics: RouterStatistics | None) -> Gathered:
    """`statistics`: None on a rank whose layers have no experts."""
    seen = dict(buffers_of(built.chunks))
    if statistics is not None:
        numbers = {"drops": statistics.drops_L, "entropy": statistics.entropy_L, **statistics.losses}
        for i, layer in enumerate(statistics.layers):
            seen[f"{layer}.loads"] = statistics.loads_LE[i]
            for name, values_L in numbers.items():
                seen[f"{layer}.{name}"] = values_L[i : i + 1]
    # every rank has all of each
    layouts = {name: whole(name, tuple(tensor.shape)) for name, tensor in seen.items()}
    return gather_global(seen, layouts, mesh=built.mesh)


def gather_global(local: Mapping[str, Tensor], layouts: Mapping[str, Layout], *, mesh: Mesh) -> Gathered:
    """Puts every rank's tensors together on rank 0; other ranks get an empty result. All ranks must call it.

    A rank need not hold a share of every tensor.
    """
    # Each rank sends two vectors: its numbers, tensor behind tensor, and the layouts that say which are which.
    nothing = torch.empty(0, dtype=torch.float64, device=mesh.device)
    flat = torch.cat([nothing, *(tensor.detach().to(nothing).reshape(-1) for tensor in local.values())])
    text = layouts_as_json([layouts[name] for name in local])
    described = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(mesh.device)
    flats = [flat]
    texts = [described]
    if mesh.world_size > 1:
        flats = _gather(flat, mesh)
        texts = _gather(described, mesh)
    gathered = Gathered({}, {}, {})
    if mesh.rank != 0:
        return gathered

    # by name, every rank's layout and local tensor
    shares: dict[str, list[tuple[Layout, Tensor]]] = {}
    for flat_there, text_there in zip(flats, texts, strict=True):
        layouts_there = layouts_of_json(text_there.cpu().numpy().tobytes())
        sizes = [prod(layout.local_shape) for layout in layouts_there]
        for layout, tensor in zip(layouts_there, flat_there.cpu().split(sizes), strict=True):
            shares.setdefault(layout.name, []).append((layout, tensor.view(layout.local_shape)))
    for name, of_ranks in shares.items():
        gathered.values[name], gathered.replica_gap[name], gathered.padding[name] = assemble(of_ranks)
    return gathered


def assemble(shares: Sequence[tuple[Layout, Tensor]]) -> tuple[Tensor, float, float]:
    """One parameter from every rank's (layout, local tensor). -> global tensor, replica gap, largest padding.

    Refuses shares that leave an element of the global tensor without a value.
    """
    first, _ = shares[0]
    name = first.name
    shape = first.shape
    out = torch.zeros(shape, dtype=torch.float64)
    written = torch.zeros(shape, dtype=torch.bool)
    gap = padding = 0.0
    for layout, local in shares:
        assert (layout.name, layout.shape) == (name, shape), f"ranks disagree: {layout.name} and {name}"
        unused = torch.ones(layout.local_shape, dtype=torch.bool)
        for piece in layout.pieces:
            mine = local[piece.local_slices].to(torch.float64)
            # views: what is written into them is written into the global tensor
            there = out[piece.global_slices]
            known = written[piece.global_slices]
            gap = _larger(gap, (mine - there)[known])
            there[~known] = mine[~known]
            known[...] = True
            unused[piece.local_slices] = False
        padding = _larger(padding, local[unused])
    assert written.all(), f"no rank holds {int((~written).sum())} elements of {name}"
    return out, gap, padding


def gradient_errors(run: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> dict[str, float]:
    """The error of each tensor, as the module's docstring defines it."""
    assert run.keys() == truth.keys(), f"different parameters: {sorted(run.keys() ^ truth.keys())}"
    sizes = gradient_sizes(truth)
    errors = {}
    for name, expected in truth.items():
        assert run[name].shape == expected.shape, f"{name}: {tuple(run[name].shape)} and {tuple(expected.shape)}"
        errors[name] = _ratio((run[name] - expected).abs().max().item(), sizes[name])
    return errors


def gradient_sizes(truth: Mapping[str, Tensor]) -> dict[str, float]:
    """What the largest difference of each tensor is divided by."""
    elements = sum(tensor.numel() for tensor in truth.values())
    usual = sqrt(_square(truth) / elements)
    return {name: max(expected.abs().max().item(), usual) for name, expected in truth.items()}


def compare(run: Trajectory, truth: Trajectory, tolerances: Tolerances) -> list[Finding]:
    """Every comparison of a run with the one-rank run on the same batches, the worst first."""
    norm_of_gathered = sqrt(_square(run.gradients.values))
    loss_errors = _relative(run.losses, truth.losses)
    findings = [
        _worst("loss at step {}", loss_errors, tolerances.loss),
        Finding("loss at step 1", loss_errors["1"], tolerances.loss),
        Finding("evaluation loss", _relative([run.evaluation], [truth.evaluation])["1"], tolerances.loss),
        _worst("gradient norm at step {}", _relative(run.norms, truth.norms), tolerances.norm),
        Finding(
            "gradient norm at step 1 against the gathered gradients",
            _relative(run.norms[:1], [norm_of_gathered])["1"],
            tolerances.norm,
        ),
        _worst("gradient of {}", gradient_errors(run.gradients.values, truth.gradients.values), tolerances.gradient),
        _worst("weight {}", gradient_errors(run.weights.values, truth.weights.values), tolerances.weight),
    ]
    held = [("gradient", run.gradients), ("weight", run.weights)]
    if truth.routers.values:
        errors = gradient_errors(run.routers.values, truth.routers.values)
        findings.append(_worst("{}", errors, tolerances.gradient))
        held.append(("router", run.routers))
    for what, gathered in held:
        findings.append(_worst(f"copies of {what} {{}}", gathered.replica_gap, 0.0))
        findings.append(_worst(f"padding of {what} {{}}", gathered.padding, 0.0))
    return sorted(findings, key=lambda finding: -finding.margin)


def _square(tensors: Mapping[str, Tensor]) -> float:
    """The sum of squares of all elements."""
    return sum(tensor.square().sum().item() for tensor in tensors.values())


def _gather(local: Tensor, mesh: Mesh) -> list[Tensor]:
    """Every rank's tensor [n], of lengths that may differ, on rank 0; nothing elsewhere."""
    # the lengths first, then padded vectors: ranks receive as much from each
    length = torch.tensor([local.numel()], device=mesh.device)
    lengths = [torch.zeros_like(length) for _ in range(mesh.world_size)]
    counted.all_gather(lengths, length)
    counts = torch.cat(lengths).tolist()
    padded = local.new_zeros(max(counts))
    padded[: local.numel()] = local
    if mesh.rank != 0:
        counted.gather(padded, None, dst=0)
        return []
    received = [torch.empty_like(padded) for _ in counts]
    counted.gather(padded, received, dst=0)
    return [there[:count] for there, count in zip(received, counts, strict=True)]


def _larger(so_far: float, values: Tensor) -> float:
    """The larger of a number and max|values|; NaN counts as infinite."""
    if values.numel() == 0:
        return so_far
    return max(so_far, values.abs().nan_to_num(nan=float("inf")).max().item())


def _ratio(difference: float, size: float) -> float:
    """Zero over zero is none, anything else over zero infinitely much."""
    if difference == 0:
        return 0.0
    if size == 0:
        return float("inf")
    return difference / size


def _relative(values: Sequence[float], truth: Sequence[float]) -> dict[str, float]:
    """Relative errors by step, counted from 1."""
    assert len(values) == len(truth), f"{len(values)} steps and {len(truth)}"
    errors: dict[str, float] = {}
    for step, (value, true) in enumerate(zip(values, truth, strict=True), start=1):
        errors[str(step)] = _ratio(abs(value - true), abs(true))
    return errors


def _worst(label: str, errors: Mapping[str, float], tolerance: float) -> Finding:
    """The largest error, under the name of what it belongs to; NaN is the largest of all."""

    def size(name: str) -> float:
        return float("inf") if isnan(errors[name]) else errors[name]

    where = max(errors, key=size)
    return Finding(label.format(where), errors[where], tolerance)
