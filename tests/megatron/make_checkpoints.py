"""Makes tests/golden/megatron_checkpoints with megatron-core: checkpoints of tiny models and what they have to give.

    PYTHONPATH=FOLDER_OF_MEGATRON_CORE python tests/megatron/make_checkpoints.py

Made with megatron-core 0.16.1 and torch 2.13 on a CPU. Models are megatron-core's GPTModel of its local layers, with
random weights. Dense and mixed ones are saved by its dist_checkpointing.save; legacy files by torch.save of what
Megatron-LM's save_checkpoint puts into them (args, iteration, checkpoint_version, model or model0, model1, ...), since
megatron-core itself has no legacy writer. What they have to give is taken from a model of one rank, into which
dist_checkpointing.load, which reshards, has loaded the same weights: SHA-256 of each tensor, and logits in fp32.

Some things of it need a GPU and are replaced here: moving a tied table to one, the synchronisation before a save, the
random states that a fork of dropout asks for, and processes that write beside the training, which write in this one.
The router asks for a product of Transformer Engine, and is told that there is none. Of `_extra_state`, which every
module has, those of attention's output are saved with torch_dist.
"""

import ast
import hashlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tarfile
import tempfile
from argparse import Namespace
from contextlib import nullcontext, suppress
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file

GOLDEN = Path(__file__).parents[1] / "golden"
OUT = GOLDEN / "megatron_checkpoints"
ITERATION = 10
TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 49, 0, 27, 18]]
VOCAB = 50
# What each is: ranks, and what of a model it shows.
CASES = {
    "legacy_tp2": {
        "tensor_model_parallel_size": 2,
        "swiglu": True,
        "group_query_attention": True,
        "num_query_groups": 2,
        "qk_layernorm": True,
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
        "normalization": "RMSNorm",
    },
    "legacy_pp2": {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "num_layers": 4,
        "hidden_size": 8,
        "ffn_hidden_size": 16,
        "num_attention_heads": 2,
    },
    "dist_dense": {
        "tensor_model_parallel_size": 2,
        "swiglu": True,
        "group_query_attention": True,
        "num_query_groups": 2,
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "position_embedding_type": "rope",
        "rotary_base": 500000,
        "rotary_percent": 0.5,
        "untie_embeddings_and_output_weights": True,
        "normalization": "RMSNorm",
    },
    "dist_experts": {
        "expert_model_parallel_size": 2,
        "swiglu": True,
        "group_query_attention": True,
        "num_query_groups": 1,
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "num_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 8,
        "moe_layer_freq": [0, 1],
        "moe_shared_expert_intermediate_size": 8,
    },
}
BASE = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "seq_length": 32,
    "vocab_size": VOCAB,
    "make_vocab_size_divisible_by": 16,
    "tokenizer_type": "HuggingFaceTokenizer",
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "expert_model_parallel_size": 1,
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "swiglu": False,
    "group_query_attention": False,
    "num_query_groups": None,
    "qk_layernorm": False,
    "position_embedding_type": "learned_absolute",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "untie_embeddings_and_output_weights": False,
    "normalization": "LayerNorm",
    "norm_epsilon": 1e-5,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "num_experts": None,
    "bias_gelu_fusion": True,
    "params_dtype": torch.float32,
    "iteration": ITERATION,
}


