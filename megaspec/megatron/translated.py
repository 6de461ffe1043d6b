"""Flags that a recipe can say, and where it says them."""

from megaspec.megatron.flag import Fate, Group

_MODEL = """
--num-layers int -> model.n_layers
--encoder-num-layers int -> model.n_layers
--hidden-size int -> model.d_model
--num-attention-heads int -> model.n_heads
--group-query-attention -> model.n_kv_heads
--num-query-groups int = 1 -> model.n_kv_heads
--ffn-hidden-size int -> model.d_ffn
--kv-channels int -> model.d_head
--hidden-dropout float = 0.1 -> model.dropout
--attention-dropout float = 0.1 -> model.attention_dropout
--norm-epsilon float = 1e-05 -> model.norm_eps
--normalization LayerNorm|RMSNorm = LayerNorm -> model.kind
--swiglu -> model.kind
--disable-bias-linear -> model.kind
--add-qkv-bias -> model.kind
--position-embedding-type learned_absolute|rope|yarn|mrope|relative|none = learned_absolute -> model.kind
--use-rotary-position-embeddings -> model.kind
--no-position-embedding -> model.kind
--rotary-base int = 10000 -> model.rope_base
--use-rope-scaling -> model.rope_scaling
--rope-scaling-factor float = 8.0 -> model.rope_scaling.factor
--qk-layernorm -> model.qk_norm
--untie-embeddings-and-output-weights -> model.tied_embeddings
--max-position-embeddings int -> model.max_seq_len
--init-method-std float = 0.02 -> model.init_std
--embedding-init-method-std float -> model.init_std
--vocab-size int -> model.vocab_size
--padded-vocab-size int -> model.vocab_size
--tokenizer-type text -> model.vocab_size
--tokenizer-model text -> model.vocab_size
--make-vocab-size-divisible-by int = 128 -> model.vocab_pad_to
--multi-latent-attention -> model.mla
--q-lora-rank int -> model.mla.q_rank
--kv-lora-rank int = 32 -> model.mla.kv_rank
--qk-head-dim int = 128 -> model.mla.d_nope
--qk-pos-emb-head-dim int = 64 -> model.mla.d_rope
--v-head-dim int = 128 -> model.mla.d_value
--rope-type rope|yarn -> model.rope_scaling
--rotary-scaling-factor float = 1.0 -> model.rope_scaling
"""
_EXPERTS = """
--num-experts int -> model.moe.n_experts
--moe-router-topk int = 2 -> model.moe.top_k
--moe-ffn-hidden-size int -> model.moe.d_expert
--moe-layer-freq text = 1 -> model.moe.every
--moe-shared-expert-intermediate-size int -> model.moe.d_shared
--moe-shared-expert-gate -> model.moe.shared_gate
--moe-router-score-function softmax|sigmoid|sqrtsoftplus = softmax -> model.moe.router.score
--moe-router-pre-softmax -> model.moe.router.softmax_first
--moe-router-topk-scaling-factor float -> model.moe.router.scale
--moe-router-num-groups int -> model.moe.router.n_groups
--moe-router-group-topk int -> model.moe.router.group_top_k
--moe-router-enable-expert-bias -> model.moe.router.bias_rate
--moe-router-bias-update-rate float = 0.001 -> model.moe.router.bias_rate
--moe-router-load-balancing-type aux_loss|seq_aux_loss|global_aux_loss|sinkhorn|quantile_balancing|none+ = aux_loss -> model.moe.router.losses
--moe-aux-loss-coeff float+ = 0.0 -> model.moe.router.losses
--moe-z-loss-coeff float -> model.moe.router.z_loss
--moe-input-jitter-eps float -> model.moe.router.jitter
--moe-expert-capacity-factor float -> model.moe.capacity_factor
--moe-pad-expert-input-to-capacity -> model.moe.pad_to_capacity
--moe-token-drop-policy probs|position = probs -> model.moe.drop
--moe-token-dispatcher-type allgather|alltoall|flex = allgather -> parallelism.dispatch
"""  # noqa: E501
_LAYOUT = """
--tensor-model-parallel-size int = 1 -> parallelism.tp
--pipeline-model-parallel-size int = 1 -> parallelism.pp
--context-parallel-size int = 1 -> parallelism.cp
--expert-model-parallel-size int = 1 -> parallelism.ep
--expert-tensor-parallel-size int -> parallelism.etp
--sequence-parallel -> parallelism.sequence_parallel
--use-distributed-optimizer -> parallelism.dp_strategy
--use-torch-fsdp2 -> parallelism.dp_strategy
--use-megatron-fsdp -> parallelism.dp_strategy
--data-parallel-sharding-strategy no_shard|optim|optim_grads|optim_grads_params = optim_grads_params -> parallelism.dp_strategy
--num-distributed-optimizer-instances int = 1 -> parallelism.dp_replicate
--cp-comm-type p2p|all_gather|a2a|a2a+p2p+ = p2p -> parallelism.context.kind
--hierarchical-context-parallel-sizes int+ -> parallelism.context.factors
--num-layers-per-virtual-pipeline-stage int -> parallelism.pipeline.virtual_stages
--num-virtual-stages-per-pipeline-rank int -> parallelism.pipeline.virtual_stages
--microbatch-group-size-per-virtual-pipeline-stage int -> parallelism.pipeline.micro_batch_group
--pipeline-model-parallel-layout text -> parallelism.pipeline.layout
--decoder-first-pipeline-num-layers int -> parallelism.pipeline.first_layers
--decoder-last-pipeline-num-layers int -> parallelism.pipeline.last_layers
--account-for-embedding-in-pipeline-split -> parallelism.pipeline.count_embedding
--account-for-loss-in-pipeline-split -> parallelism.pipeline.count_loss
--recompute-activations -> parallelism.recompute.kind
--recompute-granularity full|selective -> parallelism.recompute.kind
--recompute-modules text+ -> parallelism.recompute.parts
--recompute-method uniform|block -> parallelism.recompute.method
--recompute-num-layers int -> parallelism.recompute.layers
--moe-layer-recompute -> parallelism.recompute.parts
--grad-reduce-in-bf16 -> parallelism.grad_reduce
--ddp-bucket-size int -> parallelism.bucket_mb
--distributed-timeout-minutes int = 10 -> launcher.timeout_seconds
"""  # noqa: E501
_PRECISION = """
--bf16 -> precision.kind
--fp16 -> precision.kind
--initial-loss-scale float = 4294967296 -> precision.initial_scale
--min-loss-scale float = 1.0 -> precision.min_scale
--loss-scale-window float = 1000 -> precision.growth_interval
--hysteresis int = 2 -> precision.hysteresis
--fp8-format e4m3|hybrid -> precision.format
--fp8-recipe tensorwise|delayed|mxfp8|blockwise|custom = delayed -> precision.recipe
--fp8-param-gather -> precision.gather_fp8
--first-last-layers-bf16 -> precision.first_layers_bf16
--num-layers-at-start-in-bf16 int = 1 -> precision.first_layers_bf16
--num-layers-at-end-in-bf16 int = 1 -> precision.last_layers_bf16
--accumulate-allreduce-grads-in-fp32 -> parallelism.grad_reduce
"""
_OPTIMIZER = """
--optimizer adam|sgd|muon|dist_muon|lion|soap|adaptive_muon = adam -> optim.kind
--lr float -> optim.lr
--min-lr float = 0.0 -> optim.schedule.min_lr
--lr-warmup-init float = 0.0 -> optim.schedule.init_lr
--lr-decay-style constant|linear|cosine|inverse-square-root|WSD = linear -> optim.schedule.kind
--lr-decay-iters int -> optim.schedule.decay_steps
--lr-decay-samples int -> optim.schedule.decay_steps
--lr-warmup-iters int = 0 -> optim.schedule.warmup_steps
--lr-warmup-samples int = 0 -> optim.schedule.warmup_steps
--lr-warmup-fraction float -> optim.schedule.warmup_steps
--lr-wsd-decay-style exponential|linear|cosine|minus_sqrt = exponential -> optim.schedule.wsd_decay
--lr-wsd-decay-iters int -> optim.schedule.wsd_decay_steps
--lr-wsd-decay-samples int -> optim.schedule.wsd_decay_steps
--weight-decay float = 0.01 -> optim.weight_decay
--start-weight-decay float -> optim.weight_decay
--end-weight-decay float -> optim.weight_decay_ramp.end
--weight-decay-incr-style constant|linear|cosine = constant -> optim.weight_decay_ramp.kind
--clip-grad float = 1.0 -> optim.clip
--adam-beta1 float = 0.9 -> optim.beta1
--adam-beta2 float = 0.999 -> optim.beta2
--adam-eps float = 1e-08 -> optim.eps
--sgd-momentum float = 0.9 -> optim.momentum
--use-precision-aware-optimizer -> optim.formats
--main-params-dtype fp32|fp16 = fp32 -> optim.formats.master
--exp-avg-dtype fp32|fp16|bf16|fp8 = fp32 -> optim.formats.exp_avg
--exp-avg-sq-dtype fp32|fp16|bf16|fp8 = fp32 -> optim.formats.exp_avg_sq
"""
_RUN = """
--micro-batch-size int -> train.micro_batch
--global-batch-size int -> train.global_batch
--decrease-batch-size-if-needed -> train.global_batch
--step-batch-size-schedule text -> train.batch_ramp
--train-iters int -> train.steps
--train-samples int -> train.steps
--seed int = 1234 -> train.seed
--deterministic-mode -> train.deterministic
--calculate-per-token-loss -> data.document_mask
--eval-interval int -> train.eval_every
--eval-iters int = 100 -> train.eval_samples
--seq-length int -> data.seq_len
--encoder-seq-length int -> data.seq_len
--data-path text* -> data.blend
--train-data-path text* -> data.blend
--mock-data -> data.kind
--split text = 969,30,1 -> data.split
--data-cache-path text -> data.cache
--reset-position-ids -> data.document_mask
--reset-attention-mask -> data.document_mask
--eod-mask-loss -> data.document_mask
--save text -> checkpoint
--save-interval --persistent-save-interval int -> checkpoint.every
--load text -> checkpoint
--async-save -> checkpoint
--log-interval int = 100 -> log.every
--tensorboard-dir text -> log.tensorboard
"""

GROUPS = tuple(Group(Fate.TRANSLATED, "", t) for t in (_MODEL, _EXPERTS, _LAYOUT, _PRECISION, _OPTIMIZER, _RUN))
