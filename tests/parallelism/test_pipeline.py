"""Every schedule trains what one rank trains, keeps no more than it must, and never waits in a circle."""

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
import torch

from megaspec.data.batch import Batch
from megaspec.parallelism.mesh import Mesh
from megaspec.runtime.parity import TOLERANCES, Trajectory, compare, run_steps
from megaspec.spec import Spec
from tests.parity import cases
from tests.parity.tasks import plain, trajectory_of
from tests.ranks import RankPool

SEQUENCES, TOKENS, VOCAB = 12, 8, 19
PLAIN = {"schedule": "1f1b", "pp": 1, "virtual": 1, "group": 1, "micro_batches": 1, "dp": 1, "tp": 1, "first": None}
PLAIN |= {"layout": None, "strategy": "replicate", "compile": "none", "vocab_pad_to": 1}


@dataclass(frozen=True)
class Run:
    """A tiny model, divided."""

    schedule: str = "1f1b"
    pp: int = 2
    virtual: int = 1
    group: int = 1
    micro_batches: int = 4
    dp: int = 1
    tp: int = 1
    strategy: str = "replicate"
    layers: int = 4
    layout: str | None = None
    first: int | None = None
    tied: bool = False
    family: str = "llama"
    documents: bool = False
    dropout: bool = False
    compile: str = "none"
    vocab_pad_to: int = 1

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.tp

    def __str__(self) -> str:
        return " ".join(f"{k}={v}" for k, v in asdict(self).items() if v != getattr(Run, k))


def spec_of(run: Run) -> Spec:
    shards = run.dp if run.strategy != "replicate" else 1
    micro_batch = SEQUENCES // run.micro_batches // run.dp
    content = cases.spec_of(cases.Case(family=run.family)).model_dump(mode="json")
    content["model"] |= {
        "n_layers": run.layers,
        "d_model": 16,
        "n_heads": 2,
        "n_kv_heads": 2 if run.family == "gpt" else 1,
        "d_head": 8,
        "d_ffn": 24,
        "vocab_size": VOCAB,
        "vocab_pad_to": run.vocab_pad_to,
        "max_seq_len": TOKENS,
        "tied_embeddings": run.tied,
        "dropout": 0.1 if run.dropout else 0.0,
    }
    content["parallelism"] |= {
        "tp": run.tp,
        "pp": run.pp,
        "dp_strategy": run.strategy,
        "dp_replicate": run.dp // shards,
        "dp_shard": shards,
        "sequence_parallel": run.tp > 1,
        "bucket_mb": 0.01,
    }
    content["parallelism"]["pipeline"] |= {
        "schedule": run.schedule,
        "virtual_stages": run.virtual,
        "micro_batch_group": run.group,
        "layout": run.layout,
        "first_layers": run.first,
    }
    content["data"] |= {"seq_len": TOKENS, "document_mask": run.documents}
    content["kernels"] |= {"attention": "reference", "compile": run.compile}
    content["train"] |= {"global_batch": run.micro_batches * run.dp * micro_batch, "micro_batch": micro_batch}
    content |= {"world_size": run.ranks, "segments": [SEQUENCES * 20]}
    content["launcher"] |= {"ranks": run.ranks}
    return Spec.model_validate_json(json.dumps(content))


def batches_of(run: Run, steps: int) -> list[Batch]:
    """Global batches with uneven masks; as many sequences as the run's micro batches hold."""
    draw, n = torch.Generator().manual_seed(7), spec_of(run).train.global_batch
    batches = []
    for step in range(steps):
        stream = torch.randint(0, VOCAB, (SEQUENCES, TOKENS + 1), generator=draw)[:n]
        mask = torch.rand(SEQUENCES, TOKENS, generator=draw)[:n] < torch.linspace(0.2, 0.9, n)[:, None]
        starts = torch.rand(SEQUENCES, TOKENS, generator=draw)[:n] < 0.25
        documents = starts.cumsum(1, dtype=torch.int32) if run.documents else None
        ids = torch.arange(n) + step * n
        batches.append(Batch(stream[:, :-1].contiguous(), stream[:, 1:].contiguous(), mask, ids, documents))
    return batches


def mesh_of(run: Run, rank: int) -> Mesh:
    dp = {"dp_replicate": run.dp} if run.strategy == "replicate" else {"dp_shard": run.dp}
    return Mesh({"pp": run.pp, "tp": run.tp, **dp}, rank=rank, device=torch.device("cpu"))


