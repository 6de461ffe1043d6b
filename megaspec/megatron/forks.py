"""Flags of forks of Megatron-LM: those that the forks' own training scripts use, and those beside them.

Facts of their arguments.py, at these commits:

    deepspeedai/Megatron-DeepSpeed                4efb479d  2025-07-16
    bigscience-workshop/Megatron-DeepSpeed        8387ae17  2023-12-07
    bigcode-project/Megatron-LM                   7c325cd3  2023-11-14
    alibaba/Pai-Megatron-Patch                    a098ca5   2025-12-15
    Ascend/MindSpeed-LLM                          c77308a1  2026-08-21
    sail-sg/zero-bubble-pipeline-parallelism      39f2c186  2025-05-07
    ROCm/Megatron-LM                              2b855baf  2024-10-22
    llm-jp/Megatron-LM                            ea80de79  2025-10-16
    swiss-ai/Megatron-LM                          81d44dbe  2025-07-15
    LumiOpen/Megatron-LM-lumi                     e0ce1d9   2025-04-25

A flag that several of them have stands under the first.
"""

from megaspec.megatron.flag import Fate, others

_DEEPSPEED = "a flag of the fork Megatron-DeepSpeed"
_BIGSCIENCE = "a flag of BigScience's fork Megatron-DeepSpeed"
_BIGCODE = "a flag of BigCode's fork of Megatron-LM"
_PAI = "a flag of the fork Pai-Megatron-Patch"
_MINDSPEED = "a flag of the fork MindSpeed-LLM"
_ZERO_BUBBLE = "a flag of sail-sg's fork zero-bubble-pipeline-parallelism"
_ROCM = "a flag of ROCm's fork of Megatron-LM"
_LLM_JP = "a flag of LLM-jp's fork of Megatron-LM"
_SWISS_AI = "a flag of Swiss AI's fork of Megatron-LM"
_LUMI = "a flag of LumiOpen's fork of Megatron-LM"
_ADD_ON = "a flag that Megatron has where one of its add-ons (ModelOpt, Kitchen) is installed"

_KERNELS = "kernels and fusions are chosen from the GPU: kernels.*"
_LAYOUT = "what is computed stays the same; parallelism.* says how it is divided"
_RECOMPUTE = "what is computed stays the same; give --recompute-granularity for parallelism.recompute"
_LOG = "the numbers of every step are in metrics.jsonl"
_TOKENS = "tokens are made beforehand by `megaspec data prepare`, whose manifest names the tokenizer"
_READING = "how data is read is the loader's"
_CHECKPOINTS = "checkpoints have one format, which loads into any layout"
_OTHER = "of another program than the pretraining of a GPT"

