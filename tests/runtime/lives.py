"""What ranks do in these tests: parts of a run's life, and a rank's entry with a fault in it."""

import gc
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from megaspec.checkpoint.comm import Comm, DistComm, SoloComm
from megaspec.checkpoint.store import Store
from megaspec.core import faults
from megaspec.core.errors import MegaspecError, Preempted
from megaspec.data.batch import Batch
from megaspec.data.loader import Loader, eval_batches, open_source
from megaspec.launcher import stop
from megaspec.log.events import TIMED, EvalDone, StepDone
from megaspec.log.jsonl import JsonlSink
from megaspec.log.sinks import METRICS
from megaspec.runtime import rank as runtime
from megaspec.runtime.build import TrainState, build, mesh_of
from megaspec.runtime.initial_weights import start_from_source
from megaspec.runtime.loop import Run
from megaspec.runtime.state import load, pieces_of
from megaspec.runtime.weights import weights
from megaspec.spec import Spec
from megaspec.train.batch_schedule import BatchSchedule


def comm_of(spec: Spec, rank: int) -> Comm:
    return DistComm(device=runtime.pick_device(spec, rank)) if spec.world_size > 1 else SoloComm()


def build_here(spec: Spec, rank: int) -> TrainState:
    """This rank's share of a Spec."""
    return build(spec, mesh=mesh_of(spec, rank=rank, device=runtime.pick_device(spec, rank)))


def starting_weights(rank: int, text: str) -> dict[str, Any] | str:
    """The weights with which a run starts, whole, by global name; or why it does not."""
    spec = Spec.model_validate_json(text)
    built = build_here(spec, rank)
    try:
        start_from_source(built, comm_of(spec, rank))
    except MegaspecError as error:
        return f"{type(error).__name__}: {error}"
    return {name: value.numpy() for name, value in weights(built).items()}


def save_anew(rank: int, text: str, source: str, folder: str) -> None:
    """Reads a run's newest checkpoint into the layout of a Spec, and saves it from there in another folder."""
    spec = Spec.model_validate_json(text)
    built = build_here(spec, rank)
    comm = comm_of(spec, rank)
    with Store(source).newest_good(comm, repair=False) as reader:
        load(built, reader)
        Store(folder).save(
            reader.step,
            pieces_of(built),
            spec=spec.model_dump(mode="json"),
            state=reader.state,
            comm=comm,
        )


def live(rank: int, text: str, folder: str, *, stop_after: int = 0) -> list[dict[str, Any]]:
    """One life of a run: from its newest checkpoint to its end, or until `stop_after` more steps are done.

    -> steps and evaluations, without what depends on the clock; from rank 0.
    """
    spec = Spec.model_validate_json(text)
    # as a rank's entry does; a life of its own: nothing of an earlier one in this process may help it
    runtime.seed_generators(spec.train.seed)
    comm = comm_of(spec, rank)
    run = Run(build_here(spec, rank), Path(folder), Store(folder), comm)
    events: list[dict[str, Any]] = []

    def note(event: Any) -> None:
        if rank == 0:
            sink(event)
        if isinstance(event, StepDone | EvalDone):
            # as text where it is not finite: NaN equals nothing
            numbers = {k: str(v) if isinstance(v, float) and not isfinite(v) else v for k, v in asdict(event).items()}
            events.append({k: v for k, v in numbers.items() if k not in TIMED})

    run.start()
    if rank == 0:
        # what a run that goes on reads of the life before
        Path(folder).mkdir(exist_ok=True)
        sink = JsonlSink(Path(folder) / METRICS, step=run.step)
    run.emit = note
    taken = 0

    def each_step() -> None:
        """Draws as code of a user's own would. The last rank is asked to stop; the others have to hear of it."""
        nonlocal taken
        taken += 1
        torch.rand(rank + 1)
        if taken == stop_after and rank == spec.world_size - 1:
            stop._note(signal.SIGTERM, None)

    faults.arm("step", each_step)
    try:
        run.train()
    except Preempted:
        assert stop_after, "nobody asked to stop"
    finally:
        faults.disarm()
        stop._asked.clear()
    return events if rank == 0 else []


def lives(rank: int, text: str, folder: str, *, stops: int) -> list[dict[str, Any]]:
    """A run that is stopped after every step, `stops` times, and goes on to its end after that."""
    events = []
    for _ in range(stops):
        events += live(rank, text, folder, stop_after=1)
        # its groups, whose threads wake often
        gc.collect()
    return events + live(rank, text, folder)


def sample_ids(rank: int, text: str) -> list[tuple[int, int, list[int]]]:
    """By step: the first sequence and the number of them that all ranks take, and the ids of this rank's."""
    spec = Spec.model_validate_json(text)
    dp, tp = spec.parallelism.dp_replicate, spec.parallelism.tp
    source = open_source(
        spec.data, split="train", seed=spec.data.seed, segments=spec.segments, vocab_size=spec.model.vocab_size
    )
    loader = Loader(
        source,
        BatchSchedule(spec.train),
        start_step=0,
        steps=spec.train.steps,
        micro_batch=spec.train.micro_batch,
        dp_rank=rank // tp,
        dp_size=dp,
        device=torch.device("cpu"),
    )
    with loader:
        return [(*b.ids, [i for micro in b.micro_batches for i in micro.ids.tolist()]) for b in loader]


