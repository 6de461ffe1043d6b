"""torch's flex_attention on a CPU, with gradients and with a mask read by blocks, as its kernels on a GPU read it.

On a CPU torch has no backward pass of it, and asks mask_mod alone what a query sees. Here a block of the mask that is
told whole is seen whole, of one that is told in part what mask_mod says, and of any other nothing.
"""

# B sequences, T tokens, N query heads, K key and value heads, H head size; I blocks of queries, J blocks of keys

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask


def flex_attention(
    q_BNTH: Tensor,
    k_BKTH: Tensor,
    v_BKTH: Tensor,
    *,
    score_mod: Callable[..., Tensor] | None,
    block_mask: BlockMask,
    scale: float,
    enable_gqa: bool,
    return_aux: AuxRequest,
    kernel_options: dict[str, bool] | None = None,
) -> tuple[Tensor, AuxOutput]:
    """-> [B, N, T, H], and the log-sum-exp [B, N, T] where it is asked for."""
    B, N, T, _ = q_BNTH.shape
    assert enable_gqa or k_BKTH.shape[1] == N, f"{N} query heads on {k_BKTH.shape[1]} without enable_gqa"
    assert block_mask.seq_lengths == (T, T), f"a mask of {block_mask.seq_lengths} for {T} tokens"
    groups = N // k_BKTH.shape[1]
    k_BNTH = k_BKTH.repeat_interleave(groups, dim=1)
    v_BNTH = v_BKTH.repeat_interleave(groups, dim=1)
    wide = torch.promote_types(q_BNTH.dtype, torch.float32)
    scores_BNTT = q_BNTH.to(wide) @ k_BNTH.to(wide).transpose(2, 3) * scale
    # what mask_mod and score_mod are asked of, one dimension each
    b = torch.arange(B).view(B, 1, 1, 1)
    h = torch.arange(N).view(N, 1, 1)
    queries = torch.arange(T).view(T, 1)
    keys = torch.arange(T)
    if score_mod is not None:
        scores_BNTT = score_mod(scores_BNTT, b, h, queries, keys)
    in_part_BIJ = _times_told(block_mask.kv_num_blocks, block_mask.kv_indices)
    whole_BIJ = _times_told(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    # a kernel would add it as often as it is told of it
    assert int((in_part_BIJ + whole_BIJ).max()) == 1, "a block of the mask is told twice"
    may_see = _of_tokens(in_part_BIJ, block_mask.BLOCK_SIZE, T) & block_mask.mask_mod(b, h, queries, keys)
    may_see = may_see | _of_tokens(whole_BIJ, block_mask.BLOCK_SIZE, T)
    scores_BNTT = scores_BNTT.masked_fill(~may_see, float("-inf"))
    out_BNTH = scores_BNTT.softmax(dim=3).to(v_BNTH.dtype) @ v_BNTH
    lse_BNT = scores_BNTT.logsumexp(dim=3) if return_aux.lse else None
    return out_BNTH, AuxOutput(lse=lse_BNT)


def _times_told(count_BI: Tensor, indices_BIJ: Tensor) -> Tensor:
    """[B, 1, I], [B, 1, I, J] -> [B, 1, I, J]: how often a row's list names each block. Behind its end anything may
    stand."""
    is_in_list = torch.arange(indices_BIJ.shape[3]) < count_BI[..., None]
    times_BIJ = torch.zeros_like(indices_BIJ)
    return times_BIJ.scatter_add(3, indices_BIJ.to(torch.int64), is_in_list.to(times_BIJ.dtype))


def _of_tokens(times_BIJ: Tensor, block: tuple[int, int], T: int) -> Tensor:
    """[B, 1, I, J] -> bool [B, 1, T, T]"""
    by_query = (times_BIJ > 0).repeat_interleave(block[0], dim=2)
    return by_query.repeat_interleave(block[1], dim=3)[:, :, :T, :T]
