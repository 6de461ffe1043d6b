"""Attention heads of one rank, among tensor- and context-parallel ranks."""

from math import ceil

from megaspec.parallelism.spec import ParallelismSpec


def local_kv_heads(n_kv_heads: int, *, tp: int) -> int:
    """Key and value heads of one rank: with more ranks than heads several ranks hold the same one."""
    return ceil(n_kv_heads / tp)


def whole_sequence_heads(n_heads: int, n_kv_heads: int, *, parallelism: ParallelismSpec) -> tuple[int, int] | None:
    """Query heads, and key and value heads, with which a rank attends over whole sequences in one call of the kernel.
    None: it attends block by block, to the parts of sequences that context-parallel ranks have."""
    tp, cp, kind = parallelism.tp, parallelism.cp, parallelism.context.kind
    if cp > 1 and kind != "all_to_all":
        return None
    return ceil(ceil(n_heads / tp) / cp), ceil(local_kv_heads(n_kv_heads, tp=tp) / cp)
