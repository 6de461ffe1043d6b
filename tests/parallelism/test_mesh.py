"""Groups of a mesh: how long their collectives wait, and what they are called."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megaspec.launcher.rendezvous import FileRendezvous
from megaspec.parallelism.mesh import Mesh
from megaspec.runtime import rank as runtime
from tests.ranks import RankPool
from tests.runtime.specs import make_run

LAYOUT = {"dp_replicate": 2, "tp": 2}


def waits_for_a_rank_that_never_comes(rank, seconds):
    """-> how long a collective of a part of the world waited, None on ranks whose group is complete."""
    bound = timedelta(seconds=seconds)
    group = Mesh(LAYOUT, rank=rank, device=torch.device("cpu"), timeout=bound).group("tp")
    if rank == 1:
        return None
    start = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError:
        return time.monotonic() - start
    return None


def names(rank):
    mesh = Mesh({"pp": 2, "cp": 2}, rank=rank, device=torch.device("cpu"))
    mesh.make_pairs()
    other = rank ^ 2
    groups = mesh.group("cp"), mesh.group("cp", line="weights"), mesh.pair(rank, other)
    return [group.group_desc for group in groups]


class Seen(Exception):
    """Ends a rank once it has made its mesh."""


def bounds_of_a_rank(rank, folder, store, seconds):
    """The bounds in seconds of the groups that a rank of a run makes: its tensor-parallel one and the world."""
    seen = []

    def look(spec, *, mesh, position):
        for group in (mesh.group("tp"), dist.group.WORLD):
            seen.append(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
        # nobody leaves while another is still being connected
        dist.barrier()
        raise Seen

    build, runtime.build = runtime.build, look
    # the world of this test gives way to the one that the rank makes
    dist.destroy_process_group()
    try:
        runtime.run_rank(folder, runtime.RankInfo(rank, 4, rank, 0, FileRendezvous(store), seconds), None)
    except Seen:
        return seen
    finally:
        runtime.build = build
        # a rank that fails leaves its groups as they are
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.FileStore(f"{store}-after", 4), rank=rank, world_size=4)


@pytest.fixture(scope="module")
def pool():
    with RankPool(timeout=60) as ranks:
        yield ranks


def test_a_group_waits_as_long_as_the_mesh_says(pool):
    waited = pool.run(waits_for_a_rank_that_never_comes, 1.5, ranks=4)
    assert waited[1:] == [None, None, None]
    assert 1.0 < waited[0] < 10.0


def test_every_group_of_a_run_has_the_bound_of_its_launcher(pool, tmp_path):
    run = make_run(tmp_path / "run", {"parallelism.tp": 2, "parallelism.dp_replicate": 2})
    assert pool.run(bounds_of_a_rank, run, str(tmp_path / "store"), 33.0, ranks=4) == [[33.0, 33.0]] * 4


def test_groups_are_called_as_a_report_of_a_hang_tells_them(pool):
    assert pool.run(names, ranks=4)[1] == ["cp", "cp weights", "pp from rank 1 to 3"]
