"""Experts on several ranks against all of them on one: loss, every gradient, statistics, in fp64."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megaspec.core.layout import Layout
from megaspec.model.decoder.spec import DecoderSpec
from megaspec.nn.decoder import Decoder
from megaspec.nn.dropout import Noise
from megaspec.nn.init import initial_value
from megaspec.nn.moe.module import Moe
from megaspec.parallelism.context import ContextParallel
from megaspec.parallelism.expert import ExpertParallel, buffers_of
from megaspec.parallelism.mesh import Mesh
from megaspec.parallelism.spec import ParallelismSpec
from megaspec.parallelism.tensor import TensorParallel
from megaspec.runtime.build import build_model, materialise
from megaspec.verify.parity import gather_global
from megaspec_kernels.catalog import CATALOG
from megaspec_kernels.registry import kernels_of
from megaspec_kernels.spec import KernelsSpec
from tests.halved import halved
from tests.ranks import RankPool, gpu_of, needs_gpus

SEQUENCES, TOKENS, VOCAB = 4, 8, 31


@dataclass(frozen=True)
class Case:
    """A layout, a router, and what happens to tokens that are too many."""

    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    dispatch: str = "all_to_all"
    router: str = "plain"
    capacity: float | None = None
    drop: str = "probs"
    pad: bool = False
    shared: bool = True
    forced: bool = False
    """Experts are taken in turn."""
    lonely: bool = False
    """All tokens take experts 0 and 1, so that ranks and experts are left without any."""
    overlap: bool = True
    n_experts: int = 8

    @property
    def ranks(self) -> int:
        return self.dp * self.cp * self.tp

    def __str__(self) -> str:
        fields = asdict(self).items()
        return " ".join(f"{name}={value}" for name, value in fields if value != getattr(Case, name))


LOSSES = {
    "z_loss": 0.1,
    "losses": (
        {"kind": "aux", "coefficient": 0.5},
        {"kind": "seq_aux", "coefficient": 0.3},
        {"kind": "global_aux", "coefficient": 0.2},
    ),
}
ROUTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "losses": LOSSES,
    "sigmoid": {"score": "sigmoid", "expert_bias": True, "bias_rate": 0.05, "n_groups": 4, "group_top_k": 2, **LOSSES},
    "sinkhorn": {"balancing": "sinkhorn", "z_loss": 0.1},
}

CASES = [
    Case(dp=2, ep=2, router="losses"),
    Case(dp=2, ep=2, dispatch="all_gather", router="sigmoid"),
    Case(dp=2, etp=2, router="losses", capacity=0.7),
    Case(dp=2, etp=2, dispatch="all_gather"),
    Case(tp=2, ep=2, router="sigmoid", capacity=0.7),
    Case(tp=2, etp=2, router="losses", capacity=0.6, drop="position", pad=True),
    Case(tp=2, router="sinkhorn"),
    Case(cp=2, ep=2, router="sinkhorn"),
    Case(cp=2, ep=2, router="losses", capacity=0.6, drop="position", dispatch="all_gather"),
    Case(cp=2, ep=2, router="sigmoid", capacity=0.8, pad=True, dispatch="all_gather", shared=False),
    Case(dp=2, ep=2, lonely=True),
    Case(dp=2, ep=2, lonely=True, dispatch="all_gather"),
    Case(dp=2, ep=2, forced=True, overlap=False),
    Case(dp=2, ep=2, forced=True, dispatch="all_gather", overlap=False),
    Case(dp=2, ep=2, forced=True, pad=True, capacity=1.5),
    Case(dp=4, ep=4, router="losses", capacity=0.7),
    Case(dp=4, ep=4, lonely=True),
    Case(dp=4, ep=2, router="sigmoid"),
    Case(dp=2, tp=2, ep=2, etp=2, router="sigmoid", capacity=0.7),
    Case(dp=2, tp=2, ep=2, etp=2, dispatch="all_gather", router="losses"),
    Case(dp=4, ep=2, etp=2, forced=True),
    Case(cp=2, tp=2, ep=4, router="losses", capacity=0.7, drop="position"),
    Case(cp=2, tp=2, ep=2, router="sigmoid", capacity=0.7, pad=True),
    Case(cp=2, tp=2, etp=2, router="sinkhorn"),
    Case(dp=2, cp=2, ep=4, dispatch="all_gather", router="sigmoid", capacity=0.7),
]


def model_spec(case: Case) -> DecoderSpec:
    moe = {
        "n_experts": case.n_experts,
        "top_k": 2,
        "d_expert": 12,
        "d_shared": 8 if case.shared else None,
        "shared_gate": case.shared,
        "layers": (0, 1, 1),
        "router": ROUTERS[case.router] | {"jitter": 0.1},
        "capacity_factor": case.capacity,
        "drop": case.drop,
        "pad_to_capacity": case.pad,
    }
    fields = {"n_layers": 3, "d_model": 16, "n_heads": 4, "n_kv_heads": 2, "d_head": 4, "d_ffn": 24, "init_std": 0.4}
    fields |= {"vocab_size": VOCAB, "vocab_pad_to": 1, "max_seq_len": TOKENS, "dropout": 0.1}
    attention = {"kind": "gqa", "qk_norm": "per_head"}
    return DecoderSpec.model_validate({"kind": "decoder", "attention": attention, "moe": moe, **fields})


REFERENCE = KernelsSpec(**dict.fromkeys(CATALOG, "reference"), compile="none")


def built(case: Case, mesh: Mesh) -> tuple[Decoder, TensorParallel, ContextParallel, ExpertParallel]:
    spec = model_spec(case)
    kernels = kernels_of(REFERENCE)
    model = build_model(spec, kernels, dtype=torch.float64)
    initial = spec.facts.initial_values(std=spec.init_std)
    own = ParallelismSpec(sequence_parallel=case.tp > 1, dispatch=case.dispatch, ep=case.ep, etp=case.etp)
    tensor = TensorParallel(mesh, case.tp > 1)
    tensor.split_model(model, model.placement)
    context = ContextParallel(mesh, own.context, kernels.attention_merge)
    context.split_model(model)
    experts = ExpertParallel(mesh, own, index=context.index, overlap_shared=case.overlap)
    experts.split_model(model)
    materialise(model, device=mesh.device, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = initial_value(
                tensor.layouts[name],
                seed=1,
                std=initial.stds.get(name),
                constant=initial.constants.get(name),
                like=parameter,
            )
            parameter.copy_(value)
        for moe in (m for m in model.modules() if isinstance(m, Moe)):
            if case.lonely:
                moe.router.choose = lambda ranking_BTE, context: torch.arange(2, device=ranking_BTE.device).expand(
                    *ranking_BTE.shape[:2], 2
                )
            if case.forced:
                moe.force_balance()
    return model, tensor, context, experts


def train(rank: int, case: Case, micro_batches: int, *, device: str = "cpu") -> dict[str, Any]:
    """Two steps with the gradients of both; weights stay."""
    torch.set_num_threads(1)
    where = gpu_of(rank) if device == "cuda" else torch.device(device)
    degrees = {"pp": 1, "dp_replicate": case.dp, "dp_shard": 1, "cp": case.cp, "tp": case.tp}
    mesh = Mesh(degrees, rank=rank, device=where, ep=case.ep, etp=case.etp)
    model, tensor, context, experts = built(case, mesh)
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCAB, (SEQUENCES, TOKENS), generator=draw)
    labels = torch.randint(0, VOCAB, (SEQUENCES, TOKENS), generator=draw)
    weights = torch.rand(SEQUENCES, TOKENS, generator=draw, dtype=torch.float64)
    tokens, labels, weights = tokens.to(where), labels.to(where), weights.to(where)
    each = SEQUENCES // (micro_batches * case.dp)
    steps = []
    for _ in range(2):
        model.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=where)
        for j in range(micro_batches):
            first = (j * case.dp + mesh.index("dp")) * each
            total += run(
                model, context, first, slice(first, first + each), tokens, labels, weights, micro_batches * case.dp
            )
        if mesh.group("dp-cp") is not None:
            dist.all_reduce(total, group=mesh.group("dp-cp"))
        found = gather_global(summed(model, tensor, mesh), tensor.layouts, mesh=mesh)
        seen = experts.finish_step([model], skip=torch.zeros((), device=where))
        steps.append(
            {
                "loss": total.item(),
                "gradients": {name: value.numpy().copy() for name, value in found.values.items()},
                "gap": max(found.replica_gap.values(), default=0.0),
                "seen": {
                    "loads": seen.loads_LE.cpu().numpy().copy(),
                    "drops": seen.drops_L.cpu().numpy().copy(),
                    "entropy": seen.entropy_L.cpu().numpy().copy(),
                    **{kind: value.cpu().numpy().copy() for kind, value in seen.losses.items()},
                },
                "kept": {name: value.cpu().numpy().copy() for name, value in buffers_of([model]).items()},
            }
        )
    return {"steps": steps}


def run(
    model: Decoder,
    cp: ContextParallel,
    first: int,
    mine: slice,
    tokens: Tensor,
    labels: Tensor,
    weights: Tensor,
    count: int,
) -> Tensor:
    """A micro batch forward and backward. -> this rank's share of the loss"""
    index = cp.index(TOKENS)
    noise = Noise(3, torch.arange(mine.start, mine.stop, device=index.device), index)
    aux = torch.tensor(1 / count, dtype=torch.float64, device=index.device)
    context = model.context(index, length=TOKENS, noise=noise, aux_weight=aux, way=cp.way)
    h = model.body(tokens[mine][:, index], context)
    loss = model.finish(h, lambda x: model.head.loss(x, labels[mine][:, index], weights[mine][:, index]))
    loss.backward()
    return loss.detach()


