"""Flags that older releases of Megatron-LM had and that are gone at COMMIT.

Facts of the history of Megatron's arguments.py and of its releases' tags: the release, or the month where no release
says it, since which a flag is gone.
"""

from megaspec.megatron.flag import Fate, FlagGroup, others

_2020_APRIL = "April 2020"
_2020_DECEMBER = "December 2020"
_2021_JANUARY = "January 2021"
_2021_MARCH = "March 2021"
_2021_AUGUST = "August 2021"
_2022_JANUARY = "January 2022"
_2022_MAY = "May 2022"
_0_4 = "core_v0.4.0 (December 2023)"
_0_5 = "core_v0.5.0 (February 2024)"
_0_6 = "core_v0.6.0 (April 2024)"
_0_7 = "core_v0.7.0 (May 2024)"
_0_8 = "core_v0.8.0 (August 2024)"
_0_9 = "core_v0.9.0 (October 2024)"
_0_11 = "core_v0.11.0 (March 2025)"
_0_13 = "core_v0.13.0 (July 2025)"
_0_14 = "core_v0.14.0 (October 2025)"
_0_15 = "core_v0.15.0 (December 2025)"
_0_16 = "core_v0.16.0 (February 2026)"
_0_17 = "core_v0.17.0 (April 2026)"
_0_18 = "core_v0.18.0 (June 2026)"
_0_19 = "core_v0.19.0 (August 2026)"

_KERNELS = "kernels and fusions are chosen from the GPU: kernels.*"
_LAYOUT = "what is computed stays the same; parallelism.* says how it is divided"
_RECOMPUTE = "what is computed stays the same; give --recompute-granularity for parallelism.recompute"
_OVERLAP = "what runs beside computation is said by parallelism.overlap"
_LOG = "the numbers of every step are in metrics.jsonl"
_TOKENS = "tokens are made beforehand by `megaspec data prepare`, whose manifest names the tokenizer"
_READING = "how data is read is the loader's"
_OTHER = "of another entry point than pretrain_gpt.py"


def _older(gone: str, fate: Fate, text: str, names: str) -> FlagGroup:
    return others(f"a flag of older releases, gone since {gone}", fate, text, names)


