"""A run saves the same tensors and state whether training waits for it or not."""

import pytest

from tests.runtime import lives
from tests.runtime.specs import spec

LAYOUTS = {
    "one": {},
    "dp_replicate 2": {"parallelism.dp_replicate": 2},
    "fsdp": {"parallelism.dp_shard": 2, "parallelism.dp_strategy": "fsdp"},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_checkpoint_is_the_same(name, tmp_path, pool) -> None:
    found = {}
    for saving in ("blocking", "async"):
        checkpoint = {"every": 1, "keep": 9, "saving": saving, "last": "weights"}
        made = spec(LAYOUTS[name] | {"train.steps": 5, "precision.kind": "fp32", "checkpoint": checkpoint})
        pool.run(lives.live, made.model_dump_json(), str(tmp_path / saving), ranks=made.world_size)
        found[saving] = lives.read_all(tmp_path / saving)
    assert list(found["async"]) == [1, 2, 3, 4, 5]
    assert found["async"] == found["blocking"]
