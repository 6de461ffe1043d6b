"""Megatron-core with Transformer Engine on random or packed tokens: one JSON line.

PYTHONPATH=.:MCORE:TE python tests/benchmarks/peers/mcore_rows.py --model llama8b16 --accum 4 --fp8 delayed
... --model llama8b16 --accum 4 --documents 1024
PYTHONPATH=.:MCORE:TE torchrun --nproc-per-node 4 tests/benchmarks/peers/mcore_rows.py --model llama8b --accum 8 --pp 4

Parameters in bf16, master weights, moments and gradients in fp32 (DDP with the distributed optimizer), weight gradients
accumulated in the products. Packed rows are tests/benchmarks/packed_rows.py's, as one `thd` sequence of all rows of a
micro batch: no token is padding. Written for megatron-core 0.19 and Transformer Engine 2.20.

How stages send to each other
-----------------------------
Megatron-core has two ways. Batched (`--p2p batched`, its default) all messages of a moment are one NCCL group on the
communicator of the whole pipeline, and the GPU is waited for behind each; 1F1B has no other. Overlapped (`--p2p
overlapped`, what Megatron-LM takes for interleaved schedules) each message is a call of its own. On a process group
that is bound to a device such calls go one after the other on the pipeline's one communicator; on one that is not,
torch makes a communicator for each pair of ranks when the pair first sends. Megatron-LM's own test of pp 4 with two
chunks hung there, in nine runs of nine (NVIDIA/Megatron-LM#5240), which is put down to that: who makes a communicator
waits for the other rank and for the GPU, while GPUs wait for messages. The order of messages is likely not it: as four
ranks of a CPU post them, with two and four chunks, they end with one queue a rank and with one a pair. So overlapped
messages get a process group that is bound to no device, and pairs of stages send once, in one order, before the first
step (`connect_stages`): a precaution that NCCL has not been asked about yet.
"""

import argparse
import ctypes
import faulthandler
import importlib.util
import json
import os
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

# NCCL and the allocator read these when they start: before torch is imported. Tensor and context parallel messages hide
# behind kernels only where those are launched in one order.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1" if {"--tp", "--cp"} & {*sys.argv} else "32")
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")

import torch
import torch.distributed as dist

from megaspec.profiling.power import Meter
from megaspec.profiling.recording import gpu_uuid
from tests.benchmarks.packed_rows import packed_rows
from tests.benchmarks.peers.on_cpu import stand_in_for_cuda

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
    qk_norm: bool = False
    """RMSNorm of each head's queries and keys."""


def llama8b(layers: int) -> Shape:
    """Layers of Llama-3-8B."""
    return Shape(layers, 4096, 32, 8, 128, 14336, 128256, 5e5)


