"""Every schedule trains what one rank trains, keeps no more than it must, and never waits in a circle."""

import json
import weakref
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megaspec.checkpoint.comm import DistComm, SoloComm
from megaspec.checkpoint.store import Store
from megaspec.data.batch import Batch
from megaspec.data.tokenizer import ByteTokenizer
from megaspec.nn.linear import WeightGradientQueue
from megaspec.parallelism import pipeline
from megaspec.parallelism.mesh import Mesh
from megaspec.parallelism.passes import Message, Pass, Shape, made, needed, order, rank_of_stage, source
from megaspec.parallelism.timeline import receives
from megaspec.precision.scaler import build_scaler
from megaspec.runtime.build import TrainState, build, initialise
from megaspec.runtime.draw import Draw, Sampling
from megaspec.runtime.generate import Limits, Prompt, generate
from megaspec.runtime.state import load, pieces_of, progress
from megaspec.runtime.step import evaluate, forward_backward, train_step
from megaspec.runtime.text_passes import ModelOnRanks, cached_passes
from megaspec.spec import Spec
from megaspec.verify.parity import TOLERANCES, Trajectory, compare, divide, gather_global, run_steps
from megaspec_kernels.attention.documents import documents_of
from tests.halved import halved
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
    overlap: bool = True
    device: str = "cpu"
    precision: str = "fp64"

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.tp

    def __str__(self) -> str:
        return " ".join(f"{k}={v}" for k, v in asdict(self).items() if v != getattr(Run, k))


def spec_of(run: Run) -> Spec:
    shards = run.dp if run.strategy != "replicate" else 1
    micro_batch = SEQUENCES // run.micro_batches // run.dp
    content = cases.spec_of(cases.Case(family=run.family), device=run.device).model_dump(mode="json")
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
    content["parallelism"]["overlap"]["p2p"] = run.overlap
    content["parallelism"]["pipeline"] |= {
        "schedule": run.schedule,
        "virtual_stages": run.virtual,
        "micro_batch_group": run.group,
        "layout": run.layout,
        "first_layers": run.first,
    }
    content["data"] |= {"seq_len": TOKENS, "document_mask": run.documents}
    content["precision"] = {"kind": run.precision}
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
        documents = documents_of(starts.cumsum(1, dtype=torch.int32)) if run.documents else None
        ids = torch.arange(n) + step * n
        batches.append(Batch(stream[:, :-1].contiguous(), stream[:, 1:].contiguous(), mask, ids, documents))
    return batches


def mesh_of(run: Run, rank: int) -> Mesh:
    dp = {"dp_replicate": run.dp} if run.strategy == "replicate" else {"dp_shard": run.dp}
    device = torch.device(run.device, rank) if run.device == "cuda" else torch.device(run.device)
    return Mesh({"pp": run.pp, "tp": run.tp, **dp}, rank=rank, device=device)


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


@pytest.mark.parametrize("run", halved(RUNS), ids=str)
def test_a_schedule_trains_what_one_rank_trains(pool: RankPool, run: Run) -> None:
    check(pool, run)


@pytest.mark.parametrize("run", halved(TOGETHER), ids=str)
def test_with_other_axes(pool: RankPool, run: Run) -> None:
    check(pool, run)


@pytest.mark.slow
def test_compiled_blocks_with_weight_gradients_deferred() -> None:
    """Minutes of compiling on a busy machine; tests/nn/test_linear.py holds the seam itself."""
    with RankPool(timeout=900) as pool:
        check(pool, Run("zb_h1", compile="block", micro_batches=3, layers=2), steps=1)


MATRICES = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}


def products(rank: int, run: Run) -> int:
    """Matrix products of a step."""
    built = build(spec_of(run), mesh=mesh_of(run, rank))
    initialise(built)
    tokens, scale = torch.ones(()), torch.ones((), dtype=torch.float64)
    mine = divide(batches_of(run, 1)[0], mesh=built.mesh, micro_batch=built.spec.train.micro_batch)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        forward_backward(built, mine, tokens=tokens, loss_scale=scale)
    return sum(e.name.rstrip("_") in MATRICES for e in seen.events())


