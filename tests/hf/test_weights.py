"""Tensors both ways, to the bit: whole, in rectangles, and through every form that a family has them in."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megaspec.core.errors import CheckpointError, RecipeError, WriteError
from megaspec.hf.blocks import Block, TensorMap, pairs_to_halves, their_tensors
from megaspec.hf.family import typed
from megaspec.hf.folder import open_hf_folder
from megaspec.hf.names import Matrix, Names, WeightTable, weight_table
from megaspec.hf.table import FAMILIES
from megaspec.hf.weights import HfWeights, their_tensor
from megaspec.hf.writing import out_tensors, write_folder
from tests.hf.models import InMemory

SPEC = typed(
    {"kind": "decoder", "n_layers": 2, "d_model": 8, "n_heads": 4, "n_kv_heads": 2, "d_head": 6, "d_ffn": 10}
    | {"vocab_size": 16, "max_seq_len": 8, "tied_embeddings": True}
    | {"moe": {"n_experts": 3, "top_k": 2, "d_expert": 5, "first_dense": 1}}
    | {"attention": {"kind": "gqa", "qkv_bias": True, "out_bias": True}}
)
PLAIN = FAMILIES["qwen3_moe"].names(SPEC)
# Every form at once: transposed and interleaved experts in one tensor, rotary pairs, heads in turn.
PAIRED = (6, pairs_to_halves(6, 4))
ODD = Names(
    layer="h.{n}.",
    matrices={
        **PLAIN.matrices,
        "attn.wqkv": Matrix(("attn.q", "attn.k", "attn.v"), transposed=True, within=(PAIRED, PAIRED, None)),
        "mlp.w_gate_up": Matrix(("mlp.gate_up",), alternate=5),
        "moe.experts.w_gate_up": Matrix(("experts.gate_up_proj",), transposed=True, alternate=1, weight=""),
        "moe.experts.w_down": Matrix(("experts.down_proj",), weight=""),
    },
    vectors=PLAIN.vectors,
    ends=PLAIN.ends,
)


def write(out: Path, weights: InMemory, table: WeightTable, *, shard_bytes: int = 1 << 30) -> int:
    tensors = out_tensors(table, weights, None)
    return write_folder(out, weights, tensors, config={"model_type": "x"}, others={}, shard_bytes=shard_bytes)


def values_of(table) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {name: torch.randn(ours.shape, generator=generator) for name, ours in table.ours.items()}


@pytest.mark.parametrize("names", [PLAIN, ODD], ids=["plain", "odd"])
def test_every_tensor_comes_back_to_the_bit(names: Names, tmp_path: Path) -> None:
    table = weight_table(SPEC.facts, names)
    values = values_of(table)
    out = tmp_path / "out"
    written = write(out, InMemory(values), table, shard_bytes=1500)
    assert written == sum(value.numel() * 4 for value in values.values())
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == written
    with open_hf_folder(out) as folder:
        weights = HfWeights(folder, table)
        for name, value in values.items():
            assert torch.equal(weights.read(name), value), name


@pytest.mark.parametrize("names", [PLAIN, ODD], ids=["plain", "odd"])
def test_any_rectangle_is_what_the_whole_has_there(
    names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaspec.hf.stored.SLAB_BYTES", 100)
    table = weight_table(SPEC.facts, names)
    values = values_of(table)
    out = tmp_path / "out"
    write(out, InMemory(values), table)
    drawn = np.random.default_rng(5)
    with open_hf_folder(out) as folder:
        weights = HfWeights(folder, table)
        for name, value in values.items():
            for _ in range(6):
                start = [int(drawn.integers(0, size)) for size in value.shape]
                shape = [int(drawn.integers(1, size - at + 1)) for at, size in zip(start, value.shape, strict=True)]
                slices = tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))
                assert torch.equal(weights.read(name, start, shape), value[slices]), (name, start, shape)


def test_forms_mean_what_they_are_called(tmp_path: Path) -> None:
    """The odd forms against what the words say, written out."""
    table = weight_table(SPEC.facts, ODD)
    values = values_of(table)
    theirs = {name: their_tensor(tensor, InMemory(values), torch.float32) for name, tensor in table.theirs.items()}
    experts = values["model/layers.1.moe.experts.w_gate_up.weight"].view(3, 2, 5, 8)
    fused = theirs["h.1.experts.gate_up_proj"]
    assert fused.shape == (3, 8, 10)
    assert torch.equal(fused[:, :, 0::2], experts[:, 0].mT)
    assert torch.equal(fused[:, :, 1::2], experts[:, 1].mT)
    queries = values["model/layers.0.attn.wqkv.weight"][:24].view(4, 6, 8)
    stored = theirs["h.0.attn.q.weight"].T.reshape(4, 6, 8)
    # of six features the first four turn: pairs (0, 2) and (1, 3) lie side by side there
    assert torch.equal(stored, queries[:, [0, 2, 1, 3, 4, 5]])
    gate_up = values["model/layers.0.mlp.w_gate_up.weight"].view(2, 2, 5, 8)
    in_turn = theirs["h.0.mlp.gate_up.weight"].view(2, 2, 5, 8)
    assert torch.equal(in_turn, gate_up.transpose(0, 1))


def test_a_map_that_is_no_bijection_is_found() -> None:
    blocks = (Block("a", 3), Block("a", 3, first=2))
    with pytest.raises(RecipeError, match="of no tensor of ours, or of several"):
        their_tensors({"x": TensorMap("x", (6, 2), blocks)}, {"a": (6, 2)})
    with pytest.raises(RecipeError, match="rows 3 to 6"):
        their_tensors({"x": TensorMap("x", (4, 2), (Block("a", 4, first=3),))}, {"a": (6, 2)})
    with pytest.raises(RecipeError, match="can't hold rows"):
        their_tensors({"x": TensorMap("x", (4, 2), (Block("a", 4),))}, {"a": (4, 3)})
    with pytest.raises(RecipeError, match=r"experts \[1\]"):
        their_tensors({"x": TensorMap("x", (4, 2), (Block("a", 4, expert=0),))}, {"a": (2, 4, 2)})


def folder_of(path: Path, names: Names) -> dict[str, torch.Tensor]:
    table = weight_table(SPEC.facts, names)
    write(path, InMemory(values_of(table)), table)
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "model.norm.weight is missing: this model's configuration needs it, of shape [8]"),
        ("left over", "model.extra.weight is left over"),
        ("shape", "model.norm.weight has shape [9], the configuration makes it [8]"),
        ("whole numbers", "model.norm.weight has dtype I64, weights are floating-point numbers"),
    ],
)
def test_what_does_not_fit_is_named(change: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    tensors = folder_of(path, PLAIN)
    if change == "missing":
        del tensors["model.norm.weight"]
    if change == "left over":
        tensors["model.extra.weight"] = torch.zeros(2)
    if change == "shape":
        tensors["model.norm.weight"] = torch.zeros(9)
    if change == "whole numbers":
        tensors["model.norm.weight"] = torch.zeros(8, dtype=torch.int64)
    save_file(tensors, path / "model.safetensors")
    with open_hf_folder(path) as folder, pytest.raises(CheckpointError) as caught:
        HfWeights(folder, weight_table(SPEC.facts, PLAIN))
    assert message in str(caught.value)


def test_a_tied_head_must_be_the_embedding(tmp_path: Path) -> None:
    path = tmp_path / "model"
    tensors = folder_of(path, PLAIN)
    copies = {"lm_head.weight": "model.embed_tokens.weight"}
    assert weight_table(SPEC.facts, PLAIN).copies == copies
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors")
    with open_hf_folder(path) as folder:
        HfWeights(folder, weight_table(SPEC.facts, PLAIN))
    tensors["lm_head.weight"][3, 3] += 1
    save_file(tensors, path / "model.safetensors")
    with open_hf_folder(path) as folder, pytest.raises(CheckpointError, match="tie_word_embeddings=true"):
        HfWeights(folder, weight_table(SPEC.facts, PLAIN))


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    table = weight_table(SPEC.facts, PLAIN)

    class Failing(InMemory):
        def read(self, name, start=None, shape=None):
            if name == "model/norm.weight":
                raise OSError(28, "No space left on device")
            return super().read(name, start, shape)

    with pytest.raises(WriteError, match="No space left"):
        write(tmp_path / "out", Failing(values_of(table)), table, shard_bytes=2000)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    with pytest.raises(WriteError, match="exists"):
        write(tmp_path / "out", InMemory(values_of(table)), table)
