"""Megatron-core with Transformer Engine on random or packed tokens, on one GPU: one JSON line.

PYTHONPATH=.:MCORE:TE python tests/benchmarks/peers/mcore_rows.py --model llama8b16 --accum 4 --fp8 delayed
... --model llama8b16 --accum 4 --documents 1024

Parameters in bf16, master weights, moments and gradients in fp32 (DDP with the distributed optimizer), weight gradients
accumulated in the products. Packed rows are tests/benchmarks/packed_rows.py's, as one `thd` sequence of all rows of a
micro batch: no token is padding. Written for megatron-core 0.19 and Transformer Engine 2.20.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import statistics
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

# NCCL and the allocator read these when they start: before torch is imported.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch

from megaspec.profiling.power import Meter
from tests.benchmarks.packed_rows import packed_rows

POOL = 8
SEED = 7


@dataclass(frozen=True)
class Shape:
    """A model, as bench_train.py names it."""

    layers: int
    d_model: int
    heads: int
    kv_heads: int
    d_head: int
    d_ffn: int
    vocab: int
    rope_base: float
    tied: bool = False
    experts: int | None = None
    top_k: int | None = None
    d_expert: int | None = None


def llama8b(layers: int) -> Shape:
    """Layers of Llama-3-8B."""
    return Shape(layers, 4096, 32, 8, 128, 14336, 128256, 5e5)


SHAPES = {
    "llama1b": Shape(16, 2048, 32, 8, 64, 8192, 128256, 5e5, tied=True),
    "llama8b16": llama8b(16),
    "llama8b8": llama8b(8),
    "gptoss6": Shape(6, 2880, 64, 8, 64, 2880, 201088, 1.5e5, experts=32, top_k=4, d_expert=2880),
}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama1b", choices=SHAPES)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--mbs", type=int, default=1)
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--documents", type=int, default=0, help="tokens of a document on average; 0: no documents")
    parser.add_argument("--fp8", default="none", choices=["none", "tensorwise", "delayed", "blockwise"])
    parser.add_argument("--amax-history", type=int, default=1, help="steps of it that delayed scaling looks at")
    parser.add_argument("--te-activation", action="store_true", help="SwiGLU by Transformer Engine's kernel")
    parser.add_argument("--attention", default="auto", choices=["auto", "fused", "flash"])
    parser.add_argument("--cuda-graph", default="none", choices=["none", "local", "transformer_engine"])
    return parser


@dataclass(frozen=True)
class MicroBatch:
    """What the model takes. Of packed rows all of them as one."""

    tokens: torch.Tensor
    """int64 [mbs, seq], packed [1, mbs · seq]"""
    labels: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor | None = None
    """int32 [documents + 1], packed: `cu_seqlens`."""
    longest: int = 0
    """A bound on the tokens of a document, a power of two: so that kernels are planned once for many rows."""


def micro_batches(args: argparse.Namespace, vocab: int, device: torch.device) -> list[MicroBatch]:
    """The tokens that bench_train.py trains on, POOL micro batches in turn."""
    if args.documents:
        return packed_batches(args, vocab, device)
    generator = torch.Generator(device=device).manual_seed(SEED)
    positions = torch.arange(args.seq, device=device).expand(args.mbs, -1).contiguous()
    made = []
    for _ in range(POOL):
        tokens = torch.randint(0, vocab, (args.mbs, args.seq + 1), device=device, generator=generator)
        made.append(MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions))
    return made


def packed_batches(args: argparse.Namespace, vocab: int, device: torch.device) -> list[MicroBatch]:
    """The same with documents."""
    rows = packed_rows(mean=args.documents, rows=POOL * args.mbs, seq_len=args.seq, vocab_size=vocab, seed=SEED)
    made = []
    for first in range(0, len(rows), args.mbs):
        tokens = []
        labels = []
        lengths = []
        for row in rows[first : first + args.mbs]:
            whole = torch.from_numpy(row.tokens)
            tokens.append(whole[:-1])
            labels.append(whole[1:])
            lengths += row.lengths
        positions = torch.cat([torch.arange(length) for length in lengths])
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        longest = 1 << (max(lengths) - 1).bit_length()
        tensors = [one[None].to(device) for one in (torch.cat(tokens), torch.cat(labels), positions)]
        made.append(MicroBatch(*tensors, starts.to(device), longest))
    return made


def load_stub() -> None:
    """Transformer Engine 2.20 names a function of cuBLASLt that CUDA 13.0's has not. A build of it may carry a library
    that stands in for that one, and has to be loaded before it."""
    found = importlib.util.find_spec("transformer_engine")
    if found is None or found.origin is None:
        raise SystemExit("transformer_engine is not on PYTHONPATH")
    stub = Path(found.origin).parent / "wheel_lib" / "te_cublas_stub.so"
    if not stub.exists():
        return
    try:
        # torch has loaded it
        has_function = hasattr(ctypes.CDLL("libcublasLt.so.13"), "cublasLtGroupedMatrixLayoutInit_internal")
    except OSError:
        has_function = False
    if not has_function:
        ctypes.CDLL(str(stub), mode=ctypes.RTLD_GLOBAL)


def add_head_gradients_in_the_product() -> None:
    """Megatron-core's output head asks for APEX's kernel to accumulate its weight gradient, for which Transformer
    Engine's product stands in."""
    module = types.ModuleType("fused_weight_gradient_mlp_cuda")

    def accumulate(x: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        general_gemm(x, grad, out_dtype=main_grad.dtype, layout="NT", out=main_grad, accumulate=True, grad=True)

    module.wgrad_gemm_accum_fp32 = accumulate
    module.wgrad_gemm_accum_fp16 = accumulate
    sys.modules[module.__name__] = module


def config_of(args: argparse.Namespace, shape: Shape) -> Any:
    """The model's configuration, with all of Megatron-core's fusions."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend

    more: dict[str, Any] = {}
    if shape.experts is not None:
        more |= {
            "num_moe_experts": shape.experts,
            "moe_router_topk": shape.top_k,
            "moe_ffn_hidden_size": shape.d_expert,
            "moe_grouped_gemm": True,
            "moe_aux_loss_coeff": 0.0,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "moe_permute_fusion": True,
            # as ours is measured: every expert gets as many tokens as any other
            "moe_router_force_load_balancing": True,
            "moe_router_dtype": "fp32",
        }
    if args.fp8 != "none":
        more |= {
            "fp8": "e4m3" if args.fp8 == "blockwise" else "hybrid",
            "fp8_recipe": args.fp8,
            "fp8_param": False,
            "fp8_amax_history_len": args.amax_history,
            "fp8_amax_compute_algo": "most_recent" if args.amax_history == 1 else "max",
        }
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.d_model,
        ffn_hidden_size=shape.d_ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.d_head,
        normalization="RMSNorm",
        layernorm_epsilon=1e-5,
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        autocast_dtype=torch.bfloat16,
        # Transformer Engine's own kernel is fused
        bias_activation_fusion=not args.te_activation,
        use_te_activation_func=args.te_activation,
        bias_dropout_fusion=True,
        masked_softmax_fusion=True,
        apply_rope_fusion=True,
        persist_layer_norm=True,
        gradient_accumulation_fusion=True,
        cross_entropy_loss_fusion=True,
        cross_entropy_fusion_impl="te",
        attention_softmax_in_fp32=False,
        init_method_std=0.02,
        attention_backend=AttnBackend[args.attention],
        cuda_graph_impl=args.cuda_graph,
        use_te_rng_tracker=args.cuda_graph != "none",
        **more,
    )


def build(args: argparse.Namespace, shape: Shape, device: torch.device) -> tuple[Any, Any]:
    """-> the model under DDP, and its optimizer."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234)
    config = config_of(args, shape)
    layers = get_gpt_layer_with_transformer_engine_spec(
        num_experts=shape.experts,
        moe_grouped_gemm=shape.experts is not None,
        use_te_activation_func=args.te_activation,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=shape.vocab,
        max_sequence_length=args.seq,
        position_embedding_type="rope",
        rotary_base=int(shape.rope_base),
        share_embeddings_and_output_weights=shape.tied,
    )
    model = model.to(torch.bfloat16).to(device)
    reduction = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, check_for_nan_in_grad=False
    )
    model = DistributedDataParallel(config, reduction, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            min_lr=1e-4,
            weight_decay=0.1,
            adam_beta1=0.9,
            adam_beta2=0.95,
            adam_eps=1e-8,
            clip_grad=1.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
        ),
        [model],
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return model, optimizer


