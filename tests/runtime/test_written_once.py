"""Each shard is written by one rank, and ranks that hold copies write as many bytes each."""

from typing import Any

import pytest

from megaspec.runtime.state import pieces_of, shared_out
from tests.runtime.lives import build_here
from tests.runtime.specs import spec

LAYOUTS = {
    "dp_replicate 2": {"parallelism.dp_replicate": 2},
    "dp_replicate 2, tp 2": {"parallelism.dp_replicate": 2, "parallelism.tp": 2},
    "hsdp": {"parallelism.dp_replicate": 2, "parallelism.dp_shard": 2, "parallelism.dp_strategy": "hsdp"},
}


def written(rank: int, text: str) -> dict[str, int]:
    """Bytes of each piece that this rank writes, by tensor and place."""
    from megaspec.spec import Spec

    found: dict[str, int] = {}
    for piece in pieces_of(build_here(Spec.model_validate_json(text), rank)):
        if not piece.name.startswith("rng/"):
            found[f"{piece.name}{piece.rectangle}"] = piece.tensor.numel() * piece.tensor.element_size()
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_byte_is_written_twice(name, pool) -> None:
    changes: dict[str, Any] = {"precision.kind": "fp32", "model.n_layers": 4}
    # rows that split evenly: what is looked at is who writes a share, not how large it is
    changes |= {"model.vocab_size": 512, "data.vocab_size": 512}
    one = spec(changes)
    whole = sum(written(0, one.model_dump_json()).values())
    many = spec(changes | LAYOUTS[name])
    by_rank = pool.run(written, many.model_dump_json(), ranks=many.world_size)
    keys = [key for one in by_rank for key in one]
    assert len(keys) == len(set(keys))
    loads = [sum(one.values()) for one in by_rank]
    assert sum(loads) == whole
    # dp_replicate is the outermost axis of these: ranks that are half a world apart hold copies
    half = many.world_size // 2
    for one, other in zip(loads[:half], loads[half:], strict=True):
        assert abs(one - other) <= 0.01 * whole / many.world_size


def test_a_large_tensor_is_made_up_for() -> None:
    sizes = {"embedding": 100, **{f"layer{i}": 10 for i in range(30)}}
    writer = shared_out(sizes, 4)
    loads = [sum(size for name, size in sizes.items() if writer[name] == one) for one in range(4)]
    assert loads == [100, 100, 100, 100]
