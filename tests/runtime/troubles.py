"""What ranks do in the tests of numbers and of hardware: a run with faults in some of its steps."""

import random
import signal
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megaspec.checkpoint import fallback, publish
from megaspec.checkpoint.store import Store
from megaspec.core import faults
from megaspec.core.errors import MegaspecError
from megaspec.launcher import stop
from megaspec.log.events import CheckpointSaved, HardwareSuspected
from megaspec.log.jsonl import JsonlSink
from megaspec.log.sinks import METRICS
from megaspec.runtime import rank as runtime
from megaspec.runtime.build import TrainState
from megaspec.runtime.loop import Run
from megaspec.spec import Spec
from tests.runtime.lives import _AddToValue, build_here, comm_of


def live_through(rank: int, text: str, folder: str, fault: dict[str, Any]) -> dict[str, Any]:
    """A life of a run in whose steps `fault["steps"]` rank `fault["on"]` adds `value` to its loss, the first time that
    it comes to them. `stop_after`: a stop is asked for in that step, counted from here. `full`: behind these steps the
    run's folder takes no checkpoint; `stays`: and never one that was saved elsewhere. -> how it ended, and what its
    copier was asked for"""
    made = Spec.model_validate_json(text)
    runtime.seed_generators(made.train.seed)
    run = Run(build_here(made, rank), Path(folder), Store(folder), comm_of(made, rank))
    free_at_home = fallback.free_bytes
    if fault.get("stays"):
        fallback.free_bytes = lambda path: 0
    run.start()
    copier = Noted()
    if rank == 0:
        Path(folder).mkdir(exist_ok=True)
        run.emit = JsonlSink(Path(folder) / METRICS, step=run.step)
        run.copier = copier
    left = set(fault["steps"]) if rank == fault["on"] else set()
    added = add_to_loss(run.built)
    value = fault.get("value", float("nan"))
    taken = 0

    def each_step() -> None:
        nonlocal taken
        taken += 1
        step = run.step + 1
        added[0] = 0.0
        if step in left:
            left.remove(step)
            added[0] = value
        if taken == fault.get("stop_after"):
            stop._note(signal.SIGTERM, None)

    free_bytes = publish.free_bytes

    def free_in(path: Path) -> int:
        is_full = run.step in fault.get("full", ()) and path.is_relative_to(folder)
        return 0 if is_full else free_bytes(path)

    publish.free_bytes = free_in
    faults.arm("step", each_step)
    try:
        return {**how_it_ended(run), "copies": copier.calls}
    finally:
        publish.free_bytes = free_bytes
        fallback.free_bytes = free_at_home


class Noted:
    """In place of a copier: keeps what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def copy(self, path: Path, step: int) -> None:
        self.calls.append(("copy", step))

    def drop(self, step: int) -> None:
        self.calls.append(("drop", step))

    def poll(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is open."""


def how_it_ended(run: Run) -> dict[str, Any]:
    try:
        run.train()
    except MegaspecError as error:
        return {"end": f"{type(error).__name__}: {error}", "code": error.exit_code, "step": run.step}
    finally:
        faults.disarm()
        stop._asked.clear()
    return {"end": "", "code": 0, "step": run.step}


def add_to_loss(built: TrainState) -> list[float]:
    """What is added to the loss of every micro batch; a list of one, to be written."""
    added = [0.0]
    head: Any = built.chunks[-1].head
    if head is None:
        return added
    loss: Callable[..., Any] = head.loss
    head.loss = lambda *args, **more: _AddToValue.apply(loss(*args, **more), added[0])
    return added