def test_splitting_the_backward_pass_costs_no_matrix_product(pool: RankPool) -> None:
    runs = [Run("1f1b"), Run("zb_h1"), Run("interleaved", virtual=2, group=2), Run("zb_v", virtual=2)]
    counts = [sum(pool.run(products, run, ranks=2)) for run in runs]
    assert counts == [counts[0]] * 4
    assert counts[0] == products(0, replace(Run(), pp=1))


def held_activations(rank: int, run: Run) -> dict[str, Any]:
    """What is alive of the activations that this rank made for another one, and of what it was deferred to do."""
    built = build(spec_of(run), mesh=mesh_of(run, rank))
    initialise(built)
    made: list[weakref.ref] = []
    queued: list[int] = []
    most = {"made": 0, "alive": 0, "queued": 0}
    links = built.pipeline._links
    send, run_queue = links.send, WeightGradientQueue.run

    def sending(target: int, x: torch.Tensor, **more: Any) -> None:
        send(target, x, **more)
        made.append(weakref.ref(x.untyped_storage()))
        most["made"] += 1
        most["alive"] = max(most["alive"], sum(one() is not None for one in made))

    def running(queue: WeightGradientQueue) -> None:
        queued.append(len(queue))
        run_queue(queue)

    links.send = sending
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightGradientQueue, "run", running)
        forward_backward(
            built,
            divide(batches_of(run, 1)[0], mesh=built.mesh, micro_batch=built.spec.train.micro_batch),
            tokens=torch.ones(()),
            loss_scale=torch.ones((), dtype=torch.float64),
        )
    return {**most, "left": sum(one() is not None for one in made), "queued": queued}


@pytest.mark.parametrize("run", [Run("gpipe", micro_batches=12), Run("zb_v", virtual=2, micro_batches=12)], ids=str)
def test_what_was_sent_is_not_kept(pool: RankPool, run: Run) -> None:
    """Under gpipe all micro batches are held at the end of their forward passes: their inputs, not what was sent."""
    for found in pool.run(held_activations, run, ranks=2):
        assert found["made"] >= 12
        assert found["alive"] <= 3  # two on their way, and the one that is just being sent
        assert found["left"] == 0


def test_each_weight_gradient_is_deferred_once(pool: RankPool) -> None:
    for found in pool.run(held_activations, Run("zb_h1"), ranks=2):
        assert found["queued"] == [8] * 4  # two layers of four matrices, four micro batches