SHAPES = {
    "tiny": Shape(2, 256, 4, 2, 64, 512, 1024, 1e4),
    "tiny16": Shape(16, 256, 4, 2, 64, 512, 1024, 1e4),
    "llama1b": Shape(16, 2048, 32, 8, 64, 8192, 128256, 5e5, tied=True),
    "llama8b": llama8b(32),
    "llama8b16": llama8b(16),
    "llama8b8": llama8b(8),
    "gptoss6": Shape(6, 2880, 64, 8, 64, 2880, 201088, 1.5e5, experts=32, top_k=4, d_expert=2880),
    "qwen3moe8": Shape(8, 2048, 32, 4, 128, 6144, 151936, 1e6, experts=128, top_k=8, d_expert=768, qk_norm=True),
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
    parser.add_argument("--tp", type=int, default=1, help="with sequence parallel")
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--chunks", type=int, default=1, help="of layers on each stage: above 1 interleaved, else 1F1B")
    parser.add_argument("--stages", default="", help="layers of each stage, as Et*8|t*9|t*9|t*6L; empty: as many each")
    parser.add_argument("--p2p", default="batched", choices=["batched", "overlapped"], help="messages between stages")
    parser.add_argument("--cp-messages", default="p2p", choices=["p2p", "a2a", "all_gather"])
    parser.add_argument("--force-balance", type=int, default=1, help="0: experts are taken as the learned router says")
    parser.add_argument("--patience", type=float, default=0, help="seconds until a run that hangs says where, and ends")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: whether the script works")
    return parser


@dataclass(frozen=True)
class Here:
    """This rank."""

    rank: int
    world: int
    device: torch.device

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"


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


def micro_batches(
    args: argparse.Namespace, vocab: int, device: torch.device, *, replica: int = 0, cp_rank: int = 0
) -> list[MicroBatch]:
    """The tokens that bench_train.py trains on, POOL micro batches in turn. `replica`: whose; `cp_rank`: which part of
    each sequence."""
    if args.documents:
        return packed_batches(args, vocab, device)
    generator = torch.Generator(device=device).manual_seed(SEED + replica)
    positions = torch.arange(args.seq, device=device).expand(args.mbs, -1)
    mine = part_of_sequence(args.seq, args.cp, cp_rank, device)
    made = []
    for _ in range(POOL):
        tokens = torch.randint(0, vocab, (args.mbs, args.seq + 1), device=device, generator=generator)
        inputs = tokens[:, :-1]
        labels = tokens[:, 1:]
        made.append(MicroBatch(*(whole[:, mine].contiguous() for whole in (inputs, labels, positions))))
    return made


def part_of_sequence(length: int, cp: int, cp_rank: int, device: torch.device) -> torch.Tensor:
    """The positions of a rank: of 2 · cp pieces one from the front and one from the back, as Transformer Engine has
    them, so that ranks compute as much of a causal attention."""
    if cp == 1:
        return torch.arange(length, device=device)
    pieces = torch.arange(length, device=device).chunk(2 * cp)
    return torch.cat([pieces[cp_rank], pieces[2 * cp - 1 - cp_rank]])


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
    """The model's configuration, with all of Megatron-core's fusions on a GPU."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend

    is_gpu = args.device == "cuda"
    more: dict[str, Any] = {}
    if args.stages:
        more["pipeline_model_parallel_layout"] = args.stages
    if args.cp > 1:
        more["cp_comm_type"] = args.cp_messages
    if shape.experts is not None:
        more |= {
            "num_moe_experts": shape.experts,
            "moe_router_topk": shape.top_k,
            "moe_ffn_hidden_size": shape.d_expert,
            "moe_grouped_gemm": is_gpu,
            "moe_aux_loss_coeff": 0.0,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "moe_permute_fusion": is_gpu,
            # as ours is measured: every expert gets as many tokens as any other
            "moe_router_force_load_balancing": bool(args.force_balance),
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
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.chunks if args.chunks > 1 else None,
        context_parallel_size=args.cp,
        expert_model_parallel_size=args.ep,
        sequence_parallel=args.tp > 1,
        # What is sent to the next stage is freed once it is there. Overlapped messages may still be under way then:
        # megatron-core 0.16 frees what it sends, and losses are not finite now and then.
        deallocate_pipeline_outputs=args.p2p == "batched",
        # all micro batches have one length, so that no shapes are sent
        variable_seq_lengths=False,
        batch_p2p_comm=args.p2p == "batched",
        overlap_p2p_comm=args.p2p == "overlapped",
        qk_layernorm=shape.qk_norm,
        # Transformer Engine's own kernel is fused
        bias_activation_fusion=is_gpu and not args.te_activation,
        use_te_activation_func=args.te_activation,
        bias_dropout_fusion=is_gpu,
        masked_softmax_fusion=is_gpu,
        apply_rope_fusion=is_gpu,
        persist_layer_norm=is_gpu,
        gradient_accumulation_fusion=is_gpu,
        cross_entropy_loss_fusion=is_gpu,
        cross_entropy_fusion_impl="te" if is_gpu else "native",
        attention_softmax_in_fp32=not is_gpu,
        use_cpu_initialization=not is_gpu,
        init_method_std=0.02,
        attention_backend=AttnBackend[args.attention],
        cuda_graph_impl=args.cuda_graph,
        use_te_rng_tracker=args.cuda_graph != "none",
        **more,
    )


def join(args: argparse.Namespace, here: Here) -> None:
    """Makes the process group and Megatron-core's groups in it."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    # see `How stages send to each other`
    is_bound = here.is_gpu and args.p2p == "batched"
    dist.init_process_group(
        "nccl" if here.is_gpu else "gloo",
        rank=here.rank,
        world_size=here.world,
        device_id=here.device if is_bound else None,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.chunks if args.chunks > 1 else None,
        context_parallel_size=args.cp,
        expert_model_parallel_size=args.ep,
    )
    model_parallel_cuda_manual_seed(1234)
    if args.pp > 1:
        connect_stages(here, parallel_state.get_pipeline_model_parallel_group())


def connect_stages(here: Here, group: dist.ProcessGroup) -> None:
    """Sends once between every two stages that are neighbours, the last and the first among them, one after the other
    and in the same order on all ranks."""
    ranks = dist.get_process_group_ranks(group)
    message = torch.zeros(1, device=here.device)
    for first, second in zip(ranks, ranks[1:] + ranks[:1], strict=True):
        for source, target in ((first, second), (second, first)):
            if here.rank == source:
                dist.send(message, target, group=group)
            if here.rank == target:
                dist.recv(message, source, group=group)
    if here.is_gpu:
        torch.cuda.synchronize()
    dist.barrier()


def layers_of(args: argparse.Namespace, shape: Shape) -> Any:
    """What Megatron-core builds layers of: Transformer Engine's modules, its own on a CPU."""
    from megatron.core.models.gpt import gpt_layer_specs

    if args.device == "cpu":
        return gpt_layer_specs.get_gpt_layer_local_spec(
            num_experts=shape.experts, moe_grouped_gemm=False, qk_layernorm=shape.qk_norm, normalization="RMSNorm"
        )
    return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
        num_experts=shape.experts,
        moe_grouped_gemm=shape.experts is not None,
        qk_layernorm=shape.qk_norm,
        use_te_activation_func=args.te_activation,
    )