def flip_bit(tensor: torch.Tensor, draw: random.Random) -> None:
    """Flips a random bit of a random element, in place."""
    tensor = tensor.detach()
    number = draw.randrange(tensor.numel())
    place = []
    for size in reversed(tensor.shape):
        number, index = divmod(number, size)
        place.append(index)
    one = tensor[tuple(reversed(place))]
    word = one.reshape(1).clone().view(torch.uint8)
    bit = draw.randrange(8 * len(word))
    word[bit // 8] ^= 1 << (bit % 8)
    one.copy_(word.view(tensor.dtype).reshape(()))


def tensors_to_hit(built: TrainState, kind: str) -> dict[str, torch.Tensor]:
    """What of this rank's memory a fault may hit, by the name under which it is told. `kind`: master, weights or
    state."""
    if kind == "master":
        return {f"model/{name}": one for name, one in built.optimizer.masters.items() if one.numel()}
    if kind == "weights":
        return {f"weights/{name}": one for name, one in built.data_parallel.weights.items() if one.numel()}
    found = {}
    for state, tensors in built.optimizer.state().items():
        for name, one in tensors.items():
            if one.numel():
                found[f"optim/{state}/{name}"] = one
    return found


def spoil_always(built: TrainState, draw: random.Random, bucket: Any) -> None:
    """The last bit of some gradient is another one each time."""
    gradient = bucket.division.view(bucket.sums.whole, bucket.names[0]).view(-1)
    gradient[draw.randrange(len(gradient))] += 1e-6 * draw.random()
    built.data_parallel._before_reduce(bucket)


def with_flips(rank: int, text: str, folder: str, flips: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs of one Spec, each with one bit that flips on rank `on` before step `step`; a run that ends leaves the next
    one to begin anew from the seed. -> of each how it ended, what was hit, and the event that tells of it"""
    made = Spec.model_validate_json(text)
    results = []
    for number, fault in enumerate(flips):
        run_dir = Path(folder) / str(number)
        run = Run(build_here(made, rank), run_dir, Store(run_dir), comm_of(made, rank))
        events: list[Any] = []
        run.emit = events.append
        run.start()
        hit: list[str] = []

        def each_step(run: Run = run, fault: dict[str, Any] = fault, hit: list[str] = hit) -> None:
            if run.step + 1 != fault["step"] or rank != fault["on"]:
                return
            draw = random.Random(fault["seed"])
            found = tensors_to_hit(run.built, fault["kind"])
            name = fault.get("name") or draw.choice(sorted(found))
            hit.append(name)
            flip_bit(found[name], draw)
            if fault.get("always_wrong"):
                wrong = partial(spoil_always, run.built, draw)
                run.built.data_parallel._reductions._on_reduce = wrong

        faults.arm("step", each_step)
        result = how_it_ended(run)
        suspected = [asdict(event) for event in events if isinstance(event, HardwareSuspected)]
        saved = [event.step for event in events if isinstance(event, CheckpointSaved)]
        results.append({**result, "hit": hit, "suspected": suspected, "saved": saved})
    return results


def with_wrong_gradients(rank: int, text: str, folder: str, flips: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As `with_flips`, of a bit in what rank `on` has of a gradient, in the first reduction of step `step`."""
    made = Spec.model_validate_json(text)
    results = []
    for number, fault in enumerate(flips):
        run_dir = Path(folder) / str(number)
        run = Run(build_here(made, rank), run_dir, Store(run_dir), comm_of(made, rank))
        events: list[Any] = []
        run.emit = events.append
        run.start()
        data = run.built.data_parallel
        left = [1] if rank == fault["on"] else []

        def spoil(bucket: Any, run: Run = run, fault: dict[str, Any] = fault, left: list[int] = left) -> None:
            if left and run.step + 1 == fault["step"]:
                left.pop()
                draw = random.Random(fault["seed"])
                # of a gradient: between them lies what nobody reads
                flip_bit(bucket.division.view(bucket.sums.whole, draw.choice(bucket.names)), draw)
            run.built.data_parallel._before_reduce(bucket)

        data._reductions._on_reduce = spoil
        result = how_it_ended(run)
        suspected = [asdict(event) for event in events if isinstance(event, HardwareSuspected)]
        results.append({**result, "suspected": suspected})
    return results


def is_clean(rank: int, text: str, folder: str) -> dict[str, Any]:
    """A run without faults. -> how it ended, with what its checks have looked at"""
    made = Spec.model_validate_json(text)
    run = Run(build_here(made, rank), Path(folder), Store(folder), comm_of(made, rank))
    run.start()
    result = how_it_ended(run)
    checks = run.checks
    sets = len(set(checks._copies._holders.values()))
    return {**result, "agreed": checks.agreed_step, "copies": len(checks._copies._holders), "sets": sets}