def written(rank: int, run: Run, temperature: float) -> list[int]:
    built = build(spec_of(run), mesh=mesh_of(run, rank))
    initialise(built)
    draw = Draw(Sampling(temperature=temperature, seed=3))
    limits = Limits(tokens=12, max_seq_len=TOKENS)
    with cached_passes(ModelOnRanks.of_run(built), draw, rows=1, length=TOKENS) as passes:
        prompt = Prompt([3, 1, 4])
        (text,) = generate(passes, [prompt], tokenizer=ByteTokenizer(), limits=limits, rows=1, seed=3)
    return list(text.ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_rank_writes_what_one_device_writes(pool: RankPool, temperature: float) -> None:
    expected = written(0, replace(Run(), **PLAIN), temperature)
    assert len(set(expected)) > 1
    for run in (
        Run("interleaved", virtual=2, group=2),
        Run("zb_v", virtual=2, dp=2),
        Run("1f1b", tp=2, vocab_pad_to=8),
        Run("1f1b", pp=4, layout="Et|t||ttL"),
    ):
        for found in pool.run(written, run, temperature, ranks=run.ranks):
            assert found == expected, run


def saved(rank: int, run: Run, folder: str) -> dict[str, Any] | None:
    """One step, saved; -> every master weight and the first moments."""
    built, store, comm = build(spec_of(run), mesh=mesh_of(run, rank)), Store(folder), comm_of(run)
    initialise(built)
    mine = divide(batches_of(run, 1)[0], mesh=built.mesh, micro_batch=built.spec.train.micro_batch)
    scaler = build_scaler(built.spec.precision, device=built.device)
    train_step(built, mine, lr=1e-2, weight_decay=0.1, scaler=scaler)
    state = progress(built, step=1, samples=0, tokens=0, scaler=None, numbers={})
    store.save(1, pieces_of(built), spec=built.spec.model_dump(mode="json"), state=state, comm=comm)
    return everything(built)


def loaded(rank: int, run: Run, folder: str) -> dict[str, Any] | None:
    built = build(spec_of(run), mesh=mesh_of(run, rank))
    with Store(folder).newest_good(comm_of(run)) as reader:
        load(built, reader)
    return everything(built)


def comm_of(run: Run) -> DistComm | SoloComm:
    return DistComm(device=torch.device("cpu")) if run.ranks > 1 else SoloComm()


def everything(built: TrainState) -> dict[str, Any]:
    tensors = {"model": built.optimizer.masters, **built.optimizer.state()}
    return {
        kind: {n: t.numpy() for n, t in gather_global(of_names, built.shards, mesh=built.mesh).values.items()}
        for kind, of_names in tensors.items()
    }


def test_a_checkpoint_of_any_stages_loads_into_any_other(pool: RankPool, tmp_path: Path) -> None:
    runs = [
        replace(Run(tied=True), **PLAIN),
        Run("interleaved", virtual=2, group=2, tied=True),
        Run("zb_v", virtual=2, tied=True),
        Run("1f1b", pp=4, layout="E|tt||ttL", tied=True, dp=1),
    ]
    for i, first in enumerate(runs):
        folder = str(tmp_path / str(i))
        expected = pool.run(saved, first, folder, ranks=first.ranks)[0]
        assert len(expected["model"]) == 4 * 6 + 2
        for second in runs:
            found = pool.run(loaded, second, folder, ranks=second.ranks)[0]
            assert found.keys() == expected.keys()
            for kind, tensors in expected.items():
                assert found[kind].keys() == tensors.keys()
                for name, value in tensors.items():
                    assert (found[kind][name] == value).all(), (first, second, kind, name)


Event = tuple[str, Pass | Message]


def events(shape: Shape, rank: int, *, overlap: bool, backward: bool) -> list[Event]:
    """What a rank starts, one after the other: receive, compute, send."""
    started: list[Event] = []
    todo = order(shape, rank, backward=backward)
    for one, due in zip(todo, receives(shape, rank, backward=backward, overlap=overlap), strict=True):
        started += [("receive", message) for message in due.before]
        wanted = needed(shape, rank, one)
        if wanted is not None and source(shape, wanted) != rank:
            assert ("receive", wanted) in started, f"{one} needs {wanted}"
        started.append(("compute", one))
        started += [("receive", message) for message in due.behind]
        message = made(shape, rank, one)
        if message is not None and rank_of_stage(shape, message.stage) != rank:
            started.append(("send", message))
    return started


def comes_to_an_end(todo: list[list[Event]]) -> bool:
    """Whether ranks get through if each waits for whatever it has started before it goes on."""
    at = [0] * len(todo)
    now = [one[0] if one else None for one in todo]
    going = True
    while going:
        going = False
        sent = {event[1] for event in now if event is not None and event[0] == "send"}
        received = {event[1] for event in now if event is not None and event[0] == "receive"}
        for rank, event in enumerate(now):
            if event is not None and (event[0] == "compute" or event[1] in sent & received):
                at[rank] += 1
                now[rank] = todo[rank][at[rank]] if at[rank] < len(todo[rank]) else None
                going = True
    return now == [None] * len(todo)


@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved", 2),
        pytest.param("interleaved", 3, marks=pytest.mark.slow),
        ("zb_h1", 1),
        ("zb_v", 2),
    ],
)
def test_no_ranks_wait_for_each_other_even_if_each_waits_for_all_that_it_starts(schedule: str, virtual: int) -> None:
    count = 0
    for pp in (2, 3, 4, 6):
        for micro_batches in (*range(1, 2 * pp + 3), 4 * pp + 1):
            groups = range(pp, micro_batches + 1) if schedule == "interleaved" else (1,)
            for group in groups:
                shape = Shape(schedule, pp, micro_batches, virtual, group)
                # steps that end in part of a group are refused, windows of evaluation may
                is_refused = schedule == "interleaved" and 0 < micro_batches % group < pp
                for overlap, backward in product((True, False), (False,) if is_refused else (True, False)):
                    todo = [events(shape, rank, overlap=overlap, backward=backward) for rank in range(pp)]
                    assert comes_to_an_end(todo), (shape, overlap, backward)
                    count += 1
    assert count > 120


def test_ranks_that_wait_for_each_other_are_found() -> None:
    """Two that both send before either receives."""
    a, b = Message("F", 0, 1), Message("B", 0, 0)
    assert not comes_to_an_end([[("send", a), ("receive", b)], [("send", b), ("receive", a)]])
    assert comes_to_an_end([[("send", a), ("receive", b)], [("receive", a), ("send", b)]])


