"""How Llama's parameters may be split."""

from megaspec.core.placement import Row
from megaspec.model.llama.spec import LlamaSpec


def placement(spec: LlamaSpec) -> tuple[Row, ...]:
    """One row for each kind of module that has parameters or acts on each token."""
    return (
        Row("embed", "vocab"),
        Row("embed_dropout", "sequence"),
        Row("layers.*.norm1", "sequence"),
        Row("layers.*.attn.wqkv", "columns", heads_per_part=(spec.n_heads, spec.n_kv_heads, spec.n_kv_heads)),
        Row("layers.*.attn.wo", "rows"),
        Row("layers.*.attn.dropout", "sequence"),
        Row("layers.*.norm2", "sequence"),
        Row("layers.*.mlp.w_gate_up", "columns"),
        Row("layers.*.mlp.w_down", "rows"),
        Row("layers.*.mlp.dropout", "sequence"),
        Row("norm", "sequence"),
        Row("head", "vocab"),
    )