GROUPS = (
    # what trains something else without them
    _older(_2020_APRIL, Fate.LOST, "give --ffn-hidden-size", "--intermediate-size"),
    _older(
        _2020_APRIL,
        Fate.LOST,
        "no such data; give --data-path",
        "--train-data --valid-data --test-data --use-tfrecords --use-npy-data-loader --val-data-path --data-loader",
    ),
    _older(_2020_APRIL, Fate.LOST, "no such length of the training; give --train-iters", "--epochs --data-epochs"),
    _older(_2020_APRIL, Fate.LOST, "no such model", "--pretrained-bert --load-openai --deep-init"),
    _older(_2020_DECEMBER, Fate.LOST, "layers share no weights here", "--num-unique-layers --param-sharing-style"),
    _older(_2021_JANUARY, Fate.LOST, "give --min-loss-scale", "--min-scale"),
    _older(_0_4, Fate.LOST, "give --norm-epsilon", "--layernorm-epsilon"),
    _older(_0_4, Fate.LOST, "give --fp8-format e4m3", "--fp8-e4m3"),
    _older(_0_4, Fate.LOST, "give --fp8-format hybrid", "--fp8-hybrid"),
    _older(_0_4, Fate.LOST, "no such number format", "--embedding-weights-in-fp32"),
    _older(_0_4, Fate.LOST, "no such layers", "--model-spec"),
    _older(_0_7, Fate.LOST, "give --moe-expert-capacity-factor", "--moe-token-dropping"),
    _older(
        _0_11,
        Fate.LOST,
        "give --moe-router-num-groups and --moe-router-group-topk",
        "--moe-router-topk-limited-devices",
    ),
    _older(_0_11, Fate.LOST, "no such order of data", "--renormalize-blend-weights"),
    _older(_0_6, Fate.LOST, "no model here retrieves (RETRO)", "--retro-workdir --retro-return-doc-ids"),
    _older(
        _0_16,
        Fate.LOST,
        "no model here retrieves (RETRO)",
        """
        --retro-add-retriever --retro-cyclic-train-iters --retro-encoder-layers --retro-encoder-hidden-dropout
        --retro-encoder-attention-dropout --retro-num-neighbors --retro-num-retrieved-chunks
        --retro-no-verify-neighbor-count --retro-attention-gate --retro-project-dir
        """,
    ),
    _older(_0_17, Fate.LOST, "no such layers", "--hybrid-attention-ratio --hybrid-mlp-ratio"),
    # what changes nothing that is trained
    _older(
        _2020_APRIL,
        Fate.IDLE,
        _READING,
        "--lazy-loader --shuffle --resume-dataloader --skip-mmap-warmup --loose-json --text-key --presplit-sentences",
    ),
    _older(_2020_APRIL, Fate.IDLE, _TOKENS, "--vocab --tokenizer-path --tokenizer-model-type --cache-dir"),
    _older(_2020_APRIL, Fate.IDLE, "at least fp32 where it matters", "--fp32-embedding --fp32-layernorm"),
    _older(_2020_APRIL, Fate.IDLE, "evaluation takes the batches of the training", "--eval-batch-size"),
    _older(_2020_APRIL, Fate.IDLE, "give --save-interval", "--save-iters"),
    _older(
        _2021_JANUARY,
        Fate.IDLE,
        _KERNELS,
        """
        --scaled-upper-triang-masked-softmax-fusion --scaled-masked-softmax-fusion --no-scaled-masked-softmax-fusion
        --bias-gelu-fusion --bias-dropout-fusion
        """,
    ),
    _older(_2021_MARCH, Fate.IDLE, "gradient sums are at least fp32 here", "--fp32-allreduce"),
    _older(_2021_MARCH, Fate.IDLE, _OTHER, "--report-topk-accuracies --faiss-use-gpu"),
    _older(_2021_AUGUST, Fate.IDLE, _RECOMPUTE, "--checkpoint-num-layers"),
    _older(_2021_AUGUST, Fate.IDLE, _LAYOUT, "--use-contiguous-buffers-in-ddp"),
    _older(
        _2022_JANUARY,
        Fate.IDLE,
        "`megaspec resume` says what a run goes on with",
        "--override-lr-scheduler --use-checkpoint-lr-scheduler",
    ),
    _older(_2022_JANUARY, Fate.IDLE, "memory is the runtime's", "--deallocate-pipeline-outputs"),
    _older(_2022_JANUARY, Fate.IDLE, _OTHER, "--img-dim"),
    _older(
        _2022_MAY,
        Fate.IDLE,
        _RECOMPUTE,
        """
        --distribute-checkpointed-activations --activations-checkpoint-method --activations-checkpoint-num-layers
        """,
    ),
    _older(
        _0_4,
        Fate.IDLE,
        "data.kind=indexed reads the .bin and .idx files that --data-impl mmap reads",
        "--data-impl --mmap-warmup",
    ),
    _older(
        _0_4,
        Fate.IDLE,
        "it scales q·k and takes the scale back in the softmax; what is computed stays the same",
        "--no-query-key-layer-scaling",
    ),
    _older(_0_4, Fate.IDLE, _LAYOUT, "--DDP-impl --no-contiguous-buffers-in-local-ddp"),
    _older(_0_4, Fate.IDLE, _OVERLAP, "--overlap-p2p-communication"),
    _older(_0_4, Fate.IDLE, "give --expert-model-parallel-size", "--expert-parallel"),
    _older(_0_5, Fate.IDLE, "weights are made on the meta device", "--use-gpu-initialization"),
    _older(_0_8, Fate.IDLE, _LOG, "--enable-one-logger --one-logger-entity"),
    _older(_0_9, Fate.IDLE, "the launcher tells each rank its number", "--local_rank"),
    _older(_0_9, Fate.IDLE, _LOG, "--log-batch-size-to-tensorboard --no-log-learnig-rate-to-tensorboard"),
    _older(_0_9, Fate.IDLE, _OVERLAP, "--delay-param-gather --no-delay-grad-reduce --align-param-gather"),
    _older(_0_11, Fate.IDLE, "give --pipeline-model-parallel-layout", "--standalone-embedding-stage"),
    _older(_0_13, Fate.IDLE, _READING, "--s3-cache-path"),
    _older(
        _0_14,
        Fate.IDLE,
        "for an encoder beside the decoder, which pretrain_gpt.py has not",
        """
        --pipeline-model-parallel-split-rank --encoder-tensor-model-parallel-size
        --encoder-pipeline-model-parallel-size
        """,
    ),
    _older(
        _0_14,
        Fate.IDLE,
        "what is computed stays the same; give --use-megatron-fsdp for parallelism.dp_strategy",
        "--use-custom-fsdp --keep-fp8-transpose-cache-when-using-custom-fsdp",
    ),
    _older(_0_16, Fate.IDLE, _OVERLAP, "--no-async-tensor-model-parallel-allreduce"),
    _older(_0_16, Fate.IDLE, _KERNELS, "--moe-use-legacy-grouped-gemm"),
    _older(_0_16, Fate.IDLE, "give --expert-tensor-parallel-size", "--moe-extended-tp"),
    _older(_0_16, Fate.IDLE, _LAYOUT, "--max-seqlen-per-cp-rank"),
    _older(
        _0_16,
        Fate.IDLE,
        _OTHER,
        """
        --retriever-seq-length --grpo-default-temperature --grpo-default-top-p --rl-calculate-intra-group-similarity
        --rl-sequence-packing-bin-size
        """,
    ),
    _older(_0_17, Fate.IDLE, _TOKENS, "--legacy-tokenizer"),
    _older(
        _0_17,
        Fate.IDLE,
        _OTHER,
        """
        --langrl-external-server --langrl-inference-server-type --langrl-inference-server-conversation-template
        --rl-offload-kv-cache-during-training --rl-remove-kv-cache-during-training --rl-reset-cuda-graphs
        """,
    ),
    _older(_0_18, Fate.IDLE, "a model is written once here", "--use-legacy-models"),
    _older(_0_18, Fate.IDLE, _LAYOUT, "--no-scatter-gather-tensors-in-pipeline"),
    _older(
        _0_18,
        Fate.IDLE,
        _TOKENS,
        "--tiktoken-special-tokens --tokenizer-hf-use-fast --tokenizer-hf-include-special-tokens",
    ),
    _older(_0_18, Fate.IDLE, "says something with --optimizer muon alone", "--muon-use-nesterov"),
    _older(
        _0_19,
        Fate.IDLE,
        _OTHER,
        """
        --rl-parallel-generation-tasks --rl-num-parallel-generations --rl-num-parallel-generation-batches
        --rl-generation-batch-size
        """,
    ),
    *(
        _older(gone, Fate.IDLE, "settings of a server say nothing to a training", names)
        for gone, names in (
            (_0_15, "--inference-dynamic-batching-chunk-size --initialize-socket-comms"),
            (
                _0_16,
                """
                --inference-dynamic-batching-buffer-guaranteed-fraction
                --inference-dynamic-batching-buffer-overflow-factor --inference-dynamic-batching-max-requests-override
                --inference-dynamic-batching-max-tokens-override --inference-mp-coordinator-port
                --inference-dynamic-batching-active-buffer-size-gb --inference-wandb-logging-step-interval
                """,
            ),
            (_0_17, "--inference-max-batch-size --disable-chunked-prefill --inference-flask-server-logging"),
            (_0_18, "--inference-dynamic-batching-cuda-graph-max-tokens"),
        )
    ),
)
"""All of them."""
