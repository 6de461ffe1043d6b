"""How GPT-2's parameters may be split."""

from megaspec.core.placement import Row
from megaspec.model.gpt.spec import GptSpec


def placement(spec: GptSpec) -> tuple[Row, ...]:
    """One row for each kind of module that has parameters or acts on each token."""
    return (
        Row("embed", "vocab"),
        Row("positions", "sequence"),
        Row("embed_dropout", "sequence"),
        Row("layers.*.norm1", "sequence"),
        Row("layers.*.attn.wqkv", "columns", heads_per_part=(spec.n_heads, spec.n_kv_heads, spec.n_kv_heads)),
        Row("layers.*.attn.wo", "rows"),
        Row("layers.*.attn.dropout", "sequence"),
        Row("layers.*.norm2", "sequence"),
        Row("layers.*.mlp.w_up", "columns"),
        Row("layers.*.mlp.w_down", "rows"),
        Row("layers.*.mlp.dropout", "sequence"),
        Row("norm", "sequence"),
        Row("head", "vocab"),
    )