def args_of(name: str, world: int) -> Namespace:
    """The args that Megatron-LM would keep: with every flag's default for one of the cases, else those that count."""
    found = {}
    if name == "dist_dense":
        for flag in json.loads((GOLDEN / "megatron_flags.json").read_text())["flags"]:
            dest = flag["flags"][0].removeprefix("--").replace("-", "_")
            value = flag["default"]
            with suppress(SyntaxError, ValueError):
                value = ast.literal_eval(value)
            for off in ("no_", "disable_"):
                if dest.startswith(off) and value is True:
                    dest = dest.removeprefix(off)
            found[dest] = value
    found |= BASE | CASES[name]
    found["encoder_num_layers"] = found["num_layers"]
    found["kv_channels"] = found["hidden_size"] // found["num_attention_heads"]
    multiple = found["make_vocab_size_divisible_by"] * found["tensor_model_parallel_size"]
    found["padded_vocab_size"] = -(-VOCAB // multiple) * multiple
    found["world_size"] = world
    if found["num_query_groups"] is None:
        found["num_query_groups"] = found["num_attention_heads"]
    return Namespace(**found)


def build(args: Namespace, *, is_whole: bool) -> list[torch.nn.Module]:
    """This rank's model, or chunks of it; `is_whole`: that of one rank alone."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    class Tracker:
        def fork(self, *_: object) -> nullcontext:
            return nullcontext()

    for module in (tensor_parallel, tensor_parallel.random, sys.modules["megatron.core.tensor_parallel.layers"]):
        module.get_cuda_rng_tracker = Tracker
    degrees = {
        "tensor_model_parallel_size": 1 if is_whole else args.tensor_model_parallel_size,
        "pipeline_model_parallel_size": 1 if is_whole else args.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": None if is_whole else args.virtual_pipeline_model_parallel_size,
        "expert_model_parallel_size": 1 if is_whole else args.expert_model_parallel_size,
    }
    parallel_state.initialize_model_parallel(**degrees)
    config = TransformerConfig(
        **degrees,
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        add_bias_linear=args.add_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        gated_linear_unit=args.swiglu,
        # GPT-2's form is that of the fused kernel, which Megatron-LM takes by default
        activation_func=F.silu if args.swiglu else F.gelu,
        bias_activation_fusion=not args.swiglu,
        qk_layernorm=args.qk_layernorm,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        num_moe_experts=args.num_experts,
        moe_token_dispatcher_type="allgather",
        **{
            key: getattr(args, key)
            for key in (
                "moe_router_topk",
                "moe_ffn_hidden_size",
                "moe_layer_freq",
                "moe_shared_expert_intermediate_size",
            )
            if args.num_experts
        },
    )
    models = []
    for chunk in range(degrees["virtual_pipeline_model_parallel_size"] or 1):
        stage = chunk if degrees["virtual_pipeline_model_parallel_size"] else None
        if args.num_experts:
            spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=args.normalization)
        else:
            spec = get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization)
        model = GPTModel(
            config,
            spec,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_base=args.rotary_base,
            rotary_percent=args.rotary_percent,
            vp_stage=stage,
        )
        models.append(model)
    return models


def draw(models: list[torch.nn.Module], rank: int, *, is_tied: bool, is_staged: bool) -> None:
    """Random weights: what ranks share is the same on each of them."""
    for chunk, model in enumerate(models):
        for name, parameter in model.named_parameters():
            is_split = getattr(parameter, "tensor_model_parallel", False) or ".experts." in name
            seed = f"{name} {chunk}"
            if is_split or is_staged:
                seed += f" {rank}"
            if is_tied and name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                seed = "the tied table"
            number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:6], "big")
            generator = torch.Generator().manual_seed(number)
            values = torch.randn(parameter.shape, generator=generator) / 4
            parameter.data.copy_(values + 1 if "layernorm.weight" in name else values)


def patch_saving() -> None:
    """Writes in this process, without a GPU."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.transformer.moe import moe_utils

    results: queue.Queue = queue.Queue()
    writer = filesystem_async.FileSystemWriterAsync

    def write_here(transform_list, use_msc, rank, write_buckets, global_results_queue):
        written = {}
        for number, bucket in enumerate(write_buckets):
            here: queue.Queue = queue.Queue()
            count: queue.Queue = queue.Queue()
            count.put(number)
            writer.write_preloaded_data(
                transform_list,
                local_proc_idx=number,
                write_bucket=bucket,
                results_queue=here,
                count_queue=count,
                use_fsync=True,
            )
            written[number] = here.get()[1]
        global_results_queue.put(written)

    writer.write_preloaded_data_multiproc = staticmethod(write_here)
    filesystem_async._get_write_results_queue = lambda: results
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    moe_utils.te_general_gemm = None


def sharded(models: list[torch.nn.Module]) -> dict:
    found: dict[str, dict] = {}
    for number, model in enumerate(models):
        chunk = found.setdefault(f"model{number}", {})
        for key, value in model.sharded_state_dict(metadata={}).items():
            if not key.endswith("_extra_state") or "linear_proj" in key:
                chunk[key] = value
    return found


def save(name: str, scratch: Path) -> None:
    """One rank of a saving run."""
    from megatron.core import dist_checkpointing

    rank = int(os.environ["RANK"])
    args = args_of(name, int(os.environ["WORLD_SIZE"]))
    args.rank = rank
    models = build(args, is_whole=False)
    is_staged = args.pipeline_model_parallel_size > 1
    draw(models, rank, is_tied=not args.untie_embeddings_and_output_weights, is_staged=is_staged)
    folder = OUT / name / f"iter_{ITERATION:07d}"
    common = {"args": args, "checkpoint_version": 3.0, "iteration": ITERATION}
    target = scratch if name.startswith("legacy") else folder
    if rank == 0:
        target.mkdir(parents=True)
        (OUT / name / "latest_checkpointed_iteration.txt").parent.mkdir(parents=True, exist_ok=True)
        (OUT / name / "latest_checkpointed_iteration.txt").write_text(f"{ITERATION}")
    dist.barrier()
    common_of_all = common | {"args": Namespace(**vars(args) | {"rank": 0})}
    dist_checkpointing.save({**sharded(models), **common_of_all}, str(target))
    if not name.startswith("legacy"):
        return
    own = f"mp_rank_{rank:02d}" if not is_staged else f"mp_rank_00_{rank:03d}"
    (folder / own).mkdir(parents=True)
    state = dict(common)
    for number, model in enumerate(models):
        key = f"model{number}" if len(models) > 1 else "model"
        state[key] = model.state_dict_for_save_checkpoint()
    torch.save(state, folder / own / "model_optim_rng.pt")


def expect(name: str, scratch: Path) -> None:
    """What a checkpoint has to give, from a model of one rank."""
    from megatron.core import dist_checkpointing

    args = args_of(name, 1)
    [model] = build(args, is_whole=True)
    source = scratch if name.startswith("legacy") else OUT / name / f"iter_{ITERATION:07d}"
    loaded = dist_checkpointing.load(sharded([model]), str(source))["model0"]
    model.load_state_dict({key: loaded[key] for key in model.state_dict() if key in loaded}, strict=False)
    digests = {}
    for key, value in model.named_parameters():
        assert torch.equal(value, loaded[key]), key
        digests[key] = hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest()
    model.eval()
    tokens = torch.tensor(TOKENS)
    length = tokens.shape[1]
    mask = torch.triu(torch.ones(1, 1, length, length), 1).bool()
    with torch.no_grad():
        logits = model(tokens, torch.arange(length)[None], mask)
    save_file(
        {"tokens": tokens, "logits": logits[..., :VOCAB].float().contiguous()}, OUT / name / "expected.safetensors"
    )
    (OUT / name / "expected.json").write_text(json.dumps(digests, indent=1) + "\n")


def pack(folder: Path) -> None:
    """The checkpoint as one file: what torch writes is mostly zeros between tensors."""
    with tarfile.open(folder / "checkpoint.tar.xz", "w:xz") as archive:
        for name in (f"iter_{ITERATION:07d}", "latest_checkpointed_iteration.txt"):
            archive.add(folder / name, arcname=name, filter=_without_owner)
    shutil.rmtree(folder / f"iter_{ITERATION:07d}")
    (folder / "latest_checkpointed_iteration.txt").unlink()


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


def main() -> None:
    if "RANK" in os.environ:
        patch_saving()
        dist.init_process_group("gloo")
        {"save": save, "expect": expect}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
        dist.destroy_process_group()
        return
    port = 29_650
    for name, settings in CASES.items():
        if len(sys.argv) > 1 and name not in sys.argv[1:]:
            continue
        shutil.rmtree(OUT / name, ignore_errors=True)
        ranks = 2
        with tempfile.TemporaryDirectory() as folder:
            for task, world in (("save", ranks), ("expect", 1)):
                port += 1
                started = []
                for rank in range(world):
                    environment = os.environ | {
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                        "WORLD_SIZE": str(world),
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(port),
                        "OMP_NUM_THREADS": "1",
                    }
                    words = [sys.executable, __file__, task, name, f"{folder}/dist"]
                    started.append(subprocess.Popen(words, env=environment))
                codes = [one.wait(timeout=120) for one in started]
                assert codes == [0] * world, f"{name} {task}: {codes} with {settings}"
        pack(OUT / name)


if __name__ == "__main__":
    main()
