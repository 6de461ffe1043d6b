"""Flags without a counterpart: those that change nothing that is computed, those that do, and their details."""

from megaspec.megatron.flag import Fate, FlagGroup

GROUPS = (
    FlagGroup(
        Fate.ABSENT,
        "what goes to the CPU's memory is said by parallelism.offload; what is computed stays the same",
        """
        --cpu-offloading-retain-pinned-cpu-buffers,
        --fine-grained-activation-offloading, --offload-modules text+, --min-offloaded-tensor-size text,
        --delay-offload-until-cuda-graph, --delta-offload-bytes-across-pp-ranks text,
        --activation-offload-fraction text, --fine-grained-offloading-max-inflight-offloads text,
        --use-torch-optimizer-for-cpu-offload,
        --overlap-cpu-optimizer-d2h-h2d, --no-pin-cpu-grads, --no-pin-cpu-params, --moe-paged-stash,
        --moe-paged-stash-page-size text, --moe-paged-stash-buffer-size-factor-cuda text,
        --moe-paged-stash-buffer-size-factor-cpu text
        """,
    ),
    FlagGroup(
        Fate.ABSENT,
        "this division of the work has no counterpart; what is computed stays the same",
        """
        --tensor-parallel-num-weight-shards text, --expert-tensor-parallel-num-weight-shards text,
        --gtp-remat-nccl-ub, --gtp-expert-remat-nccl-ub, --gtp-remat-reduce-scatter-with-fp32-accumulation,
        --gtp-remat-opt-in-modules text+,
        --hybrid-context-parallel, --max-seqlen-per-dp-cp-rank text, --outer-dp-sharding-strategy text,
        --torch-fsdp2-no-reshard-after-forward,
        --distribute-saved-activations, --mtp-standalone, --mlp-chunks-for-training text
        """,
    ),
    FlagGroup(
        Fate.ABSENT,
        "no CUDA graphs are captured here; what is computed stays the same",
        """
        --enable-cuda-graph, --cuda-graph-warmup-steps text, --external-cuda-graph, --cuda-graph-impl text,
        --cuda-graph-scope text+, --cuda-graph-modules text+, --optimizer-cuda-graph, --te-rng-tracker
        """,
    ),
    FlagGroup(
        Fate.ABSENT,
        "nothing overlaps in this way here; what is computed stays the same",
        """
        --overlap-moe-expert-parallel-comm, --delay-wgrad-compute, --overlap-dispatch-backward-with-experts-wgrad,
        --ep-overlap-early-attn-memory-release, --defer-embedding-wgrad-compute, --wgrad-deferral-limit text,
        --overlap-param-gather-with-optimizer-step, --overlap-p2p-communication-warmup-flush
        """,
    ),
    FlagGroup(
        Fate.ABSENT,
        "tokens reach experts through the collectives of torch.distributed; what is computed stays the same",
        """
        --moe-flex-dispatcher-backend text, --moe-enable-deepep, --moe-flex-dispatcher-num-sms text,
        --moe-deepep-num-sms text, --moe-hybridep-num-sms text, --moe-hybridep-num-blocks-permute text,
        --moe-hybridep-num-blocks-unpermute text, --moe-hybridep-num-sms-preprocessing text,
        --moe-hybridep-pad-uneven-dispatch-inputs, --moe-ncclep-zero-copy, --high-priority-a2a-comm-stream
        """,
    ),
    FlagGroup(
        Fate.ABSENT,
        "not measured or written here; what is trained stays the same",
        """
        --log-params-norm, --log-num-zeros-in-grad, --log-max-attention-logit, --log-energy, --timing-log-level text,
        --timing-log-option text, --log-timers-to-tensorboard, --no-barrier-with-level-1-timing,
        --wandb-project text, --wandb-exp-name text, --wandb-save-dir text, --wandb-entity text,
        --config-logger-dir text, --dump-param-to-param-group-map text,
        --save-params-interval text, --save-activations-interval text, --save-tokens-per-expert-interval text,
        --save-wgrads-interval text, --save-dgrads-interval text, --moe-routing-trace-path text,
        --moe-routing-trace-max-training-iters text, --moe-routing-trace-capture-logits,
        --moe-routing-trace-capture-hidden-states, --moe-routing-trace-dump-weights, --otel-enabled,
        --otel-service-name text, --otel-span-groups text, --no-one-logger, --one-logger-project text,
        --one-logger-run-name text, --one-logger-async, --app-tag-run-name text, --app-tag-run-version text,
        --log-straggler, --straggler-ctrlr-port text, --straggler-minmax-count text, --disable-straggler-on-startup
        """,
    ),
    FlagGroup(
        Fate.ABSENT,
        "a recipe starts no profiler; what is trained stays the same",
        """
        --profile, --profile-step-start text, --profile-step-end text, --use-pytorch-profiler,
        --pytorch-profiler-collect-shapes, --pytorch-profiler-collect-callstack, --pytorch-profiler-collect-chakra,
        --profile-ranks text+, --record-memory-history, --memory-snapshot-path text, --record-shapes, --nvtx-ranges
        """,
    ),
    FlagGroup(
        Fate.ABSENT,
        "no such check of results, gradients or GPUs here; what is trained stays the same",
        """
        --check-for-large-grads, --check-for-spiky-loss, --rerun-mode text, --result-rejected-tracker-filename text,
        --gpu-sniff-test-interval text, --check-weight-hash-across-dp-replicas-interval text,
        --error-injection-rate text, --error-injection-type text, --test-mode, --fault-injector-ranks text,
        --fault-injector-num-ranks text, --fault-injector-fault-types text, --fault-injector-fault-probabilities text,
        --fault-injector-fault-delay text, --fault-injector-delay-start-iteration text,
        --fault-injector-mtti-seconds text, --fault-injector-offset-seconds text, --fault-injector-seed text,
        --run-workload-inspector-server
        """,
    ),
    FlagGroup(
        Fate.ABSENT,
        "a run goes on to train.steps, or until SIGTERM or Ctrl-C, which saves first",
        """
        --exit-interval text, --exit-duration-in-mins text, --exit-signal text, --exit-signal-handler,
        --exit-signal-handler-for-training, --adlr-autoresume, --adlr-autoresume-interval text
        """,
    ),
    FlagGroup(
        Fate.ABSENT,
        "checkpoints are full ones in the run folder: checkpoint.every, checkpoint.keep",
        """
        --non-persistent-save-interval text, --non-persistent-ckpt-type text,
        --non-persistent-global-ckpt-dir text, --non-persistent-local-ckpt-dir text,
        --non-persistent-local-ckpt-algo text, --replication, --replication-jump text, --replication-factor text,
        --no-save-optim, --no-save-rng
        """,
    ),
    FlagGroup(
        Fate.ABSENT,
        "evaluation takes train.eval_samples of one validation split every train.eval_every steps",
        """
        --start-eval-at-iter text, --eval-micro-batch-size text, --full-validation,
        --multiple-validation-sets, --validation-set-names text+, --test-data-path text*
        """,
    ),
    FlagGroup(
        Fate.LOST,
        "weights are made from the seed and all of them are trained",
        """
        --pretrained-checkpoint text, --moe-use-upcycling, --freeze-all-layers
        """,
    ),
    FlagGroup(
        Fate.IDLE,
        "a resumed run keeps its schedule; another one asks for megaspec resume RUN --fork NEW, counted from step 0 as "
        "there, or with optim.schedule.first_step=auto from the fork",
        """
        --override-opt_param-scheduler --override-opt-param-scheduler
        """,
    ),
    FlagGroup(
        Fate.IDLE,
        "a resumed run keeps its schedule and refuses another one, where Megatron takes the checkpoint's in its place",
        """
        --use-checkpoint-opt_param-scheduler --use-checkpoint-opt-param-scheduler
        """,
    ),
    FlagGroup(
        Fate.DETAIL,
        "--load",
        """
        --load-main-params-from-ckpt, --finetune, --ckpt-step text, --no-load-optim, --no-load-rng,
        --override-ckpt-iteration text, --use-checkpoint-args, --use-mp-args-from-checkpoint-args,
        --exit-on-missing-checkpoint,
        --auto-detect-ckpt-format,
        --no-use-tokenizer-model-from-checkpoint-args --disable-use-tokenizer-model-from-checkpoint-args
        """,
    ),
    FlagGroup(
        Fate.LOST,
        "in the recipe, model.attention.mask, .sinks or .output_gate says it",
        """
        --softmax-type text = vanilla, --window-size text, --attention-output-gate
        """,
    ),
    FlagGroup(
        Fate.LOST,
        "no such attention",
        """
        --qk-l2-norm, --qk-clip,
        --experimental-attention-variant text, --linear-attention-freq text, --no-rope-freq text
        """,
    ),
    FlagGroup(
        Fate.LOST,
        "no such positions",
        """
        --rotary-interleaved, --mrope-section text+, --yarn-original-max-position-embeddings text
        """,
    ),
    FlagGroup(
        Fate.LOST,
        "no such activation or residual stream",
        """
        --fp32-residual-connection, --glu-linear-offset text = 0.0, --activation-func-clamp-value text,
        --enable-mhc-connections
        """,
    ),
    FlagGroup(
        Fate.LOST,
        "no such layers",
        """
        --mtp-num-layers text, --is-hybrid-model, --hybrid-layer-pattern text, --hybrid-override-pattern text,
        --spec text*, --heterogeneous-layers-config-path text, --heterogeneous-layers-config-encoded-json text,
        --decoder-num-layers text, --moe-latent-size text
        """,
    ),
    FlagGroup(
        Fate.LOST,
        "weights start differently",
        """
        --init-method-xavier-uniform, --use-mup
        """,
    ),
    FlagGroup(
        Fate.LOST,
        "no such routing of tokens to experts",
        """
        --moe-enable-routing-replay, --moe-router-force-load-balancing, --moe-router-force-biased text,
        --moe-apply-probs-on-input, --moe-expert-rank-capacity-factor text
        """,
    ),
    FlagGroup(
        Fate.LOST,
        "no such number format",
        """
        --fp8-quantizer-factory text, --no-fp8-wgrad --disable-fp8-wgrad, --fp8-output-proj,
        --fp4-quantizer-factory text, --fp4-param-gather, --te-precision-config-file text,
        --main-grads-dtype text = fp32, --moe-dispatch-fwd-dtype text = bf16, --moe-combine-bwd-dtype text = bf16
        """,
    ),
    FlagGroup(
        Fate.LOST,
        "the loss scale of fp16 is dynamic here, and the other formats have none",
        """
        --loss-scale text
        """,
    ),
    FlagGroup(
        Fate.LOST,
        "the file is not read; give what it says as flags",
        """
        --yaml-cfg text
        """,
    ),
    FlagGroup(
        Fate.LOST,
        "no such learning rate or weight decay",
        """
        --decoupled-lr text, --decoupled-min-lr text, --apply-wd-to-qk-layernorm, --no-weight-decay-cond-type text
        """,
    ),
    FlagGroup(
        Fate.LOST,
        "cyclic draws the order of samples anew on every pass, each data-parallel rank within a share of its own, so "
        "it depends on dp and on the micro batch, and external is a loader of one's own; samples here come in the "
        "order of --dataloader-type single, shuffled too and the same for every layout: leave the flag out, or give "
        "single, to train on the same samples in that order (the data's README: Megatron's cyclic order)",
        """
        --dataloader-type text = single
        """,
    ),
    FlagGroup(
        Fate.LOST,
        "no such data, or order of it",
        """
        --data-args-path text,
        --phase-transition-iterations text, --dataloader-inter-document-masking, --fim-data, --sft,
        --iterations-to-skip text+, --mid-level-dataset-surplus text = 0.005
        """,
    ),
    FlagGroup(
        Fate.LOST,
        "labels that are the tokenizer's padding are left out of the loss there; here all labels count",
        """
        --allow-ambiguous-pad-tokens
        """,
    ),
    FlagGroup(
        Fate.LOST,
        "no such training",
        """
        --perform-rl-step, --vision-pretraining, --skip-train, --logits-save-dir text, --logits-load-dir text
        """,
    ),
    FlagGroup(
        Fate.DETAIL,
        "--experimental-attention-variant",
        """
        --dsa-indexer-n-heads text, --dsa-indexer-head-dim text, --dsa-indexer-topk text, --dsa-indexer-topk-freq text,
        --dsa-indexer-skip-topk-offset text, --dsa-indexer-loss-coeff text, --dsa-indexer-use-sparse-loss,
        --dsa-kernel-backend text, --dsa-indexer-rope-interleaved,
        --no-dsa-indexer-rotate-activation --disable-dsa-indexer-rotate-activation,
        --no-dsa-indexer-scoring-relu --disable-dsa-indexer-scoring-relu, --dsa-indexer-k-norm-epsilon text,
        --dsa-indexer-k-norm-fp32, --linear-conv-kernel-dim text, --linear-key-head-dim text,
        --linear-value-head-dim text, --linear-num-key-heads text, --linear-num-value-heads text
        """,
    ),
    FlagGroup(
        Fate.DETAIL,
        "--qk-clip",
        """
        --qk-clip-alpha text, --qk-clip-threshold text
        """,
    ),
    FlagGroup(
        Fate.DETAIL,
        "--mtp-num-layers",
        """
        --mtp-loss-scaling-factor text, --mtp-use-repeated-layer, --mtp-detach-heads, --mtp-hsm,
        --mtp-hybrid-override-pattern text
        """,
    ),
    FlagGroup(
        Fate.DETAIL,
        "--use-mup",
        """
        --mup-width-mult text, --mup-base-hidden-size text, --mup-embedding-mult text, --mup-output-mult text,
        --mup-base-head-dim text, --mup-attn-scale-power text
        """,
    ),
    FlagGroup(
        Fate.DETAIL,
        "--enable-mhc-connections",
        """
        --mhc-num-residual-streams text, --mhc-sinkhorn-iterations text, --mhc-init-gating-factor text,
        --mhc-recompute-layer-num text
        """,
    ),
    FlagGroup(
        Fate.DETAIL,
        "--hybrid-layer-pattern",
        """
        --mamba-state-dim text, --mamba-head-dim text, --mamba-num-groups text, --mamba-num-heads text,
        --gdp-num-householder text, --disable-mamba-mem-eff-path, --gdp-cutedsl-kernel,
        --gdp-num-chunk-states-to-recompute text, --mamba-training-ssm-states-dtype text
        """,
    ),
    FlagGroup(
        Fate.DETAIL,
        "--optimizer",
        """
        --muon-momentum text, --muon-no-split-qkv, --muon-nesterov, --muon-scale-mode text,
        --muon-fp32-matmul-prec text, --muon-coefficient-type text, --muon-num-ns-steps text, --muon-tp-mode text,
        --muon-use-syrk, --muon-extra-scale-factor text, --muon-scalar-optimizer text, --lion-beta1 text,
        --lion-beta2 text
        """,
    ),
    FlagGroup(
        Fate.DETAIL,
        "--fim-data",
        """
        --fim-rate text, --fim-spm-rate text, --fim-split-sample text, --fim-fragment-rate text, --fim-no-prefix text,
        --fim-prefix-token text, --fim-middle-token text, --fim-suffix-token text, --fim-pad-token text,
        --fim-eod-token text
        """,
    ),
    FlagGroup(
        Fate.DETAIL,
        "--position-embedding-type",
        """
        --yarn-beta-fast text, --yarn-beta-slow text, --yarn-correction-range-round-to-int,
        --no-yarn-correction-range-round-to-int, --relative-attention-num-buckets text,
        --relative-attention-max-distance text
        """,
    ),
    FlagGroup(
        Fate.DETAIL,
        "--rotary-scaling-factor",
        """
        --mscale text, --mscale-all-dim text
        """,
    ),
    FlagGroup(
        Fate.DETAIL,
        "--window-size",
        """
        --window-attn-skip-freq text
        """,
    ),
    FlagGroup(
        Fate.DETAIL,
        "--moe-use-upcycling",
        """
        --moe-upcycling-granularity text
        """,
    ),
    FlagGroup(
        Fate.DETAIL,
        "--moe-router-load-balancing-type",
        """
        --moe-router-quantile-balancing-ema text
        """,
    ),
    FlagGroup(
        Fate.DETAIL,
        "--sft",
        """
        --sft-tokenizer-prompt-format text
        """,
    ),
    FlagGroup(
        Fate.DETAIL,
        "--logits-save-dir",
        """
        --logits-save-top-k text, --logits-save-top-p text, --logits-save-top-p-min-k text, --logits-save-dtype text
        """,
    ),
    FlagGroup(
        Fate.DETAIL,
        "--logits-load-dir",
        """
        --logits-load-decode-threads text, --logits-load-prefetch-factor text, --logits-load-msc-prefetch-depth text,
        --logits-load-kd-loss-alpha text, --logits-load-ignore-errors
        """,
    ),
)
