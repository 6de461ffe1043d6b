"""Transformer Engine, imported by the first call that needs it and by nothing before.

Its functional core is all that is used: products, casts and cuDNN attention. Its modules bring process groups, states
and weights of their own, which here are the model's. Names and signatures are those of 2.20.
"""

import importlib
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch

from megaspec_kernels.cudnn_library import cudnn_of_torch

PACKAGE = "transformer_engine"


@dataclass(frozen=True)
class TransformerEngine:
    """What is called of it."""

    general_gemm: Any
    """transformer_engine.pytorch.cpp_extensions.general_gemm"""
    attention: ModuleType
    """transformer_engine.pytorch.cpp_extensions.fused_attn"""
    functions: ModuleType
    """transformer_engine_torch, the functions below its Python"""
    pytorch: ModuleType
    """transformer_engine.pytorch"""

    def dtype(self, dtype: torch.dtype) -> Any:
        """An fp8 format as it calls it."""
        formats = {
            torch.float8_e4m3fn: self.pytorch.DType.kFloat8E4M3,
            torch.float8_e5m2: self.pytorch.DType.kFloat8E5M2,
        }
        return formats[dtype]


@cache
def transformer_engine() -> TransformerEngine:
    """The package. ImportError: it is not installed, and others where its libraries can't be loaded; see `missing`."""
    with cudnn_of_torch("CUDNN_HOME"):
        # by itself: without it the package swallows what went wrong
        pytorch = importlib.import_module(f"{PACKAGE}.pytorch")
        extensions = importlib.import_module(f"{PACKAGE}.pytorch.cpp_extensions")
        attention = importlib.import_module(f"{PACKAGE}.pytorch.cpp_extensions.fused_attn")
        # a library that the package has registered under this name
        functions = importlib.import_module("transformer_engine_torch")
    return TransformerEngine(extensions.general_gemm, attention, functions, pytorch)


def missing() -> str | None:
    """Why Transformer Engine can't be used here, in words; None when it can."""
    try:
        transformer_engine()
    except ModuleNotFoundError as error:
        if error.name == PACKAGE:
            return "needs the package transformer-engine: pip install 'megaspec[te]'"
        return f"needs transformer-engine, which needs the module {error.name}: pip install 'megaspec[te]'"
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        # a library of another CUDA or cuDNN, or parts of different versions
        return f"needs transformer-engine, which can't be loaded: {error}"
    return None
