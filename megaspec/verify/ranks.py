"""What ranks run for `megaspec verify`: a small run, held to the same run on one rank. Both are made in folders.

FOLDER/alone/   spec.json, truth.safetensors, truth.json            written by the one rank
FOLDER/layout/  spec.json, report.json, differences-RANK.json       written by the ranks of the layout
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megaspec.core.layout import Layout
from megaspec.data.batch import Batch
from megaspec.launcher.rendezvous import Rendezvous
from megaspec.plugins import load
from megaspec.runtime.build import mesh_of
from megaspec.runtime.position import Position
from megaspec.runtime.rank import RankInfo, bounded, join_world, leave_world, pick_device, read_spec, seed_generators
from megaspec.spec import Spec
from megaspec.verify.parity import TOLERANCES, Gathered, Trajectory, compare, gradient_sizes, run_steps
from megaspec_kernels.attention.documents import documents_of

ALONE = "alone"
_PRECISION = "fp64"


def main(
    run_dir: str,
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    attempt: int,
    store: Rendezvous,
    timeout_seconds: float,
    steps: int,
    plugins: Sequence[str] = (),
) -> int:
    """Runs the spec.json of one of the two folders for a few steps, and writes what came of it. -> 0."""
    me = RankInfo(rank, world_size, local_rank, attempt, store, timeout_seconds)
    load(plugins)
    folder = Path(run_dir)
    spec = read_spec(folder)
    device = pick_device(spec, local_rank)
    with ExitStack() as stack:
        if world_size > 1:
            join_world(me, device)
            stack.push(leave_world)
        position = Position(device)
        stack.enter_context(bounded(position, me))
        mesh = mesh_of(spec, rank=rank, device=device, timeout=timedelta(seconds=timeout_seconds))
        more = {"mesh": mesh, "batches": batches_of(spec, steps), "position": position}
        seed_generators(spec.train.seed)
        if folder.name == ALONE:
            write_truth(folder, run_steps(spec, **more))
        else:
            truth = read_truth(folder.parent / ALONE)
            differences = Differences(truth)
            run = run_steps(spec, look=differences.look, **more)
            (folder / f"differences-{rank}.json").write_text(json.dumps(differences.largest))
            if rank == 0:
                (folder / "report.json").write_text(json.dumps(report(run, truth)))
    return 0


def batches_of(spec: Spec, steps: int) -> list[Batch]:
    """Global batches of random tokens, a share of which counts, another one in each sequence; where there are several
    micro batches, in one of them nothing counts. With a document mask, documents of about four tokens."""
    draw = torch.Generator().manual_seed(7)
    n = spec.train.global_batch
    length = spec.data.seq_len
    micro_batch = spec.train.micro_batch
    batches = []
    for step in range(steps):
        stream = torch.randint(0, spec.model.vocab_size, (n, length + 1), generator=draw)
        mask = torch.rand(n, length, generator=draw) < torch.linspace(0.95, 0.15, n)[:, None]
        # drawn in any case, so that tokens don't depend on the setting
        starts = torch.rand(n, length, generator=draw) < 0.25
        mask[micro_batch : 2 * micro_batch] = False
        mask[0, 0] = True  # so that something counts
        documents = None
        if spec.data.document_mask:
            documents = documents_of(starts.cumsum(1, dtype=torch.int32))
        tokens = stream[:, :-1].contiguous()
        labels = stream[:, 1:].contiguous()
        batches.append(Batch(tokens, labels, mask, torch.arange(n) + step * n, documents))
    return batches


def write_truth(folder: Path, truth: Trajectory) -> None:
    """The one-rank run, for `read_truth`."""
    parts = {"gradient": truth.gradients, "weight": truth.weights, "router": truth.routers}
    tensors: dict[str, Tensor] = {}
    for kind, part in parts.items():
        for name, tensor in part.values.items():
            tensors[f"{kind} {name}"] = tensor.contiguous()
    save_file(tensors, folder / _TENSORS)
    numbers = {"losses": truth.losses, "norms": truth.norms, "evaluation": truth.evaluation}
    (folder / _NUMBERS).write_text(json.dumps(numbers))


def read_truth(folder: Path) -> Trajectory:
    """What `write_truth` wrote."""
    tensors = load_file(folder / _TENSORS)
    numbers = json.loads((folder / _NUMBERS).read_text())

    def part(kind: str) -> Gathered:
        prefix = f"{kind} "
        values = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        return Gathered(values, dict.fromkeys(values, 0.0), dict.fromkeys(values, 0.0))

    return Trajectory(**numbers, gradients=part("gradient"), weights=part("weight"), routers=part("router"))


_TENSORS = "truth.safetensors"
_NUMBERS = "truth.json"


class Differences:
    """How far this rank's pieces lie from the truth."""

    def __init__(self, truth: Trajectory):
        self._truth = {"gradient": truth.gradients.values, "weight": truth.weights.values}
        self.largest: dict[str, dict[str, float]] = {}
        """gradient or weight -> name -> largest |difference| of an element; infinite for NaN."""

    def look(self, kind: str, local: Mapping[str, Tensor], layouts: Mapping[str, Layout]) -> None:
        """Compares what this rank holds."""
        found = self.largest.setdefault(kind, {})
        for name, tensor in local.items():
            for piece in layouts[name].pieces:
                mine = tensor[piece.local_slices].detach().to("cpu", torch.float64)
                off = (mine - self._truth[kind][name][piece.global_slices]).abs().nan_to_num(nan=float("inf"))
                if off.numel():
                    found[name] = max(found.get(name, 0.0), off.max().item())


def report(run: Trajectory, truth: Trajectory) -> dict[str, Any]:
    """Every comparison, and by how much each parameter may differ on a rank, as plain data."""
    tolerances = TOLERANCES[_PRECISION]
    allowed = {
        "gradient": _allowed(truth.gradients, tolerances.gradient),
        "weight": _allowed(truth.weights, tolerances.weight),
    }
    findings = []
    for finding in compare(run, truth, tolerances):
        findings.append(asdict(finding) | {"margin": finding.margin, "passed": finding.passed})
    return {"findings": findings, "allowed": allowed}


def _allowed(truth: Gathered, tolerance: float) -> dict[str, float]:
    """The largest difference of an element that counts as equal, by name."""
    return {name: size * tolerance for name, size in gradient_sizes(truth.values).items()}