def eval_batches_of(spec: Spec, rank: int) -> Iterator[Batch]:
    """What a rank evaluates on."""
    source = open_source(
        spec.data, split="valid", seed=spec.data.seed, segments=spec.segments, vocab_size=spec.model.vocab_size
    )
    return eval_batches(
        source,
        spec.train.eval_samples,
        micro_batch=spec.train.micro_batch,
        dp_rank=rank // spec.parallelism.tp,
        dp_size=spec.parallelism.dp_replicate,
        device=torch.device("cpu"),
        document_mask=spec.data.document_mask,
    )


def fails(rank: int, text: str, folder: str, fault: dict[str, Any]) -> tuple[str, str, int]:
    """A life with a fault (see `plant`). -> (class of the error, its text, updates that were applied)"""
    spec = Spec.model_validate_json(text)
    run = Run(build_here(spec, rank), Path(folder), Store(folder), comm_of(spec, rank))
    run.start()
    plant(run.built, rank, **fault)
    try:
        run.train()
    except MegaspecError as error:
        return type(error).__name__, str(error), run.built.optimizer.updates
    finally:
        faults.disarm()
    return "", "", run.built.optimizer.updates


def plant(built: TrainState, rank: int, *, on: int, what: str, step: int, value: float = float("nan")) -> None:
    """In step `step`, counted from here, rank `on` comes to a number that is not finite.

    `what`: `weight:NAME`, the weight itself; `gradient:NAME`, this rank's share of a gradient; `backward:NAME`, what
    comes back to the output of a linear layer, from which it spreads to all gradients below; `loss:`, the loss alone.
    """
    if rank == on:
        kind, _, name = what.partition(":")
        faults.arm("step", lambda: FAULTS[kind](built, name, value), count=step)


def poison_weight(built: TrainState, name: str, value: float) -> None:
    master = built.optimizer.masters[name].clone()
    master.view(-1)[0] = value
    built.optimizer.put("master", name, master)
    built.optimizer.write_back()


def poison_gradient(built: TrainState, name: str, value: float) -> None:
    """What the step finds in a sum of gradients, and adds to."""
    data = built.data_parallel
    start = data.start_step

    def start_with_poison() -> None:
        start()
        data.gradients[name].view(-1)[0] = value
        data._reductions._sums[name]._is_fresh = False

    data.start_step = start_with_poison


def poison_backward(built: TrainState, name: str, value: float) -> None:
    module = built.model.get_submodule(name.removesuffix(".weight"))
    module.register_forward_hook(lambda *args: _Poison.apply(args[-1], value))


def poison_loss(built: TrainState, name: str, value: float) -> None:
    loss = built.model.head.loss
    built.model.head.loss = lambda *args, **more: _AddToValue.apply(loss(*args, **more), value)


FAULTS: dict[str, Callable[[TrainState, str, float], None]] = {
    "weight": poison_weight,
    "gradient": poison_gradient,
    "backward": poison_backward,
    "loss": poison_loss,
}


class _Poison(torch.autograd.Function):
    """The identity, whose first gradient is not finite."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: float) -> torch.Tensor:
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.clone()
        grad.view(-1)[0] = ctx.value
        return grad, None


class _AddToValue(torch.autograd.Function):
    """x + value with the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: float) -> torch.Tensor:
        return x + value

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def main(run_dir: str, *, rank: int, fault: dict[str, Any] | None = None, **keywords: Any) -> int:
    """A rank's entry; `fault`: see `plant`, as soon as the rank has built its model."""
    if fault is not None:
        start = Run.start

        def start_and_plant(run: Run) -> None:
            start(run)
            plant(run.built, rank, **fault)

        Run.start = start_and_plant
    return runtime.main(run_dir, rank=rank, **keywords)


def read_all(folder: Path) -> dict[int, tuple[dict[str, bytes], dict[str, Any]]]:
    """Bytes of every tensor, and state, of every checkpoint of a run, by step."""
    found = {}
    store = Store(folder)
    for step in store.steps():
        with store.open(step, SoloComm()) as reader:
            tensors = {n: reader.read(n).contiguous().view(torch.uint8).numpy().tobytes() for n in reader.names()}
            found[step] = (tensors, reader.state)
    return found


def loaded(rank: int, text: str, folder: str) -> dict[str, Any]:
    """What a run's optimizer holds once it has read the newest checkpoint in a folder."""
    spec = Spec.model_validate_json(text)
    built = build_here(spec, rank)
    with Store(folder).newest_good(comm_of(spec, rank), repair=False) as reader:
        load(built, reader)
    state = {}
    for kind, tensors in built.optimizer.state().items():
        for name, tensor in tensors.items():
            state[f"optim/{kind}/{name}"] = tensor.to(torch.float64).numpy()
    return {"updates": built.optimizer.updates, "state": state}
