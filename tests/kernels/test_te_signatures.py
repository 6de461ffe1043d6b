"""What is called of Transformer Engine, by name, as its own sources have it. They are read, not imported.

Skipped where it is not installed. On a machine without its libraries the sources alone do: they are found on the path.
"""

import ast
import importlib.util
from pathlib import Path

import pytest

from tests.kernels import te

FOUND = importlib.util.find_spec("transformer_engine")
pytestmark = pytest.mark.skipif(FOUND is None, reason="Transformer Engine is not installed: pip install 'megaspec[te]'")

QUANTIZERS = {
    "Float8CurrentScalingQuantizer": ("tensor/float8_tensor.py", {"fp8_dtype", "device", "rowwise", "columnwise"}),
    "Float8Quantizer": ("tensor/float8_tensor.py", {"scale", "amax", "fp8_dtype", "rowwise", "columnwise"}),
    "Float8BlockQuantizer": (
        "tensor/float8_blockwise_tensor.py",
        {"fp8_dtype", "rowwise", "columnwise", "amax_epsilon", "force_pow_2_scales", "block_scaling_dim"},
    ),
    "MXFP8Quantizer": ("tensor/mxfp8_tensor.py", {"fp8_dtype", "rowwise", "columnwise"}),
    "NVFP4Quantizer": (
        "tensor/nvfp4_tensor.py",
        {
            "fp4_dtype",
            "rowwise",
            "columnwise",
            "with_amax_reduction",
            "amax_reduction_group",
            "with_rht",
            "with_post_rht_amax",
            "with_2d_quantization",
            "stochastic_rounding",
        },
    ),
}
STORAGES = {
    "Float8TensorStorage": (
        "tensor/storage/float8_tensor_storage.py",
        {"data", "data_transpose", "fp8_scale_inv", "fp8_dtype", "fake_dtype", "quantizer"},
        {"_data", "_transpose", "_scale_inv"},
    ),
    "Float8BlockwiseQTensorStorage": (
        "tensor/storage/float8_blockwise_tensor_storage.py",
        {
            "rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "fp8_dtype", "quantizer",
            "is_2D_scaled", "fake_dtype",
        },
        {"_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv"},
    ),
    "MXFP8TensorStorage": (
        "tensor/storage/mxfp8_tensor_storage.py",
        {
            "rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "fp8_dtype", "quantizer",
            "with_gemm_swizzled_scales", "fake_dtype",
        },
        {
            "_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv",
            "_with_gemm_swizzled_scales",
        },
    ),
    "NVFP4TensorStorage": (
        "tensor/storage/nvfp4_tensor_storage.py",
        {
            "rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "amax_rowwise",
            "amax_columnwise", "fp4_dtype", "quantizer", "with_gemm_swizzled_scales", "fake_dtype",
        },
        {
            "_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv", "_amax_rowwise",
            "_amax_columnwise", "_with_gemm_swizzled_scales",
        },
    ),
}  # fmt: skip


def tree(name: str) -> ast.Module:
    return ast.parse((Path(FOUND.origin).parent / "pytorch" / name).read_text())


def arguments(function: ast.FunctionDef) -> list[str]:
    """Those that may be given by place, then those by name alone."""
    return [one.arg for one in (*function.args.args, *function.args.kwonlyargs)]


def function(name: str, where: ast.AST) -> ast.FunctionDef:
    return next(node for node in ast.walk(where) if isinstance(node, ast.FunctionDef) and node.name == name)


def class_of(name: str, file: str) -> ast.ClassDef:
    return next(node for node in ast.walk(tree(file)) if isinstance(node, ast.ClassDef) and node.name == name)


def test_products() -> None:
    taken = arguments(function("general_gemm", tree("cpp_extensions/gemm.py")))
    assert taken[:3] == ["A", "B", "out_dtype"]
    assert {"layout", "out", "bias", "accumulate", "use_split_accumulator", "grad"} <= set(taken)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantizers(name: str) -> None:
    file, used = QUANTIZERS[name]
    assert used <= set(arguments(function("__init__", class_of(name, file))))


@pytest.mark.parametrize("name", STORAGES)
def test_storages(name: str) -> None:
    file, used, read = STORAGES[name]
    own = class_of(name, file)
    assert used <= set(arguments(function("__new__", own)))
    assert read <= {node.target.id for node in own.body if isinstance(node, ast.AnnAssign)}


@pytest.mark.parametrize("name", ["fused_attn_fwd", "fused_attn_bwd"])
def test_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake takes a part of what the package takes, those by place in the same places."""
    theirs = arguments(function(name, tree("cpp_extensions/fused_attn.py")))
    package = te._attention(te.Fake())
    code = getattr(package, name).__code__
    mine = code.co_varnames[: code.co_argcount]
    by_place = mine.index("fused_attention_backend") + 1
    assert list(mine[:by_place]) == theirs[:by_place]
    assert set(mine) <= set(theirs)


def test_names_are_offered() -> None:
    top = ast.parse((Path(FOUND.origin).parent / "pytorch" / "__init__.py").read_text())
    offered: set[str] = set()
    for node in top.body:
        if isinstance(node, ast.ImportFrom):
            offered |= {alias.asname or alias.name for alias in node.names}
    assert {*QUANTIZERS, *STORAGES, "DType", "constants"} <= offered
