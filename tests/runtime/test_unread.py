"""What the rules call unread is asked for by nothing that is built."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from megaspec.rules.unread import unmet_needs
from megaspec.runtime.build import initialise
from megaspec_kernels.registry import REGISTRY
from tests.runtime.lives import build_here
from tests.runtime.specs import spec

ALL_IN_FP8 = {"kind": "fp8", "first_layers_bf16": 0, "last_layers_bf16": 0}
MOE = {"n_experts": 4, "top_k": 2, "d_expert": 48}
# What is built, and whether some linear layer of it computes by kernels.linear.
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "bf16": ({"precision.kind": "bf16"}, True),
    "all in fp8": ({"precision": ALL_IN_FP8}, False),
    "the first in bf16": ({"precision": ALL_IN_FP8 | {"first_layers_bf16": 1}}, True),
    "experts": ({"precision": ALL_IN_FP8, "model.moe": MOE}, False),
    "shared experts": ({"precision": ALL_IN_FP8, "model.moe": MOE | {"d_shared": 48}}, True),
}


@pytest.mark.parametrize("name", CASES)
def test_linear_is_read_where_a_layer_asks_for_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, is_read = CASES[name]
    plain = REGISTRY["linear"]["reference"]
    calls: Counter[str] = Counter()

    def forward(*factors: torch.Tensor | None) -> torch.Tensor:
        calls["forward"] += 1
        return plain.forward(*factors)

    monkeypatch.setitem(REGISTRY["linear"], "reference", replace(plain, forward=forward))
    # of every side of a product 16
    made = spec({"model.n_heads": 2, "kernels.linear": "reference", **changes})
    built = build_here(made, 0)
    initialise(built)
    built.model(torch.zeros(1, made.data.seq_len, dtype=torch.int64))
    assert (calls["forward"] > 0) == is_read
    assert bool(unmet_needs("kernels.linear", made)) != is_read
