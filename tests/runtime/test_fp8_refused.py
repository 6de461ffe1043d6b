"""What an fp8 run refuses before anything is built."""

from types import SimpleNamespace

import pytest
import torch

from megaspec.core.errors import RecipeError
from megaspec.estimate.target import Target
from megaspec.parallelism.mesh import Mesh
from megaspec.runtime import build
from megaspec_kernels.scaled_product import cublaslt
from tests.runtime.specs import spec

H200 = Target(gpus=1, gpu="NVIDIA H200", sm=90, cores=16, versions={"torch": "2.13.0"})


@pytest.mark.parametrize(("recipe", "is_refused"), [("rowwise", True), ("tensorwise", False)])
def test_a_build_asks_for_a_cublaslt_that_has_its_scales(recipe, is_refused, monkeypatch) -> None:
    monkeypatch.setattr(cublaslt, "library", lambda: SimpleNamespace(cublasLtGetVersion=lambda: 120803))
    made = spec({"precision": {"kind": "fp8", "recipe": recipe}, "model.n_layers": 4}, target=H200)
    assert made.kernels.scaled_product == "cublaslt"
    # nothing is put on its device
    mesh = Mesh({}, rank=0, device=torch.device("cuda"))
    kernels = build._kernels(made)
    if is_refused:
        with pytest.raises(RecipeError, match=r"precision\.recipe=rowwise, torch .* has 12\.8\.3"):
            build._fp8(made, made.model.facts, kernels=kernels, mesh=mesh)
        return
    build._fp8(made, made.model.facts, kernels=kernels, mesh=mesh)