def packed(batch: MicroBatch) -> Any:
    """What Megatron-core's layers take of documents; None without."""
    if batch.starts is None:
        return None
    from megatron.core.packed_seq_params import PackedSeqParams

    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.starts,
        cu_seqlens_kv=batch.starts,
        max_seqlen_q=batch.longest,
        max_seqlen_kv=batch.longest,
        # said, so that nobody has to look
        pad_between_seqs=False,
    )


def stepper(
    args: argparse.Namespace, model: Any, optimizer: Any, batches: list[MicroBatch]
) -> Callable[[], torch.Tensor]:
    """-> what trains one step, and gives its loss, on the device."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    forward_backward = get_forward_backward_func()

    def in_turn() -> Iterator[MicroBatch]:
        while True:
            yield from batches

    source = in_turn()

    def forward(_: Any, module: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch = next(source)
        losses = module(batch.tokens, batch.positions, None, labels=batch.labels, packed_seq_params=packed(batch))

        def mean(of_tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = of_tokens.float().mean()
            # Megatron divides the loss by the number of micro batches in place
            return loss, {"loss": loss.detach().clone()}

        return losses, mean

    def step() -> torch.Tensor:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        of_batches = forward_backward(
            forward_step_func=forward,
            data_iterator=None,
            model=[model],
            num_microbatches=args.accum,
            seq_length=args.seq,
            micro_batch_size=args.mbs,
            forward_only=False,
        )
        optimizer.step()
        return torch.stack([one["loss"] for one in of_batches]).mean()

    return step


def main() -> None:
    args = parser().parse_args()
    shape = SHAPES[args.model]
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29511")):
        os.environ.setdefault(name, value)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl", device_id=device)
    load_stub()
    add_head_gradients_in_the_product()
    import megatron.core
    import transformer_engine

    model, optimizer = build(args, shape, device)
    step = stepper(args, model, optimizer, micro_batches(args, shape.vocab, device))
    losses = [float(step()) for _ in range(args.warmup)]
    torch.cuda.reset_peak_memory_stats()
    # as ours: nobody waits between two steps but who must
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(args.steps + 1)]
    of_steps = []
    with Meter(f"GPU-{torch.cuda.get_device_properties(device).uuid}") as meter:
        marks[0].record()
        for mark in marks[1:]:
            of_steps.append(step())
            mark.record()
        torch.cuda.synchronize()
    losses += [float(loss) for loss in of_steps]
    # milliseconds
    times = [first.elapsed_time(last) / 1e3 for first, last in pairwise(marks)]
    tokens = args.seq * args.mbs * args.accum
    median = statistics.median(times)
    line = {
        "peer": f"megatron-core {megatron.core.__version__}, transformer-engine {transformer_engine.__version__}",
        **vars(args),
        "gpus": 1,
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "step_ms": round(median * 1e3, 2),
        "step_ms_min": round(min(times) * 1e3, 2),
        "tokens_per_s_gpu": round(tokens / median, 1),
        # rows are packed without padding
        "padding": 0,
        "max_memory_allocated": torch.cuda.max_memory_allocated(),
        "loss_first": round(losses[0], 4),
        "loss_last": round(losses[-1], 4),
        "clock": vars(meter.found()),
    }
    print(json.dumps(line), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
