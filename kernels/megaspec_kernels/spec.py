"""Which implementation each operation uses."""

from typing import Literal

from megaspec.core.frozen import Auto, Frozen


class KernelsSpec(Frozen):
    """One implementation per operation; `auto` is decided from the target before the run starts (see catalog.py)."""

    attention: Auto[
        Literal["sdpa", "flex", "cudnn", "flash_attn", "flash_attn_3", "flash_attn_2", "te", "reference"]
    ] = "auto"
    """Core attention.

    sdpa: torch's fused attention, cuDNN first on CUDA; windows, chunks and documents go through FlashAttention-2
    with lengths in bf16 and fp16; in fp32 they are masks, which cost what they hide. flex: torch's flex_attention,
    which leaves out what they hide and can cap scores; blocks of sequences that lie on several ranks go through
    sdpa, and so do layers with nothing of that but for train.deterministic=true. cudnn: cuDNN's kernels for
    documents and windows, of the package nvidia-cudnn-frontend; all else as sdpa. flash_attn: FlashAttention-4, of
    the package flash-attn-4; flash_attn_3 and flash_attn_2: the versions before it, where they are installed. te:
    cuDNN's through the package transformer-engine, also in one order; blocks go through sdpa. reference: plain
    matrix products, the only one with attention dropout. auto on CUDA: the fastest that was measured for the use;
    where nothing was, flex where a layer hides or caps something, else sdpa."""
    attention_merge: Auto[Literal["triton", "reference"]] = "auto"
    """How context-parallel ranks put attention over parts of a sequence together, and sum its gradients.

    triton: in place, each number read once. reference: plain."""
    cross_entropy: Auto[Literal["triton", "chunked", "reference"]] = "auto"
    """Output head and loss.

    chunked: in a few big pieces, the gradient computed with the loss, logits never held whole. triton: the same with
    fused softmax kernels. reference: plain."""
    linear: Auto[Literal["torch", "te", "reference"]] = "auto"
    """The three products of linear layers: of layers alone, not of the head, of routers and of experts.

    torch: torch's, and in fp8 those of fp8_cast and scaled_product. te: Transformer Engine's, in fp8 with its casts and
    scales; weight gradients are added inside the product; needs the extra `te`. reference: plain; in fp8 as with
    torch. precision.recipe=mxfp8 and nvfp4 have casts and products of their own: te's on GPUs, where auto takes it, and
    plain ones."""
    grouped: Auto[Literal["torch", "reference"]] = "auto"
    """Products of tokens with the matrices of their experts.

    torch: torch's grouped matrix product, one kernel for all experts. reference: one product an expert, for which the
    host waits for the number of its tokens."""
    unpermute: Auto[Literal["triton", "reference"]] = "auto"
    """The sum over each token's experts.

    triton: one kernel that reads each row once. reference: a copy of the rows in the order of the tokens, then sums."""
    norm: Auto[Literal["reference", "triton", "te"]] = "auto"
    """Norms of the residual stream and of what is added to it; those of heads are plain operations.

    reference: plain, which `compile` puts into one kernel with what is around it. triton: one kernel for the sum before
    a norm and the norm, and one for both of their gradients. te: Transformer Engine's kernels, the sum before a norm
    apart; needs the extra `te`."""
    gated: Auto[Literal["reference", "triton"]] = "auto"
    """What gated feed-forward layers compute between their products, experts' included.

    triton: one kernel for each direction, which keeps its input alone. reference: plain, which `compile` puts into one
    kernel."""
    rope: Auto[Literal["reference", "triton"]] = "auto"
    """Rotary positions of queries and keys, where nothing stands between them and their product with the values.

    reference: plain, which `compile` puts into one kernel. triton: one kernel for each direction, backward with the
    gradient of the values."""
    fp8_cast: Auto[Literal["triton", "reference"]] = "auto"
    """Quantising to fp8, of precision=fp8; with linear=te, mxfp8 and nvfp4 auto, since they have their own.

    triton: one pass writes both layouts, behind one for the largest elements where scales are neither known before
    (delayed) nor those of 128 elements of a line, which the same pass finds. reference: plain."""
    scaled_product: Auto[Literal["cublaslt", "torch", "reference"]] = "auto"
    """Products of fp8 matrices, of precision=fp8; with linear=te, mxfp8 and nvfp4 auto, since they have their own.

    cublaslt: cuBLASLt itself, which sums weight gradients inside the product; rowwise and blockwise on Hopper, from
    version 12.9 on. torch: torch's scaled matrix product, on tensor cores; blockwise on Hopper. reference: dequantised
    and multiplied in at least fp32, which is exact but for its sums, and no faster than that."""
    scaled_grouped: Auto[Literal["torch", "reference"]] = "auto"
    """Products of fp8 tokens with the fp8 matrices of their experts, of precision=fp8.

    torch: torch's scaled grouped product, one kernel for all experts, on Hopper. reference: dequantised, one product an
    expert; auto takes it on CPUs alone."""
    adamw: Auto[Literal["torch", "triton", "reference"]] = "auto"
    """AdamW's update, also of what Muon leaves to it. On CPUs (parallelism.offload.optimizer) the best that runs there.

    triton: one kernel, which also scales gradients and writes weights, with states in any of optim.formats. torch:
    torch's fused kernel, for states in 32 bits. reference: plain."""
    compile: Auto[Literal["block", "none"]] = "auto"
    """torch.compile of each transformer block. auto: block on CUDA."""
