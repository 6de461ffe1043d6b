"""Which GPU a worker's tests run on."""

import pytest

from tests.conftest import begun_at

GPUS = ["GPU-a", "GPU-b", "GPU-c"]


@pytest.mark.parametrize(
    ("worker", "expected"),
    [
        (0, ["GPU-a", "GPU-b", "GPU-c"]),
        (1, ["GPU-b", "GPU-c", "GPU-a"]),
        (2, ["GPU-c", "GPU-a", "GPU-b"]),
        (3, ["GPU-a", "GPU-b", "GPU-c"]),
    ],
)
def test_neighbours_begin_at_different_gpus_and_see_all(worker: int, expected: list[str]) -> None:
    assert begun_at(GPUS, worker) == expected