def build(args: argparse.Namespace, shape: Shape, here: Here) -> tuple[list[Any], Any]:
    """-> the model under DDP, chunk by chunk, and its optimizer."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = config_of(args, shape)
    # gradients and weights travel beside the passes where there is who to share them with
    overlaps = here.world > args.tp * args.pp
    reduction = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        check_for_nan_in_grad=False,
        overlap_grad_reduce=overlaps,
        overlap_param_gather=overlaps,
    )
    chunks = []
    for number in range(args.chunks):
        place: dict[str, Any] = {"vp_stage": number} if args.chunks > 1 else {}
        model = GPTModel(
            config=config,
            transformer_layer_spec=layers_of(args, shape),
            vocab_size=shape.vocab,
            max_sequence_length=args.seq,
            position_embedding_type="rope",
            rotary_base=int(shape.rope_base),
            share_embeddings_and_output_weights=shape.tied,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **place),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **place),
            **place,
        )
        model = model.to(torch.bfloat16).to(here.device)
        # buckets are for overlap, which chunks behind the first find no time for
        chunks.append(DistributedDataParallel(config, reduction, model, disable_bucketing=number > 0))
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
            overlap_param_gather=overlaps,
        ),
        chunks,
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if overlaps:
        of_chunks = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = of_chunks if args.chunks > 1 else of_chunks[0]
    return chunks, optimizer


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
    args: argparse.Namespace, chunks: list[Any], optimizer: Any, batches: list[MicroBatch]
) -> Callable[[], torch.Tensor | None]:
    """-> what trains one step, and gives its loss, on the device; None on a rank that has no output head."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    forward_backward = get_forward_backward_func()

    def in_turn() -> Iterator[MicroBatch]:
        while True:
            yield from batches

    def forward(source: Iterator[MicroBatch], module: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch = next(source)
        # of a chunk without the output head: activations for the next one
        losses = module(batch.tokens, batch.positions, None, labels=batch.labels, packed_seq_params=packed(batch))

        def mean(of_tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = of_tokens.float().mean()
            # Megatron divides the loss by the number of micro batches in place
            return loss, {"loss": loss.detach().clone()}

        return losses, mean

    # every chunk sees all micro batches in the same order
    sources = [in_turn() for _ in chunks]

    def step() -> torch.Tensor | None:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        of_batches = forward_backward(
            forward_step_func=forward,
            data_iterator=sources,
            model=chunks,
            num_microbatches=args.accum,
            seq_length=args.seq,
            micro_batch_size=args.mbs,
            decoder_seq_length=args.seq,
            forward_only=False,
        )
        optimizer.step()
        if not of_batches:
            return None
        return torch.stack([one["loss"] for one in of_batches]).mean()

    return step


def timed(
    step: Callable[[], torch.Tensor | None], steps: int, here: Here
) -> tuple[list[float], list[torch.Tensor | None]]:
    """-> seconds of each step by the device's clock, and their losses. As ours: nobody waits between two steps but who
    must."""
    losses = []
    if not here.is_gpu:
        moments = [time.perf_counter()]
        for _ in range(steps):
            losses.append(step())
            moments.append(time.perf_counter())
        return [last - first for first, last in pairwise(moments)], losses
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        losses.append(step())
        mark.record()
    torch.cuda.synchronize()
    # elapsed_time is in milliseconds
    return [first.elapsed_time(last) / 1e3 for first, last in pairwise(marks)], losses


def complete_environment() -> None:
    """What a launcher tells its ranks, for one process that none has started."""
    if "RANK" in os.environ:
        return
    # port 0: the system chooses a free one, so that two peers on one machine don't meet
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, value)


def start(args: argparse.Namespace) -> Here:
    """This rank and its device, with the process group."""
    complete_environment()
    if args.device == "cpu":
        stand_in_for_cuda()
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        load_stub()
        add_head_gradients_in_the_product()
    here = Here(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), device)
    join(args, here)
    return here


