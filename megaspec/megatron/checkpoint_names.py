"""Which rows of which tensors of Megatron's a tensor of ours is made of. Torch-free.

Names on Megatron's side are those of the whole model: `decoder.layers.{n}.` with the number in the model, experts as
`mlp.experts.{e}.`, norms apart from the products that Transformer Engine fuses them with. Whoever opens a checkpoint
(legacy_checkpoint.py, dist_checkpoint.py) says its tensors by them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from megaspec.core.part_facts import Linear
from megaspec.hf.blocks import Block, TensorMap, TheirTensor, their_tensors
from megaspec.model.decoder.spec import DecoderSpec

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
VOCABULARY = (EMBEDDING, HEAD)
"""Padded to a multiple of tp's size: rows behind the vocabulary are left out."""
_ENDS = {
    "embed": "embedding.word_embeddings",
    "positions": "embedding.position_embeddings",
    "norm": "decoder.final_layernorm",
    "head": "output_layer",
}
_PRODUCTS = {
    "attn.wqkv": "self_attention.linear_qkv",
    "attn.wo": "self_attention.linear_proj",
    "mlp.w_gate_up": "mlp.linear_fc1",
    "mlp.w_up": "mlp.linear_fc1",
    "mlp.w_down": "mlp.linear_fc2",
    "moe.router": "mlp.router",
    "moe.experts.w_gate_up": "mlp.experts.{e}.linear_fc1",
    "moe.experts.w_up": "mlp.experts.{e}.linear_fc1",
    "moe.experts.w_down": "mlp.experts.{e}.linear_fc2",
    "moe.shared.w_gate_up": "mlp.shared_experts.linear_fc1",
    "moe.shared.w_up": "mlp.shared_experts.linear_fc1",
    "moe.shared.w_down": "mlp.shared_experts.linear_fc2",
}
_SHARED_GATE = "mlp.shared_experts.gate_weight"
_VECTORS = {
    "norm1": "input_layernorm",
    "norm2": "pre_mlp_layernorm",
    "attn.q_norm": "self_attention.q_layernorm",
    "attn.k_norm": "self_attention.k_layernorm",
    "moe.router": "mlp.router",
}


@dataclass(frozen=True)
class MegatronTable:
    """Every tensor of a model, ours and Megatron's."""

    ours: Mapping[str, TensorMap]
    """By the name under which a checkpoint of ours keeps it."""
    theirs: Mapping[str, TheirTensor]
    is_tied: bool
    """The output head is the embedding, of which the last stage may have a copy."""


def megatron_table(spec: DecoderSpec) -> MegatronTable:
    """The map between the tensors of a model and Megatron's. Latent attention has none (saved_args.py refuses it)."""
    assert spec.attention.kind == "gqa", f"no names for attention.kind={spec.attention.kind}"
    making = _Making(spec)
    facts = spec.facts
    for table in facts.tables():
        if facts.is_tied and table is facts.head_table:
            continue
        making.add(f"model/{table.name}.weight", (table.rows, table.width), f"{_ENDS[table.name]}.weight")
    for name, linear in facts.linears():
        making.add_product(name, linear)
    for name, vector in facts.vectors():
        module, _, last = name.rpartition(".")
        stored = f"model/{name}" if vector.is_trained else f"router/{name}"
        making.add(stored, (vector.size,), f"{_vector_name(module)}.{last}")
    return MegatronTable(making.maps, their_tensors(making.maps, making.shapes), facts.is_tied)


def _split(name: str) -> tuple[str, str]:
    """`layers.3.attn.wqkv` -> Megatron's prefix of the layer, and the name in it."""
    _, number, local = name.split(".", 2)
    return f"decoder.layers.{number}.", local


def _vector_name(module: str) -> str:
    if not module.startswith("layers."):
        return _ENDS[module]
    prefix, local = _split(module)
    return prefix + _VECTORS[local]


class _Making:
    """Maps and shapes while they are made."""

    def __init__(self, spec: DecoderSpec):
        self.maps: dict[str, TensorMap] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._spec = spec

    def add(self, stored: str, shape: tuple[int, ...], theirs: str) -> None:
        """A tensor that is one of theirs as it is."""
        self.shapes[theirs] = shape
        self.maps[stored] = TensorMap(stored, shape, (Block(theirs, shape[0]),))

    def add_product(self, name: str, linear: Linear) -> None:
        """A weight, and its bias where there is one."""
        prefix, local = _split(name)
        width = linear.inputs.whole
        if local == "moe.shared_gate":
            # one row, without a module around it
            self.add(f"model/{name}.weight", (1, width), prefix + _SHARED_GATE)
            return
        theirs = prefix + _PRODUCTS[local]
        self._add_rows(f"model/{name}.weight", linear, f"{theirs}.weight", (width,))
        if linear.bias:
            self._add_rows(f"model/{name}.bias", linear, f"{theirs}.bias", ())

    def _add_rows(self, stored: str, linear: Linear, theirs: str, columns: tuple[int, ...]) -> None:
        blocks: list[Block] = []
        for expert in range(linear.n_experts):
            name = theirs.replace("{e}", str(expert))
            self.shapes[name] = (linear.columns, *columns)
            if stored.rpartition(".")[0].endswith(".attn.wqkv"):
                blocks += self._heads(name)
            else:
                # gate above up there as here
                blocks.append(Block(name, linear.columns))
        self.maps[stored] = TensorMap(stored, (linear.n_experts * linear.columns, *columns), tuple(blocks))

    def _heads(self, name: str) -> list[Block]:
        """Queries, keys and values: there, the queries of a group of heads stand before its key and its value."""
        spec = self._spec
        queries = spec.n_heads // spec.n_kv_heads * spec.d_head
        stride = queries + 2 * spec.d_head
        rows = spec.n_kv_heads * spec.d_head
        return [
            Block(name, spec.n_heads * spec.d_head, group=queries, stride=stride),
            Block(name, rows, first=queries, group=spec.d_head, stride=stride),
            Block(name, rows, first=queries + spec.d_head, group=spec.d_head, stride=stride),
        ]