def summed(model: Decoder, tensor: TensorParallel, mesh: Mesh) -> dict[str, Tensor]:
    """The gradients, over all ranks that have tokens."""
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    facts = model.facts.weights()
    for name, gradient in gradients.items():
        group = mesh.group("edp" if facts[name].is_expert else "dp-cp")
        if group is not None:
            dist.all_reduce(gradient, group=group)
    tensor.finish_grads(gradients, lambda name: slice(0, gradients[name].shape[0]))
    return gradients


@lru_cache(maxsize=64)
def truth(case: Case, micro_batches: int) -> dict[str, Any]:
    return train(0, case, micro_batches)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(timeout=60) as pool:
        yield pool


def close(found: Any, expected: Any, tolerance: float) -> bool:
    found, expected = torch.as_tensor(found), torch.as_tensor(expected)
    assert found.shape == expected.shape, f"{found.shape} and {expected.shape}"
    return (found - expected).abs().max().item() <= tolerance * max(1.0, expected.abs().max().item())


def check(case: Case, pool: RankPool, *, tolerance: float, device: str = "cpu") -> None:
    """Holds loss, gradients, statistics and what routers keep to those of one rank on the CPU."""
    micro_batches = SEQUENCES // case.dp // 2 or 1
    found = pool.run(train, case, micro_batches, ranks=case.ranks, device=device)[0]
    one = replace(case, dp=1, cp=1, tp=1, ep=1, etp=1, dispatch="all_to_all", overlap=True, pad=False)
    expected = truth(one, micro_batches * case.dp)
    for step, (a, b) in enumerate(zip(found["steps"], expected["steps"], strict=True)):
        assert close(a["loss"], b["loss"], tolerance), f"loss at step {step}: {a['loss']} and {b['loss']}"
        assert a["gap"] <= tolerance, f"ranks disagree by {a['gap']}"
        for part in ("gradients", "seen", "kept"):
            assert a[part].keys() == b[part].keys()
            for name in b[part]:
                assert close(a[part][name], b[part][name], tolerance), f"step {step}: {part} {name}"