GROUPS = (
    others(
        _DEEPSPEED,
        Fate.LOST,
        "its file is not read, and may set the batch, clipping, the number format and the optimizer",
        "--deepspeed_config --deepscale_config",
    ),
    others(_DEEPSPEED, Fate.LOST, "no such length of the training; give --train-samples", "--train-tokens"),
    others(
        _DEEPSPEED,
        Fate.LOST,
        "no lengths in tokens; give --lr-decay-samples and --lr-warmup-samples",
        "--lr-decay-tokens --lr-warmup-tokens",
    ),
    others(_DEEPSPEED, Fate.LOST, "give --group-query-attention and --num-query-groups", "--num-key-value-heads"),
    others(_DEEPSPEED, Fate.LOST, "give --rotary-base", "--rotary-position-embeddings-theta"),
    others(
        _DEEPSPEED,
        Fate.LOST,
        "give Megatron-LM's own flags of experts: --moe-router-topk, --moe-layer-freq, --moe-aux-loss-coeff, ...",
        """
        --mlp-type --topk --expert-interval --num-experts-switch --disable-moe-token-dropping
        --moe-train-capacity-factor --moe-eval-capacity-factor --moe-min-capacity --moe-loss-coeff
        --disable-moe-top2-2nd-expert-sampling
        """,
    ),
    others(
        _DEEPSPEED,
        Fate.LOST,
        "no such data, or order of it",
        """
        --data-efficiency-curriculum-learning --train-data-exact-num-epochs --train-idx-path --train-desc-path
        --train-doc-idx-path --train-sample-idx-path --train-shuffle-idx-path --repeated-dataloader
        """,
    ),
    others(
        _DEEPSPEED,
        Fate.LOST,
        "no such training",
        """
        --random-ltd --kd --kd-alpha-ce --kd-beta-ce --kd-temp --mos --load-teacher --num-layers-teacher
        --num-experts-teacher --hidden-size-teacher --num-attention-heads-teacher --reset-iteration --inference
        --ds-inference
        """,
    ),
    others(
        _DEEPSPEED,
        Fate.LOST,
        "weights are made from the seed; checkpoints of others are not read",
        "--load-tag --no-load-lr-state --universal-checkpoint",
    ),
    others(_DEEPSPEED, Fate.LOST, "ranks drop out differently there", "--scattered-embeddings"),
    others(
        _DEEPSPEED,
        Fate.IDLE,
        "what is computed stays the same; parallelism.dp_strategy is zero1, zero2 or fsdp for ZeRO's stages 1, 2 and 3",
        """
        --zero-stage --zero-reduce-scatter --zero-contigious-gradients --zero-reduce-bucket-size
        --zero-allgather-bucket-size
        """,
    ),
    others(
        _DEEPSPEED,
        Fate.IDLE,
        "one runtime trains every recipe",
        "--deepspeed --deepscale --no-deepspeed --deepspeed_mpi --no-pipeline-parallel",
    ),
    others(
        _DEEPSPEED,
        Fate.IDLE,
        _RECOMPUTE,
        """
        --deepspeed-activation-checkpointing --partition-activations --contigious-checkpointing --checkpoint-in-cpu
        --synchronize-each-layer --split-transformers
        """,
    ),
    others(
        _DEEPSPEED,
        Fate.IDLE,
        "what is computed stays the same; give --context-parallel-size with --cp-comm-type a2a for parallelism.context",
        """
        --ds-sequence-parallel-size --force-ds-sequence-parallel --ds-sequence-parallel-fpdt
        --ds-sequence-parallel-fpdt-chunk-size --ds-sequence-parallel-fpdt-offloading
        """,
    ),
    others(
        _DEEPSPEED,
        Fate.IDLE,
        "what is computed stays the same; give --expert-model-parallel-size for parallelism.ep",
        "--moe-expert-parallel-size --enable-expert-tensor-parallelism --create-moe-param-group --use-tutel",
    ),
    others(
        _DEEPSPEED,
        Fate.IDLE,
        "what is computed stays the same; give --optimizer-cpu-offload for parallelism.offload",
        "--cpu-optimizer --cpu_torch_adam --ds_fused_adam --remote-device --use-pin-memory",
    ),
    others(
        _DEEPSPEED,
        Fate.IDLE,
        "what is computed stays the same; parallelism.pipeline.schedule is zb_h1 for it",
        "--enable-zbh1-pipeline --enable-zbh1-exact-semantics",
    ),
    others(
        _DEEPSPEED,
        Fate.IDLE,
        _KERNELS,
        """
        --use-flash-attn-v2 --use-flash-attn-triton --use-flash-attn-builder --disable-mem-efficient-ln
        --memory-centric-tiled-linear --tile-factor
        """,
    ),
    others(_DEEPSPEED, Fate.IDLE, _LOG, "--log-optimizer-states-to-tensorboard --profile-backward --profile_steps"),
    others(_DEEPSPEED, Fate.IDLE, "SIGTERM stops a run, which saves first", "--kill-switch-file"),
    others(_DEEPSPEED, Fate.IDLE, _READING, "--aml-data-download-path --return-data-index --use-dataset-only"),
    others(
        _BIGSCIENCE,
        Fate.LOST,
        "no such data, or order of it; give --data-path and --split",
        """
        --train-weighted-split-paths --valid-weighted-split-paths --test-weighted-split-paths
        --train-weighted-split-paths-path --valid-weighted-split-paths-path --test-weighted-split-paths-path
        """,
    ),
    others(
        _BIGSCIENCE,
        Fate.LOST,
        "no such norm",
        "--embed-layernorm",
    ),
    others(
        _BIGSCIENCE,
        Fate.LOST,
        "give --swiglu for swiglu; in the recipe, model.mlp={kind: gated, activation: gelu} says geglu, relu reglu",
        "--glu-activation",
    ),
    others(_BIGSCIENCE, Fate.LOST, "optim.kind is adamw or sgd", "--use-bnb-optimizer"),
    others(
        _BIGSCIENCE,
        Fate.LOST,
        "no such training",
        """
        --eval-only --skip-train-iteration-range --loss-on-targets-only --reweight-loss-based-on-position-frequency
        --noise-density --mean-noise-span-length
        """,
    ),
    others(
        _BIGSCIENCE, Fate.IDLE, "padding of the vocabulary takes no part: model.vocab_pad_to", "--pad-vocab-size-to"
    ),
    others(_BIGSCIENCE, Fate.IDLE, "ranks hold the same weights here", "--sync-tp-duplicated-parameters"),
    others(
        _BIGSCIENCE,
        Fate.IDLE,
        "what is computed stays the same; give --pipeline-model-parallel-layout for parallelism.pipeline.layout",
        "--pp-partition-method",
    ),
    others(_BIGSCIENCE, Fate.IDLE, "SIGTERM stops a run, which saves first", "--kill-switch-path"),
    others(_BIGSCIENCE, Fate.IDLE, _KERNELS, "--abort-on-unmet-fused-kernel-constraints"),
    others(_BIGSCIENCE, Fate.IDLE, _LOG, "--log-level --log-level-replica --log-path --codecarbon-dir"),
    others(_BIGSCIENCE, Fate.IDLE, _READING, "--valid-num-workers"),
    others(_BIGSCIENCE, Fate.IDLE, _TOKENS, "--tokenizer-name-or-path"),
    others(_BIGCODE, Fate.LOST, "give --group-query-attention and --num-query-groups 1", "--attention-head-type"),
    others(_BIGCODE, Fate.LOST, "give --rotary-base", "--rotary-theta"),
    others(_BIGCODE, Fate.LOST, "no such data, or order of it", "--fragment-fim-rate"),
    others(
        _BIGCODE,
        Fate.IDLE,
        _LOG,
        """
        --wandb-entity-name --wandb-project-name --transformer-timers --structured-logs --structured-logs-dir
        --sanity-check-dataloader-interval
        """,
    ),
    others(_BIGCODE, Fate.IDLE, "give --distributed-timeout-minutes", "--distributed-timeout"),
    others(_BIGCODE, Fate.IDLE, _TOKENS, "--tokenizer-file"),
    others(_PAI, Fate.LOST, "model.vocab_size has to hold it; give --padded-vocab-size", "--extra-vocab-size"),
    others(_PAI, Fate.LOST, "no such data, or order of it", "--dataset --max-padding-length --keep-last --data-dir"),
    others(_PAI, Fate.LOST, "no such training", "--train-mode --source-seq-len --target-seq-len --z-loss-weight"),
    others(
        _PAI,
        Fate.LOST,
        "no such attention or positions",
        """
        --n-head-kv --transformer-type --use-alibi-mask --use-normhead --position-encoding-2d --sliding-window
        --rotary-scale-factor --use-mistral-rotary-position-embeddings
        """,
    ),
    others(_PAI, Fate.LOST, "give --use-rotary-position-embeddings", "--use-llama2-rotary-position-embeddings"),
    others(_PAI, Fate.LOST, "give --qk-head-dim and --qk-pos-emb-head-dim", "--qk-nope-head-dim --qk-rope-head-dim"),
    others(
        _PAI,
        Fate.LOST,
        "give --disable-bias-linear; in the recipe, model.mlp.bias and model.attention.out_bias say them apart",
        "--disable-bias-linear-fc --disable-bias-attn-fc",
    ),
    others(
        _PAI,
        Fate.LOST,
        "give Megatron-LM's own flags of experts: --moe-router-topk, --moe-shared-expert-intermediate-size, ...",
        "--moe --moe-topk --router-type --enable-shared-expert --shared-moe-ffn-hidden-size --num-shared-experts",
    ),
    others(_PAI, Fate.IDLE, _TOKENS, "--patch-tokenizer-type"),
    others(
        _PAI,
        Fate.IDLE,
        "what goes to the CPU's memory is said by parallelism.offload; what is computed stays the same",
        """
        --cpu-offloading --optimizer-offload-policy --optimizer-offload-auto-threshold --optimizer-offload-chunk-size
        """,
    ),
    others(_PAI, Fate.IDLE, _KERNELS, "--use-te --moe-input-feature-slicing --disable-parallel-output"),
    others(
        _MINDSPEED,
        Fate.LOST,
        "give Megatron-LM's own flags of experts and attention",
        """
        --first-k-dense-replace --norm-topk-prob --n-shared-experts --seq-aux --shared-expert-gate
        --moe-intermediate-size --rope-scaling-type --rope-scaling-original-max-position-embeddings --beta-fast
        --beta-slow --rope-scaling-mscale --rope-scaling-mscale-all-dim --use-glm-rope --noop-layers --num-layer-list
        --sliding-window-size --interleave-sliding-window --output-logit-softcapping --query-pre-attn-scalar
        --partial-rotary-factor --enable-mla-scale-q-lora --enable-mla-scale-kv-lora --num-zero-experts
        --enable-dsa-indexer --index-topk --index-n-heads --index-head-dim --indexer-loss-coeff
        --add-output-layer-bias --fix-router --attention-mask-type
        """,
    ),
    others(
        _MINDSPEED,
        Fate.LOST,
        "in the recipe, model.layer={kind: sequential, norms: sandwich} says it",
        "--post-norm",
    ),
    others(_MINDSPEED, Fate.LOST, "give --apply-layernorm-1p", "--add-rmsnorm-offset"),
    others(
        _MINDSPEED,
        Fate.LOST,
        "in the recipe, model.embedding_scale, here the root of model.d_model, says it",
        "--input-embeds-norm",
    ),
    others(
        _MINDSPEED,
        Fate.LOST,
        "in the recipe, model.mlp={kind: gated, activation: gelu_tanh} says it, activation gelu --geglu",
        "--gelu-tanh --geglu",
    ),
    others(_MINDSPEED, Fate.LOST, "in the recipe, model.attention.out_bias says it", "--add-dense-bias"),
    others(
        _MINDSPEED,
        Fate.IDLE,
        _KERNELS,
        """
        --use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb --use-fused-ring-attention-update
        --use-fused-moe-token-permute-and-unpermute --gemm-gradient-accumulation-fusion --mla-fa-without-pad
        --mla-mm-split --shape-order --coc-fused-kernel
        """,
    ),
    others(
        _MINDSPEED,
        Fate.IDLE,
        _LAYOUT,
        """
        --context-parallel-algo --ulysses-degree-in-cp --use-cp-send-recv-overlap --moe-permutation-async-comm
        --moe-alltoall-overlap-comm --moe-fb-overlap --moe-tp-extend-ep --use-ascend-mc2 --use-ascend-coc
        --disable-gloo-group --hccl-op-mode --schedules-method --reuse-fp32-param --swap-optimizer
        --swap-optimizer-times --swap-attention --recompute-activation-function --recompute-in-advance
        --enable-recompute-layers-per-pp-rank --moe-zero-memory --mtp-mem-efficient-logits
        """,
    ),
    others(_MINDSPEED, Fate.IDLE, _READING, "--no-shared-storage --handler-name --ai-framework"),
    others(
        _MINDSPEED,
        Fate.IDLE,
        _CHECKPOINTS,
        "--enable-hf2mg-convert --enable-mg2hf-convert --model-type-hf --hf-cfg-dir",
    ),
    others(
        _ZERO_BUBBLE,
        Fate.IDLE,
        "what is computed stays the same; parallelism.pipeline.schedule is zb_h1 or zb_v for it",
        """
        --enable-zero-bubble --zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup --enable-zb-runtime
        --zero-bubble-max-pending-backward --zero-bubble-adaptive-memory-limit-percentile
        --zero-bubble-pipeline-timers-start-iter --zero-bubble-pipeline-timers-end-iter
        --no-pre-communication-optimization --enable-1f1b-v --interleave-group-size
        """,
    ),
    others(
        _ZERO_BUBBLE,
        Fate.IDLE,
        "every update waits for the norm of the whole gradient",
        "--enable-optimizer-post-validation --enable-exactly-numeric-match",
    ),
    others(
        _ZERO_BUBBLE,
        Fate.IDLE,
        "what goes to the CPU's memory is said by parallelism.offload; what is computed stays the same",
        """
        --cpu-offload --offload-chunk-num --offload-time --auto-offload-time --offload-overlap-sr
        --offload-continuous-buffers --no-paired-barrier --recompute-lgd
        """,
    ),
    others(_ZERO_BUBBLE, Fate.IDLE, _LAYOUT, "--num-seq-splits --allow-padding-num-layers"),
    others(_ZERO_BUBBLE, Fate.IDLE, _LOG, "--measure-activation-memory --profile-memory-iter"),
    others(_ROCM, Fate.IDLE, _KERNELS, "--disable-te-fused-rope"),
    others(_LLM_JP, Fate.LOST, "no loss of the logits' size", "--use-z-loss --z-loss-strength"),
    others(_LLM_JP, Fate.IDLE, "the launcher tells each rank its number", "--use-mpi"),
    others(
        _SWISS_AI,
        Fate.LOST,
        "no such norm, activation or start of weights",
        """
        --xielu --xiprelu --xiprelup --no-attn-layernorm --no-mlp-layernorm --no-final-layernorm --layernorm-init
        """,
    ),
    others(
        _SWISS_AI,
        Fate.LOST,
        "in the recipe, model.layer={kind: sequential, norms: post} says it",
        "--post-layer-norm",
    ),
    others(_SWISS_AI, Fate.LOST, "in the recipe, model.embedding_scale says it", "--input-embeddings-multiplier"),
    others(
        _SWISS_AI,
        Fate.LOST,
        "optim.kind is adamw or sgd",
        "--ademamix-beta3 --ademamix-alpha --ademamix-beta3-warmup --ademamix-alpha-warmup",
    ),
    others(_SWISS_AI, Fate.LOST, "no such loss", "--goldfish-loss --goldfish-k --goldfish-h"),
    others(_SWISS_AI, Fate.IDLE, _KERNELS, "--qknorm-impl"),
    others(_SWISS_AI, Fate.IDLE, "SIGTERM stops a run, which saves first", "--trigger-path"),
    others(_SWISS_AI, Fate.IDLE, _LOG, "--log-params-norm-per-param"),
    others(_LUMI, Fate.LOST, "give --rotary-base", "--rope-theta"),
    others(_LUMI, Fate.IDLE, _LOG, "--wandb-name --wandb-step-offset"),
    others(_LUMI, Fate.IDLE, _TOKENS, "--hf_tokenizer_path"),
    others(
        _ADD_ON,
        Fate.LOST,
        "no such training",
        """
        --export-model-type --export-legacy-megatron --export-te-mcore-model --export-default-te-spec
        --export-force-local-attention --export-kv-cache-quant --export-real-quant-cfg --export-quant-cfg
        --export-kd-cfg --export-kd-teacher-load --export-kd-teacher-ckpt-format --export-kd-teacher-model-config
        --export-qk-l2-norm --export-moe-apply-probs-on-input --export-offline-model --finetune-hf-dataset
        --finetune-data-split --finetune-data-files --modelopt-enabled --qad-train-target --freeze-base-for-mtp
        --enable-gpt-oss --kitchen-config-file --kitchen-recipe-number
        """,
    ),
)
"""All of them."""
