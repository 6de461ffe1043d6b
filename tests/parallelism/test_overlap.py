"""What runs beside computation and what runs alone computes the same, to the bit."""

import pytest

from tests.parallelism.test_recompute import gradients, spec_of
from tests.ranks import RankPool


@pytest.mark.parametrize(
    ("layout", "switch", "words"),
    [
        ({"tp": 2}, "tp", "parallelism.sequence_parallel=true"),
        pytest.param({"tp": 2}, "tp", "parallelism.sequence_parallel=false", marks=pytest.mark.slow),
        ({"pp": 2}, "p2p", "parallelism.pipeline.virtual_stages=2"),
    ],
)
def test_beside_or_alone(layout: dict[str, int], switch: str, words: str) -> None:
    specs = [spec_of(words, *more, **layout) for more in ((), (f"parallelism.overlap.{switch}=false",))]
    with RankPool() as pool:
        beside, alone = (pool.run(gradients, spec, ranks=2)[0] for spec in specs)
    assert [name for name, value in beside.items() if value.tobytes() != alone[name].tobytes()] == []
