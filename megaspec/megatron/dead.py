"""Flags that Megatron parses and reads nowhere, and flags that it refuses."""

from megaspec.megatron.flag import Fate, FlagGroup

GROUPS = (
    FlagGroup(
        Fate.DEAD,
        "Megatron parses it and reads it nowhere",
        """
        --onnx-safe text, --rampup-batch-size text+,
        --exit-signal-handler-for-dataloader, --use-flash-attn, --dist-ckpt-save-pre-mcore-014,
        --enable-full-sharding-in-hsdp, --vocab-extra-ids text, --ict-head-size text, --biencoder-projection-dim text,
        --biencoder-shared-query-context-model, --ict-load text, --bert-load text, --titles-data-path text,
        --query-in-block-prob text, --use-one-sent-docs, --evidence-data-path text,
        --retriever-report-topk-accuracies text+, --retriever-score-scaling, --block-data-path text,
        --embedding-path text, --indexer-batch-size text, --indexer-log-interval text, --classes-fraction text,
        --data-per-class-fraction text, --no-data-sharding, --head-lr-mult text, --vision-backbone-type text,
        --swin-backbone-type text, --mask-type text, --mask-factor text, --iter-per-epoch text,
        --dino-local-img-size text, --dino-local-crops-number text, --dino-head-hidden-size text,
        --dino-bottleneck-size text, --dino-freeze-last-layer text, --dino-norm-last-layer,
        --dino-warmup-teacher-temp text, --dino-teacher-temp text, --dino-warmup-teacher-temp-epochs text,
        --max-tokens-to-oom text, --bert-embedder-type text, --inference-shards text, --inprocess-max-iterations text,
        --inprocess-progress-watchdog-interval text
        """,
    ),
    FlagGroup(
        Fate.DEAD,
        "only models of before Megatron-core read it, which are gone since core_v0.18.0 (June 2026)",
        """
        --apply-residual-connection-post-layernorm, --openai-gelu
        """,
    ),
    FlagGroup(
        Fate.REMOVED,
        "--micro-batch-size",
        """
        --batch-size text
        """,
    ),
    FlagGroup(
        Fate.REMOVED,
        "--lr-warmup-fraction",
        """
        --warmup text
        """,
    ),
    FlagGroup(
        Fate.REMOVED,
        "--tensor-model-parallel-size",
        """
        --model-parallel-size text
        """,
    ),
    FlagGroup(
        Fate.REMOVED,
        "--recompute-activations",
        """
        --checkpoint-activations
        """,
    ),
)
