"""Packages of Transformer Engine that multiply wrongly without a word, and GPUs on which the right one is asked."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megaspec.precision.spec import BLACKWELL_SM
from megaspec_kernels import te_package
from megaspec_kernels.te_package import TransformerEngine


def needs_blackwell(recipe: str) -> None:
    """Skips where no GPU has its tensor cores, or the package is not installed."""
    if torch.cuda.device_count() < 1:
        pytest.skip("needs a GPU")
    major, minor = torch.cuda.get_device_capability()
    first, last = BLACKWELL_SM[recipe]
    if not first <= 10 * major + minor <= last:
        pytest.skip(f"{recipe} needs Blackwell (sm{first} to sm{last}), this GPU is sm{10 * major + minor}")
    lacks = te_package.missing()
    if lacks is not None:
        pytest.skip(lacks)


def with_products(package: TransformerEngine, change: Callable[..., Any]) -> TransformerEngine:
    """A package that multiplies otherwise. `change`: takes what makes a product, and what is given."""
    right = package.general_gemm
    return replace(package, general_gemm=lambda *args, **given: change(right, *args, **given))


def never_adds(right: Callable[..., Any], a: Any, b: Any, **given: Any) -> Any:
    return right(a, b, **(given | {"accumulate": False}))


def sums_in_bf16(right: Callable[..., Any], a: Any, b: Any, **given: Any) -> Any:
    found = right(a, b, **given)
    if given["out"] is not None:
        given["out"].copy_(given["out"].bfloat16())
    return found


def refuses(right: Callable[..., Any], a: Any, b: Any, **given: Any) -> Any:
    raise RuntimeError("cuBLAS Error: the requested functionality is not supported\nIn function nvte_cublas_gemm")
