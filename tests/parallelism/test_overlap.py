"""What runs beside computation and what runs alone computes the same, to the bit."""

import pytest

from tests.parallelism.test_recompute import gradients, spec_of
from tests.ranks import RankPool


@pytest.mark.parametrize("sequence", ["true", "false"])
def test_tensor_parallel_sums_beside_a_product_or_alone(sequence: str) -> None:
    words = f"parallelism.sequence_parallel={sequence}"
    specs = [spec_of(words, *more, tp=2) for more in ((), ("parallelism.overlap.tp=false",))]
    with RankPool() as pool:
        beside, alone = (pool.run(gradients, spec, ranks=2)[0] for spec in specs)
    assert [name for name, value in beside.items() if value.tobytes() != alone[name].tobytes()] == []
