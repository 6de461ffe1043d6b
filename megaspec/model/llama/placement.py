"""How Llama's parameters may be split."""

from megaspec.core.placement import Row
from megaspec.model.llama.spec import LlamaSpec


def placement(spec: LlamaSpec) -> tuple[Row, ...]:
    """One row for each kind of module that has parameters or acts on each token."""
    with_experts = spec.moe.in_layers(spec.n_layers) if spec.moe else (False,)
    return (
        Row("embed", "vocab"),
        Row("embed_dropout", "sequence"),
        Row("layers.*.norm1", "sequence"),
        Row("layers.*.attn.wqkv", "columns", heads_per_part=(spec.n_heads, spec.n_kv_heads, spec.n_kv_heads)),
        *((Row("layers.*.attn.q_norm", "heads"), Row("layers.*.attn.k_norm", "heads")) if spec.qk_norm else ()),
        Row("layers.*.attn.wo", "rows"),
        Row("layers.*.attn.dropout", "sequence"),
        Row("layers.*.norm2", "sequence"),
        *(() if all(with_experts) else _mlp()),
        *(_moe(spec) if any(with_experts) else ()),
        Row("norm", "sequence"),
        Row("head", "vocab"),
    )


def _mlp() -> tuple[Row, ...]:
    return (
        Row("layers.*.mlp.w_gate_up", "columns"),
        Row("layers.*.mlp.w_down", "rows"),
        Row("layers.*.mlp.dropout", "sequence"),
    )


def _moe(spec: LlamaSpec) -> tuple[Row, ...]:
    rows = (
        Row("layers.*.moe.router", "sequence"),
        Row("layers.*.moe.experts.w_gate_up", "expert_columns"),
        Row("layers.*.moe.experts.w_down", "expert_rows"),
        Row("layers.*.moe.dropout", "sequence"),
    )
    if spec.moe.d_shared:
        rows += (Row("layers.*.moe.shared.w_gate_up", "columns"), Row("layers.*.moe.shared.w_down", "rows"))
    if spec.moe.shared_gate:
        rows += (Row("layers.*.moe.shared_gate", "sequence"),)
    return rows
