"""Does a layout train the same model as one rank? Runs steps, gathers every gradient by its layout, compares.

The error of a gradient is max|g − g₁| / max(max|g₁|, ‖all g₁‖/√N), N elements in all: some gradients are zero in exact
arithmetic, and their rounding noise is measured against the size that gradients have here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, sqrt

import torch
import torch.distributed as dist
from torch import Tensor

from megaspec.core.layout import Layout, layouts_as_json, layouts_of_json, whole
from megaspec.data.batch import Batch
from megaspec.model.kinds import moe_of
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
        return self.error / self.tolerance if self.tolerance else float("inf") if self.error else 0.0

    def __str__(self) -> str:
        return f"{self.what}: error {self.error:.2e}, tolerance {self.tolerance:.0e}"


def divide(batch: Batch, *, mesh: Mesh, micro_batch: int) -> list[Batch]:
    """This rank's micro batches of a global batch, on the mesh's device.

    Micro batch j of data-parallel rank r takes the sequences from (j · dp + r) · micro_batch on.
    """
    dp, rank, n = mesh.size("dp"), mesh.index("dp"), len(batch.ids)
    assert n % (dp * micro_batch) == 0, f"{n} sequences don't divide into dp={dp} times micro batches of {micro_batch}"
    out = []
    for j in range(n // (dp * micro_batch)):
        first = (j * dp + rank) * micro_batch
        part = {
            name: None if value is None else value[first : first + micro_batch] for name, value in vars(batch).items()
        }
        out.append(Batch(**part).to(mesh.device))
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
    if round_weights_to is not None:
        for name, master in built.optimizer.masters.items():
            built.optimizer.put("master", name, master.to(round_weights_to))
        built.optimizer.write_back()
        built.data_parallel.gather_weights()
    scaler = build_scaler(spec.precision, device=built.device)
    if loss_scale is not None:
        scaler.scale.fill_(loss_scale)
    losses, norms, gradients = [], [], []

    def take_gradients() -> None:
        unscaled = {name: g.to(torch.float64) / scaler.scale for name, g in built.data_parallel.gradients.items()}
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
            on_gradients=None if gradients else take_gradients,
        )
        losses.append(result.loss.item())
        norms.append(result.grad_norm.item())
    evaluation = evaluate(built, divide(batches[-1], mesh=mesh, micro_batch=spec.train.micro_batch)).item()
    if look is not None:
        look("weight", built.optimizer.masters, built.shards)
    weights = gather_global(built.optimizer.masters, built.shards, mesh=mesh)
    trajectory = Trajectory(losses, norms, evaluation, gradients[0], weights)
    return trajectory if moe_of(spec.model) is None else replace(trajectory, routers=_routers(built, result.routers))


def _routers(built: TrainState, statistics: RouterStatistics | None) -> Gathered:
    """`statistics`: None on a rank whose layers have no experts."""
    seen = dict(buffers_of(built.chunks))
    if statistics is not None:
        numbers = {"drops": statistics.drops_L, "entropy": statistics.entropy_L, **statistics.losses}
        for i, layer in enumerate(statistics.layers):
            seen[f"{layer}.loads"] = statistics.loads_LE[i]
            seen |= {f"{layer}.{name}": values_L[i : i + 1] for name, values_L in numbers.items()}
    layouts = {name: whole(name, tuple(tensor.shape)) for name, tensor in seen.items()}
    return gather_global(seen, layouts, mesh=built.mesh)


def gather_global(local: Mapping[str, Tensor], layouts: Mapping[str, Layout], *, mesh: Mesh) -> Gathered:
    """Puts every rank's tensors together on rank 0; other ranks get an empty result. All ranks must call it.

    A rank need not hold a share of every tensor.
    """
    ordered = {name: layouts[name] for name in local}
    nothing = torch.empty(0, dtype=torch.float64, device=mesh.device)
    flat = torch.cat([nothing, *(t.detach().to(nothing).reshape(-1) for t in local.values())])
    text = layouts_as_json(ordered.values())
    described = torch.tensor(list(text), dtype=torch.uint8, device=mesh.device)
    flats, texts = [flat], [described]
    if mesh.world_size > 1:
        flats = _gather(flat, mesh)
        texts = _gather(described, mesh)
    values: dict[str, Tensor] = {}
    gaps: dict[str, float] = {}
    padding: dict[str, float] = {}
    if mesh.rank == 0:
        held = [layouts_of_json(bytes(t.tolist())) for t in texts]
        pieces = [f.cpu().split([_numel(one.local_shape) for one in h]) for f, h in zip(flats, held, strict=True)]
        shares: dict[str, list[tuple[Layout, Tensor]]] = {}
        for layouts_there, tensors in zip(held, pieces, strict=True):
            for layout, tensor in zip(layouts_there, tensors, strict=True):
                shares.setdefault(layout.name, []).append((layout, tensor.view(layout.local_shape)))
        for name, one in shares.items():
            values[name], gaps[name], padding[name] = assemble(one)
    return Gathered(values, gaps, padding)


def assemble(shares: Sequence[tuple[Layout, Tensor]]) -> tuple[Tensor, float, float]:
    """One parameter from every rank's (layout, local tensor). -> global tensor, replica gap, largest padding.

    Refuses shares that leave an element of the global tensor without a value.
    """
    name, shape = shares[0][0].name, shares[0][0].shape
    out = torch.zeros(shape, dtype=torch.float64)
    written = torch.zeros(shape, dtype=torch.bool)
    gap = padding = 0.0
    for layout, local in shares:
        assert (layout.name, layout.shape) == (name, shape), f"ranks disagree: {layout.name} and {name}"
        unused = torch.ones(layout.local_shape, dtype=torch.bool)
        for piece in layout.pieces:
            mine = local[piece.local_slices].to(torch.float64)
            there, known = out[piece.global_slices], written[piece.global_slices]
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
    square = sum(t.square().sum().item() for t in truth.values())
    usual = sqrt(square / sum(t.numel() for t in truth.values()))
    return {name: max(expected.abs().max().item(), usual) for name, expected in truth.items()}


def compare(run: Trajectory, truth: Trajectory, tolerances: Tolerances) -> list[Finding]:
    """Every comparison of a run with the one-rank run on the same batches, the worst first."""
    norm_of_gathered = sqrt(sum(g.square().sum().item() for g in run.gradients.values.values()))
    findings = [
        _worst("loss at step {}", _relative(run.losses, truth.losses), tolerances.loss),
        Finding("loss at step 1", _relative(run.losses, truth.losses)["1"], tolerances.loss),
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
    return sorted(findings, key=lambda f: -f.margin)


def _gather(local: Tensor, mesh: Mesh) -> list[Tensor]:
    """Every rank's tensor [n], of lengths that may differ, on rank 0; nothing elsewhere."""
    length = torch.tensor([local.numel()], device=mesh.device)
    lengths = [torch.zeros_like(length) for _ in range(mesh.world_size)]
    dist.all_gather(lengths, length)
    counts = [int(n.item()) for n in lengths]
    padded = local.new_zeros(max(counts))
    padded[: local.numel()] = local
    received = [torch.empty_like(padded) for _ in counts] if mesh.rank == 0 else None
    dist.gather(padded, received, dst=0)
    return [r[:n] for r, n in zip(received, counts, strict=True)] if received is not None else []


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _larger(so_far: float, values: Tensor) -> float:
    """The larger of a number and max|values|; NaN counts as infinite."""
    if values.numel() == 0:
        return so_far
    return max(so_far, values.abs().nan_to_num(nan=float("inf")).max().item())


def _ratio(difference: float, size: float) -> float:
    if difference == 0:
        return 0.0
    return difference / size if size else float("inf")


def _relative(values: Sequence[float], truth: Sequence[float]) -> dict[str, float]:
    """Relative errors by step, counted from 1."""
    assert len(values) == len(truth), f"{len(values)} steps and {len(truth)}"
    return {str(i): _ratio(abs(a - b), abs(b)) for i, (a, b) in enumerate(zip(values, truth, strict=True), start=1)}


def _worst(label: str, errors: Mapping[str, float], tolerance: float) -> Finding:
    where = max(errors, key=lambda k: errors[k] if errors[k] == errors[k] else float("inf"))
    return Finding(label.format(where), errors[where], tolerance)
