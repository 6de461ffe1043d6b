"""JSON between gloo ranks, and one rank's failure on all of them."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megaspec.checkpoint.comm import DistComm, on_first, together
from megaspec.checkpoint.store import Store
from megaspec.core.errors import CheckpointError, MegaspecError, MemoryRunOut, WriteError
from tests.checkpoint.checkpoint_cases import CHUNK, FORKS, SOLO, assert_holds, save


def outcome(action) -> object:
    try:
        return action()
    except (MegaspecError, ZeroDivisionError) as error:
        return [type(error).__name__, str(error)]


def talk(folder: str, rank: int) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/rendezvous", 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=20),
    )
    comm = DistComm()

    def fail(kind: type[Exception]) -> object:
        if comm.rank == 1:
            raise kind("bad luck")
        return comm.rank

    store = Store(folder, chunk_bytes=CHUNK)
    save(store, 1, comm)
    with store.newest_good(comm) as reader:
        assert_holds(reader, 1)
    found = {
        "gather": comm.gather({"rank": comm.rank, "text": "ä" * 1000 * comm.rank}),
        "broadcast": comm.broadcast([None, 1.5, "x" * 5000] if rank == 0 else 3),
        "together": outcome(lambda: together(comm, lambda: comm.rank)),
        "write": outcome(lambda: together(comm, lambda: fail(WriteError))),
        "checkpoint": outcome(lambda: together(comm, lambda: fail(CheckpointError))),
        "other": outcome(lambda: together(comm, lambda: fail(ZeroDivisionError))),
        "first": outcome(lambda: on_first(comm, lambda: comm.rank)),
    }
    comm.barrier()
    Path(folder, f"said-{rank}").write_text(json.dumps(found))
    dist.destroy_process_group()


def test_two_gloo_ranks(tmp_path) -> None:
    children = [FORKS.Process(target=talk, args=(str(tmp_path), r)) for r in range(2)]
    for c in children:
        c.start()
    for c in children:
        c.join(60)
    assert [c.exitcode for c in children] == [0, 0]
    first, second = (json.loads((tmp_path / f"said-{r}").read_text()) for r in range(2))
    assert first.pop("other") == ["MegaspecError", "rank 1: failed; its own error says why"]
    assert second.pop("other") == ["ZeroDivisionError", "bad luck"]
    assert first == second
    assert first == {
        "gather": [{"rank": 0, "text": ""}, {"rank": 1, "text": "ä" * 1000}],
        "broadcast": [None, 1.5, "x" * 5000],
        "together": [0, 1],
        "write": ["WriteError", "rank 1: bad luck"],
        "checkpoint": ["CheckpointError", "rank 1: bad luck"],
        "first": 0,
    }
    with Store(tmp_path).newest_good(SOLO) as reader:
        assert_holds(reader, 1)
        assert len(reader.manifest.files) == 2


def test_an_error_keeps_the_exit_code_that_schedulers_read() -> None:
    """More memory than there is ends a run with 64: with 70 a supervisor would try it again."""

    def take() -> None:
        raise MemoryRunOut("more than there is")

    with pytest.raises(MemoryRunOut, match="more than there is"):
        together(SOLO, take)