def main() -> None:
    args = parser().parse_args()
    if args.patience:
        faulthandler.dump_traceback_later(args.patience, exit=True)
    shape = SHAPES[args.model]
    here = start(args)
    import megatron.core
    from megatron.core import parallel_state

    chunks, optimizer = build(args, shape, here)
    batches = micro_batches(
        args,
        shape.vocab,
        here.device,
        replica=parallel_state.get_data_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
    )
    step = stepper(args, chunks, optimizer, batches)
    _, warm_losses = timed(step, args.warmup, here)
    if here.is_gpu:
        torch.cuda.reset_peak_memory_stats()
    with Meter(gpu_uuid(here.device)) as meter:
        times, losses = timed(step, args.steps, here)
    mine = {
        "clock": vars(meter.found()),
        "peak": torch.cuda.max_memory_allocated() if here.is_gpu else 0,
        "losses": [float(loss) for loss in [*warm_losses, *losses] if loss is not None],
    }
    ranks: list[Any] = [mine] * here.world
    dist.all_gather_object(ranks, mine)
    if here.rank == 0:
        versions = f"megatron-core {megatron.core.__version__}"
        if here.is_gpu:
            import transformer_engine

            versions += f", transformer-engine {transformer_engine.__version__}"
        print(json.dumps(line_of(args, here, versions, times, ranks)), flush=True)
    dist.destroy_process_group()


def line_of(
    args: argparse.Namespace, here: Here, versions: str, times: list[float], ranks: list[dict[str, Any]]
) -> dict[str, Any]:
    """What is printed."""
    replicas = here.world // (args.tp * args.pp * args.cp)
    tokens = args.seq * args.mbs * args.accum * replicas
    median = statistics.median(times)
    # each of a replica; of stages the last has them
    of_heads = [one["losses"] for one in ranks if one["losses"]]
    of_steps = [statistics.mean(of_step) for of_step in zip(*of_heads, strict=True)]
    return {
        "peer": versions,
        **vars(args),
        "gpus": here.world,
        "gpu": torch.cuda.get_device_name(here.device) if here.is_gpu else "none",
        "torch": torch.__version__,
        "step_ms": round(median * 1e3, 2),
        "step_ms_min": round(min(times) * 1e3, 2),
        "tokens_per_s_gpu": round(tokens / median / here.world, 1),
        # rows are packed without padding
        "padding": 0,
        "max_memory_allocated": max(one["peak"] for one in ranks),
        "loss_first": round(of_steps[0], 4),
        "loss_last": round(of_steps[-1], 4),
        "clock": ranks[0]["clock"],
        "ranks": [{"peak": one["peak"], "clock": one["clock"]} for one in ranks],
    }


if __name__ == "__main__":
    main()