def train(rank: int, run: Run, steps: int) -> dict[str, Any] | None:
    trajectory = run_steps(spec_of(run), mesh=mesh_of(run, rank), batches=batches_of(run, steps))
    return plain(trajectory) if rank == 0 else None


@pytest.fixture(scope="module")
def pool() -> Any:
    with RankPool() as ranks:
        yield ranks


def check(pool: RankPool, run: Run, steps: int = 2) -> None:
    """Two steps of AdamW against one rank's, in fp64."""
    found = trajectory_of(pool.run(train, run, steps, ranks=run.ranks)[0])
    findings = compare(found, truth(run, steps), TOLERANCES["fp64"])
    assert all(f.passed for f in findings), f"{run}\n" + "\n".join(str(f) for f in findings if not f.passed)


def truth(run: Run, steps: int) -> Trajectory:
    """One rank, one micro batch."""
    torch.set_num_threads(1)
    one = replace(run, **PLAIN)
    content = spec_of(one).model_dump(mode="json")
    batches = batches_of(run, steps)
    content["train"] |= {"micro_batch": len(batches[0].ids), "global_batch": len(batches[0].ids)}
    spec = Spec.model_validate_json(json.dumps(content))
    return run_steps(spec, mesh=mesh_of(one, 0), batches=batches)


RUNS = [
    Run("gpipe"),
    Run("gpipe", pp=4, micro_batches=3, tied=True, layers=5, first=2, documents=True),
    Run("1f1b", dropout=True),
    Run("1f1b", micro_batches=3, tied=True, family="gpt"),
    Run("1f1b", micro_batches=1),
    Run("1f1b", pp=4, micro_batches=6, tied=True),
    Run("1f1b", pp=3, layers=4, layout="Et|tt|tL", micro_batches=2),
    Run("1f1b", pp=4, layers=2, layout="E|t||tL", micro_batches=4, tied=True),
    Run("interleaved", virtual=2, group=2),
    Run("interleaved", virtual=2, group=3, micro_batches=6, tied=True, dropout=True),
    Run("interleaved", virtual=2, group=2, micro_batches=2, family="gpt", documents=True),
    Run("interleaved", virtual=3, group=2, layers=6, micro_batches=6),
    Run("interleaved", virtual=2, group=4, layers=4, layout="Et||t|ttL", micro_batches=4),
    Run("interleaved", pp=4, virtual=2, group=4, layers=8, micro_batches=12, tied=True),
    Run("interleaved", pp=3, virtual=2, group=3, layers=6, micro_batches=6),
    Run("zb_h1"),
    Run("zb_h1", micro_batches=3, tied=True, family="gpt"),
    Run("zb_h1", pp=4, micro_batches=6, dropout=True, documents=True),
    Run("zb_h1", pp=4, micro_batches=2, layers=3, layout="Et|t||tL"),
    Run("zb_v", virtual=2),
    Run("zb_v", virtual=2, micro_batches=1),
    Run("zb_v", virtual=2, micro_batches=3, tied=True, family="gpt"),
    Run("zb_v", virtual=2, micro_batches=6, layers=2, layout="E|t|t|L", tied=True),
    Run("zb_v", pp=4, virtual=2, layers=8, micro_batches=12, tied=True, dropout=True),
    Run("zb_v", pp=3, virtual=2, layers=6, micro_batches=4),
]
TOGETHER = [
    Run("1f1b", tp=2, tied=True, vocab_pad_to=8),
    Run("interleaved", virtual=2, group=2, dp=2, micro_batches=3, tied=True),
    Run("zb_h1", tp=2, micro_batches=3),
    Run("zb_h1", dp=2, micro_batches=3, tied=True),
    Run("zb_v", virtual=2, dp=2, micro_batches=3, tied=True),
    Run("zb_v", virtual=2, tp=2, tied=True, vocab_pad_to=8, family="gpt"),
    *(
        Run(schedule, virtual=v, group=2 if v > 1 else 1, dp=2, micro_batches=3, strategy=strategy, tied=True)
        for strategy in ("zero1", "zero2", "fsdp")
        for schedule, v in (("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zb_v", 2))
    ),
]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_schedule_trains_what_one_rank_trains(pool: RankPool, run: Run) -> None:
    check(pool, run)


@pytest.mark.parametrize("run", TOGETHER, ids=str)
def test_with_other_axes(pool: RankPool, run: Run) -> None:
    check(pool, run)