@pytest.mark.parametrize("pp", [2, 4])
def test_a_message_is_begun_before_the_pass_before_its_own(pp: int) -> None:
    """With overlap the transfer runs under a pass wherever there is one; without, what the next pass needs waits."""

    def at_once(schedule: str, virtual: int, *, overlap: bool) -> int:
        """Messages that the pass behind which they are begun is followed by the one that needs them."""
        shape = Shape(schedule, pp, 3 * pp, virtual, pp)
        count = 0
        for rank in range(pp):
            due = receives(shape, rank, overlap=overlap)
            for before, one, here in zip(due, order(shape, rank)[1:], due[1:], strict=False):
                count += needed(shape, rank, one) in (*before.behind, *here.before)
        return count

    for schedule, virtual in (("gpipe", 1), ("zb_h1", 1), ("zb_v", 2), ("interleaved", 2)):
        assert 3 * at_once(schedule, virtual, overlap=True) < at_once(schedule, virtual, overlap=False)
    assert not any(due.behind for due in receives(Shape("zb_v", pp, 3 * pp, 2), 0))


def waiting_everywhere(rank: int, run: Run, steps: int) -> dict[str, Any] | None:
    """Trains, and waits for each message as soon as it is begun: on a GPU a host may have to at any moment."""

    def start_and_wait(op: Any, x: Any, peer: int, group: Any) -> Any:
        (work,) = dist.batch_isend_irecv([dist.P2POp(op, x, peer, group)])
        work.wait()
        if x.is_cuda:
            torch.cuda.synchronize()
        # gloo's work can be waited for once
        return SimpleNamespace(wait=lambda: None)

    own, pipeline._start = pipeline._start, start_and_wait
    try:
        return train(rank, run, steps)
    finally:
        pipeline._start = own


@pytest.mark.parametrize(
    "run",
    [
        Run("1f1b"),
        Run("interleaved", virtual=2, group=4),
        Run("zb_h1", tied=True),
        Run("zb_v", virtual=2),
        Run("zb_v", virtual=2, overlap=False),
    ],
    ids=str,
)
def test_a_step_ends_though_each_message_is_waited_for(pool: RankPool, run: Run) -> None:
    found = trajectory_of(pool.run(waiting_everywhere, run, 2, ranks=run.ranks)[0])
    wrong = [str(f) for f in compare(found, truth(run, 2), TOLERANCES["fp64"]) if not f.passed]
    assert not wrong, "\n".join(wrong)


def runs_ahead(rank: int, run: Run) -> None:
    """A step and an evaluation after the first ones, in which waiting for the GPU is an error."""
    built = build(spec_of(run), mesh=mesh_of(run, rank))
    initialise(built)
    mine = divide(batches_of(run, 1)[0], mesh=built.mesh, micro_batch=built.spec.train.micro_batch)
    scaler = build_scaler(built.spec.precision, device=built.device)
    for mode in ("default", "error"):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        train_step(built, mine, lr=1e-3, weight_decay=0.1, scaler=scaler)
        evaluate(built, mine)
        torch.cuda.set_sync_debug_mode("default")


GPUS = [Run("1f1b", tied=True), Run("interleaved", virtual=2, group=4), Run("zb_h1"), Run("zb_v", virtual=2, tied=True)]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_over_nccl_schedules_train_as_one_gpu_does_and_the_host_waits_for_nothing(gpu_pool: RankPool) -> None:
    for run in GPUS:
        check(gpu_pool, replace(run, device="cuda"))
        gpu_pool.run(runs_ahead, replace(run, device="cuda", precision="bf16"), ranks=2)
    check(gpu_pool, Run("zb_h1", compile="block", micro_batches=3, device="cuda"), steps=1)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("run", GPUS, ids=str)
def test_over_nccl_a_step_ends_though_each_message_is_waited_for(gpu_pool: RankPool, run: Run) -> None:
    run = replace(run, device="cuda")
    found = trajectory_of(gpu_pool.run(waiting_everywhere, run, 2, ranks=run.ranks)[0])
    wrong = [str(f) for f in compare(found, truth(run, 2), TOLERANCES["fp64"]) if not f.passed]
    assert not wrong, "\n".join(wrong)