@pytest.mark.parametrize("case", halved(CASES), ids=str)
def test_equal_to_one_rank(case: Case, pool: RankPool) -> None:
    check(case, pool, tolerance=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in CASES if c.ranks == 4 or c.overlap], ids=str)
def test_equal_to_one_rank_over_nccl(case: Case, gpu_pool: RankPool) -> None:
    """The streams of the transfers; GPUs round differently, hence the wider tolerance."""
    needs_gpus(case.ranks)
    check(case, gpu_pool, tolerance=1e-10, device="cuda")


def layouts_of(case: Case, rank: int) -> dict[str, Layout]:
    class Place:
        """A rank's place in the expert grid without its processes."""

        def size(self, axis: str) -> int:
            return {"ep": case.ep, "etp": case.etp, "tp": 1}[axis]

        def index(self, axis: str) -> int:
            return {"ep": rank // case.etp, "etp": rank % case.etp, "tp": 0}[axis]

        def group(self, axis: str) -> None:
            return None

    model = build_model(model_spec(case), kernels_of(REFERENCE), dtype=torch.float64)
    tensor = TensorParallel(Place(), False)
    tensor.split_model(model, model.placement)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes == {name: layout.local_shape for name, layout in tensor.layouts.items()}
    experts = {name for name, facts in model.facts.weights().items() if facts.is_expert}
    assert experts == {name for name in shapes if ".experts." in name}
    return {name: tensor.layouts[name] for name in sorted(experts)}


@pytest.mark.parametrize("case", [Case(ep=4), Case(etp=2), Case(ep=2, etp=4)], ids=str)
def test_pieces_of_experts_tile_their_matrices(case: Case) -> None:
    held = [layouts_of(case, rank) for rank in range(case.ep * case.etp)]
    for name in held[0]:
        covered = torch.zeros(held[0][name].shape, dtype=torch.int64)
        for layouts in held:
            local = torch.zeros(layouts[name].local_shape, dtype=torch.int64)
            for piece in layouts[name].pieces:
                covered[piece.global_slices] += 1
                local[piece.local_slices] += 1
                assert (piece.replica, piece.copies) == (0, 1)
            assert (local == 1).all(), name
        assert (covered == 1).all(), name
