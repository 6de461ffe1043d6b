"""Flags that have no meaning here, by what decides instead."""

from megaspec.megatron.flag import Fate, FlagGroup

GROUPS = (
    FlagGroup(
        Fate.IDLE,
        "kernels and fusions are chosen from the GPU: kernels.*",
        """
        --attention-backend text, --flash-attention-version text, --cross-entropy-loss-fusion,
        --cross-entropy-fusion-impl text, --use-fused-weighted-squared-relu, --fused-residual-rmsnorm,
        --use-transformer-engine-op-fuser, --use-kitchen-attention,
        --kitchen-attention-backend text, --use-grouped-gemm-for-shared-expert, --use-grouped-gemm-for-dense-mlp,
        --moe-grouped-gemm, --moe-use-grouped-tensor, --moe-single-grouped-weight, --moe-single-grouped-bias,
        --moe-permute-fusion, --moe-permute-fusion-into-hybridep, --moe-router-fusion,
        --moe-mlp-glu-interleave-size text, --moe-shared-expert-glu-interleave-size text,
        --transformer-impl text, --no-masked-softmax-fusion, --no-bias-swiglu-fusion,
        --no-bias-dropout-fusion, --no-rope-fusion, --no-persist-layer-norm, --no-gradient-accumulation-fusion,
        --disable-jit-fuser, --mla-down-proj-fusion, --moe-router-padding-for-quantization,
        --moe-router-padding-for-fp8, --batch-invariant-mode, --batch-invariant-backend text
        """,
    ),
    FlagGroup(
        Fate.IDLE,
        "how a product is rounded inside is left to torch and cuBLAS",
        """
        --disable-bf16-reduced-precision-matmul
        """,
    ),
    FlagGroup(
        Fate.IDLE,
        "scales are made anew for each step; by its own help Megatron ignores it",
        """
        --fp8-interval text
        """,
    ),
    FlagGroup(
        Fate.IDLE,
        "permits or names what is the only way here",
        """
        --use-mcore-models, --enable-experimental, --lazy-mpu-init
        """,
    ),
    FlagGroup(
        Fate.IDLE,
        "what runs beside computation is said by parallelism.overlap, in which order by the runtime",
        """
        --tp-comm-overlap-cfg text, --no-tp-comm-bulk-wgrad --disable-tp-comm-bulk-wgrad,
        --no-tp-comm-bulk-dgrad --disable-tp-comm-bulk-dgrad, --no-tp-comm-overlap-ag --disable-tp-comm-overlap-ag,
        --no-tp-comm-overlap-rs --disable-tp-comm-overlap-rs, --tp-comm-overlap-rs-dgrad,
        --no-tp-comm-split-ag --disable-tp-comm-split-ag, --no-tp-comm-split-rs --disable-tp-comm-split-rs,
        --tp-comm-bootstrap-backend text, --use-ring-exchange-p2p,
        --no-align-param-gather, --no-align-grad-reduce --disable-align-grad-reduce
        """,
    ),
    FlagGroup(
        Fate.IDLE,
        "process groups are made by the runtime and left to the defaults of torch and NCCL",
        """
        --pipeline-model-parallel-comm-backend text, --distributed-backend text, --local-rank text,
        --nccl-communicator-config-path text, --disable-gloo-process-groups, --use-sharp,
        --sharp-enabled-group text, --high-priority-stream-groups text+, --create-all-gather-group,
        --use-nccl-ub, --disable-symmetric-registration, --fsdp-manual-registration, --symmetric-ar-type text
        """,
    ),
    FlagGroup(
        Fate.IDLE,
        "launcher.timeout_seconds holds for the whole run",
        """
        --distributed-timeout-seconds-after-init text
        """,
    ),
    FlagGroup(
        Fate.IDLE,
        "buckets of gradients, and what is gathered at a time, are the runtime's: parallelism.bucket_mb",
        """
        --ddp-num-buckets text, --ddp-pad-buckets-for-high-nccl-busbw, --ddp-average-in-collective,
        --no-gradient-reduce-div-fusion, --suggested-communication-unit-size text, --no-use-layer-wise-param-layout,
        --megatron-fsdp-version text, --megatron-fsdp-enable-fine-grained-param-gather,
        --fsdp-double-buffer, --megatron-fsdp-max-pool-double-buffer, --fsdp-db-use-persist-buf-on-alloc-fail
        """,
    ),
    FlagGroup(
        Fate.IDLE,
        "weights are made on the meta device and depend on the seed, name and index alone",
        """
        --no-initialization, --use-cpu-initialization, --init-model-with-meta-device, --data-parallel-random-init
        """,
    ),
    FlagGroup(
        Fate.IDLE,
        "a rank adds up gradients in at least fp32; between ranks parallelism.grad_reduce says the format",
        """
        --ddp-reduce-scatter-with-fp32-accumulation, --ddp-param-name-patterns-for-fp32-local-accumulation text+,
        --megatron-fsdp-main-grads-dtype text, --megatron-fsdp-grad-comm-dtype text
        """,
    ),
    FlagGroup(
        Fate.IDLE,
        "master weights, softmax, router and losses are at least fp32 here",
        """
        --attention-softmax-in-fp32, --fp16-lm-cross-entropy, --moe-router-dtype text, --output-logit-dtype text,
        --megatron-fsdp-main-params-dtype text
        """,
    ),
    FlagGroup(
        Fate.IDLE,
        "it scales q·k and takes the scale back in the softmax, which is at least fp32 here anyway",
        """
        --apply-query-key-layer-scaling
        """,
    ),
    FlagGroup(
        Fate.IDLE,
        "a loss or gradient that is NaN or infinite is always looked for",
        """
        --no-check-for-nan-in-loss-and-grad
        """,
    ),
    FlagGroup(
        Fate.IDLE,
        "`megaspec plan` tells memory and time without GPUs",
        """
        --fake-process-group
        """,
    ),
    FlagGroup(
        Fate.IDLE,
        "tokens are made beforehand by `megaspec data prepare`, whose manifest names the tokenizer",
        """
        --vocab-file text, --merge-file text, --tokenizer-metadata text, --tokenizer-special-tokens text+,
        --tiktoken-pattern text, --tiktoken-num-special-tokens text, --tokenizer-sentencepiece-legacy,
        --no-tokenizer-sentencepiece-ignore-extra-whitespaces --disable-tokenizer-sentencepiece-ignore-extra-whitespaces,
        --tokenizer-hf-no-use-fast, --tokenizer-hf-no-include-special-tokens, --trust-remote-code,
        --null-tokenizer-eod-id text, --null-tokenizer-pad-id text, --chat-template text, --use-gigatoken,
        --no-save-tokenizer-assets --disable-save-tokenizer-assets
        """,  # noqa: E501
    ),
    FlagGroup(
        Fate.IDLE,
        "padding of the vocabulary takes no part in the loss and is never saved: model.vocab_pad_to",
        """
        --no-pad-vocab-size --disable-pad-vocab-size
        """,
    ),
    FlagGroup(
        Fate.IDLE,
        "how data is read is the loader's; the order of samples does not depend on it",
        """
        --dataloader-fast-cache-load, --dataloader-defer-npy-index-mmap, --no-mmap-bin-files, --num-workers text,
        --no-create-attention-mask-in-dataloader, --num-dataset-builder-threads text, --object-storage-cache-path text,
        --per-dataset-sequences-path text, --enable-msc, --disable-msc
        """,
    ),
    FlagGroup(
        Fate.IDLE,
        "checkpoints have one format that is verified, loads into any layout and is written from all ranks",
        """
        --ckpt-format text, --ckpt-convert-format text, --ckpt-convert-save text,
        --ckpt-convert-update-legacy-dist-opt-format, --no-ckpt-fully-parallel-save, --async-strategy text,
        --use-persistent-ckpt-worker, --async-ckpt-cpu-priority text, --async-ckpt-io-priority text,
        --async-ckpt-use-cpu-shm, --ckpt-fully-parallel-load, --ckpt-fully-parallel-load-exchange-algo text,
        --ckpt-fully-parallel-load-per-rank-objects, --ckpt-fully-parallel-save-process-group text,
        --ckpt-fully-parallel-load-process-group text, --ckpt-assume-constant-structure,
        --ckpt-pg-tensors-cache-path text, --ckpt-pg-tensors-cache-create,
        --no-ckpt-load-validate-sharding-integrity --disable-ckpt-load-validate-sharding-integrity,
        --no-strict-fsdp-dtensor-load --disable-strict-fsdp-dtensor-load, --dist-ckpt-strictness text,
        --dist-ckpt-optim-fully-reshardable, --distrib-optim-fully-reshardable-mem-efficient, --verify-integrity,
        --use-dist-ckpt, --dist-ckpt-format text, --dist-ckpt-workers text, --ckpt-fully-parallel-save,
        --ckpt-drop-redundant-extra-state
        """,
    ),
    FlagGroup(
        Fate.IDLE,
        "ranks that die or hang are ended and told by the launcher, which starts them again: launcher.max_restarts",
        """
        --enable-ft-package, --calc-ft-timeouts, --ft-num-warmup-iters text, --flight-recorder-dump-path text,
        --flight-recorder-trace-buffer-size text,
        --no-flight-recorder-dump-on-timeout --disable-flight-recorder-dump-on-timeout,
        --flight-recorder-include-stack-trace,
        --no-flight-recorder-include-only-active --disable-flight-recorder-include-only-active,
        --no-flight-recorder-extra-dump-on-exec --disable-flight-recorder-extra-dump-on-exec,
        --inprocess-restart,
        --inprocess-monitor-thread-interval text, --inprocess-monitor-process-interval text,
        --inprocess-heartbeat-interval text, --inprocess-soft-timeout text, --inprocess-hard-timeout text,
        --inprocess-heartbeat-timeout text, --inprocess-barrier-timeout text, --inprocess-completion-timeout text,
        --inprocess-last-call-wait text, --inprocess-termination-grace-time text, --inprocess-granularity text,
        --inprocess-active-world-size text, --inprocess-empty-cuda-cache
        """,
    ),
    FlagGroup(
        Fate.IDLE,
        "loss, rate, gradient norm, tokens, time and memory of every step, and routers' loads, are in metrics.jsonl",
        """
        --log-throughput, --log-progress, --tensorboard-log-interval text, --tensorboard-queue-size text,
        --no-log-loss-scale-to-tensorboard --disable-log-loss-scale-to-tensorboard, --log-validation-ppl-to-tensorboard,
        --log-memory-to-tensorboard, --log-memory-interval text, --log-device-memory-used,
        --log-world-size-to-tensorboard, --moe-per-layer-logging
        """,
    ),
    FlagGroup(
        Fate.IDLE,
        "what the console shows is said by log.console",
        """
        --logging-level text
        """,
    ),
    FlagGroup(
        Fate.IDLE,
        "memory, the garbage collector and how far the host runs ahead of the GPU are the runtime's",
        """
        --keep-fp8-transpose-cache, --reuse-grad-buf-for-mxfp8-param-ag, --empty-unused-memory-level text,
        --manual-gc, --manual-gc-interval text,
        --no-manual-gc-eval --disable-manual-gc-eval,
        --no-clone-scatter-output-in-embedding --disable-clone-scatter-output-in-embedding, --train-sync-interval text
        """,
    ),
    FlagGroup(
        Fate.IDLE,
        "settings of a server say nothing to a training",
        """
        --inference-cuda-graph-scope text, --inference-fuse-tp-communication, --inference-disable-triton-nvls-kernels,
        --inference-grouped-gemm-backend text, --inference-moe-disable-fused-quant-kernels,
        --inference-moe-token-dispatcher-type text, --inference-rng-tracker,
        --inference-batch-times-seqlen-threshold text, --use-legacy-static-engine, --inference-max-requests text,
        --inference-max-seq-length text, --inference-dynamic-batching, --inference-dynamic-batching-buffer-size-gb text,
        --inference-dynamic-batching-paused-buffer-size-gb text, --inference-dynamic-batching-mamba-memory-ratio text,
        --inference-dynamic-batching-block-size text, --inference-dynamic-batching-max-requests text,
        --inference-dynamic-batching-max-tokens text, --inference-dynamic-batching-num-cuda-graphs text,
        --inference-dynamic-batching-track-paused-request-events,
        --inference-dynamic-batching-track-generated-token-events, --decode-only-cuda-graphs,
        --inference-cuda-graph-all-prefills, --inference-cuda-graph-max-tokens text,
        --inference-dynamic-batching-unified-memory-level text, --enable-chunked-prefill, --num-speculative-tokens text,
        --inference-dynamic-batching-prefix-caching --no-inference-dynamic-batching-prefix-caching,
        --inference-dynamic-batching-prefix-caching-eviction-policy text,
        --inference-dynamic-batching-prefix-caching-coordinator-policy text,
        --inference-dynamic-batching-prefix-caching-routing-alpha text,
        --inference-dynamic-batching-prefix-caching-mamba-gb text,
        --inference-dynamic-batching-cuda-graph-mixed-prefill-count text,
        --inference-dynamic-batching-cuda-graph-sizing-distribution text,
        --inference-dynamic-batching-sampling-backend text, --use-same-sampling-seed-across-dp-ranks,
        --inference-dynamic-batching-async-sched-mode text, --inference-dynamic-batching-logprobs-mode text,
        --inference-logging-step-interval text,
        --inference-text-gen-server-logging --no-inference-text-gen-server-logging,
        --inference-wandb-logging --no-inference-wandb-logging, --inference-coordinator-port text,
        --mamba-inference-conv-states-dtype text, --mamba-inference-ssm-states-dtype text,
        --inference-use-synchronous-zmq-collectives --no-inference-use-synchronous-zmq-collectives,
        --inference-disable-ep-consensus --no-inference-disable-ep-consensus, --flash-decode,
        --nccl-all-reduce-for-prefill, --mlp-chunks-for-prefill text, --moe-pad-experts-for-cuda-graph-inference,
        --cache-mla-latents
        """,
    ),
    FlagGroup(
        Fate.IDLE,
        "belongs to another entry point than pretrain_gpt.py",
        """
        --bert-no-binary-head, --output-bert-embeddings, --mask-prob text, --short-seq-prob text,
        --decoder-seq-length text, --sample-rate text, --num-classes text, --img-h text, --img-w text,
        --num-channels text, --patch-dim text, --vision-pretraining-type text, --rl-inference-parsers text*,
        --rl-prompts-per-eval text, --grpo-prompts-per-step text, --grpo-group-size text, --rl-generation-lag text,
        --rl-max-inflight-requests text, --rl-submission-granularity text, --rl-consumption-granularity text,
        --rl-durable-rollout-bank, --rl-rollout-bank-dir text, --rl-rollout-bank-max-bytes text, --grpo-iterations text,
        --grpo-clamp-eps-lower text, --grpo-clamp-eps-upper text, --grpo-kl-beta text, --grpo-entropy-term-weight text,
        --grpo-filter-groups-with-same-reward, --langrl-env-config text, --rl-default-temperature text,
        --rl-default-top-p text, --rl-default-top-k text, --rl-offload-optimizer-during-inference,
        --rl-kv-cache-management-mode text, --rl-persist-cuda-graphs --no-rl-persist-cuda-graphs,
        --rl-partial-rollouts --no-rl-partial-rollouts,
        --rl-inference-logprobs-is-correction --no-rl-inference-logprobs-is-correction,
        --rl-importance-sampling-truncation-coef text, --rl-use-sequence-packing --no-rl-use-sequence-packing,
        --rl-sequence-packing-max-sequences-per-bin text, --rl-sequence-packing-algo text,
        --rl-training-cuda-graphs --no-rl-training-cuda-graphs, --rl-inference-tensor-model-parallel-size text,
        --rl-inference-pipeline-model-parallel-size text, --rl-inference-expert-model-parallel-size text,
        --rl-inference-expert-tensor-model-parallel-size text, --rl-inference-model-unified-memory-level text,
        --rl-offload-inference-model-weights-when-idle --no-rl-offload-inference-model-weights-when-idle,
        --refit-method text, --rl-verify-model-weights-swap --no-rl-verify-model-weights-swap,
        --rl-skip-bos-token --no-rl-skip-bos-token, --rl-profile, --rl-profile-dir text
        """,
    ),
)
