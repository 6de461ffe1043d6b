"""Flags of trainings that others published, with where they stand. Paths and names are shortened.

What a script takes from its environment or from its scheduler is put in, and said.
"""

# Hugging Face's blog "How to train a Language Model with Megatron-LM" (2022), CodeParrot-small on 8 GPUs:
# https://huggingface.co/blog/megatron-training
CODEPARROT_SMALL = """
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-layers 12 --hidden-size 768
--num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 12
--global-batch-size 192 --lr 0.0005 --train-iters 150000 --lr-decay-iters 150000 --lr-decay-style cosine
--lr-warmup-iters 2000 --weight-decay .1 --adam-beta2 .999 --fp16 --log-interval 10 --save-interval 2000
--eval-interval 200 --eval-iters 10 --vocab-file vocab.json --merge-file merges.txt --save codeparrot --load codeparrot
--data-path codeparrot_content_document --tensorboard-dir tensorboard
"""
# AWS, awsome-distributed-training at 7217859f, a GPT of 39B in its shape for up to 4 nodes, here 2 of 8 GPUs:
# https://github.com/aws-samples/awsome-distributed-training
# 3.test_cases/megatron/megatron-lm/slurm/gpt3/2.distributed-training.sbatch
AWS_GPT3 = """
torchrun --nproc_per_node=8 --nnodes=2 pretrain_gpt.py
--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --num-layers 36 --hidden-size 4096
--num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1
--global-batch-size 288 --train-samples 146484375 --lr-decay-samples 126953125 --lr-warmup-samples 183105
--lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --log-interval 1 --eval-iters 40 --eval-interval 1000
--data-path gpt2_text_document --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --split 98,2,0
--clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --fp16
--recompute-activations
"""
# The same repository, Llama 2 70B on 2 nodes of 8 GPUs:
# 3.test_cases/megatron/megatron-lm/slurm/llama2/pretrain-llama2.sbatch
AWS_LLAMA2 = """
torchrun --nproc_per_node=8 --nnodes=2 pretrain_gpt.py
--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --group-query-attention --num-query-groups 8
--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer
--overlap-grad-reduce --overlap-param-gather --untie-embeddings-and-output-weights --position-embedding-type rope
--no-position-embedding --normalization RMSNorm --swiglu --no-masked-softmax-fusion --no-rope-fusion
--use-flash-attn --transformer-impl transformer_engine --seq-length 4096 --max-position-embeddings 4096
--micro-batch-size 1 --global-batch-size 2048 --train-iters 5 --split 100,0,0 --use-mcore-models --log-throughput
--lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --log-interval 1 --eval-iters 0
--data-path llama2_text_document --tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model
--clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --wandb-exp-name llama2-megatron-lm
--wandb-project megatron-lm --init-method-std 0.006 --fp16
"""
# LLM-jp v4 32B, llm-jp/scripts at 0a703870; one data set stands for its list, and nodes are the scheduler's:
# https://github.com/llm-jp/scripts pretrain/scripts/v4-32b-phase1/base/params.sh
LLM_JP_32B = """
--num-layers 64 --hidden-size 5120 --ffn-hidden-size 27648 --num-attention-heads 40 --group-query-attention
--num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope
--rotary-base 500000 --untie-embeddings-and-output-weights --swiglu --normalization RMSNorm --norm-epsilon 1e-6
--disable-bias-linear --tokenizer-type Llama2Tokenizer --tokenizer-model v4_alpha_1.0.model --optimizer adam
--lr 2e-4 --min-lr 2e-5 --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --clip-grad 1.0 --weight-decay 0.1
--init-method-std 0.02 --attention-dropout 0.0 --hidden-dropout 0.0 --train-iters 12000000 --lr-warmup-iters 2000
--lr-decay-iters 12000000 --lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters 1
--eval-interval 999999999 --eval-iters 0 --micro-batch-size 2 --global-batch-size 512
--tensor-model-parallel-size 4 --pipeline-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel
--use-distributed-optimizer --distributed-backend nccl --distributed-timeout-minutes 120 --use-mpi
--data-path 0.7 ja 0.3 en --data-cache-path cache --split 1,0,0 --bf16 --use-mcore-models --no-masked-softmax-fusion
--use-flash-attn --overlap-grad-reduce --overlap-param-gather --attention-softmax-in-fp32
--transformer-impl transformer_engine --attention-backend fused
"""
# Mixtral 8x22B of the Megatron-MoE-ModelZoo at e865051, with its row for 16 nodes of 8 GPUs (tp 2, pp 8, ep 8, 7
# virtual stages, micro batch 1, global batch 256, 4096 tokens):
# https://github.com/yanring/Megatron-MoE-ModelZoo model_configs/benchmarking/Mixtral-8x22B.yaml,
# runtime_configs/benchmarking/runtime.conf
MIXTRAL_8X22B = """
torchrun --nproc_per_node 8 --nnodes 16 pretrain_gpt.py
--distributed-timeout-minutes 60 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 8
--num-virtual-stages-per-pipeline-rank 7 --expert-model-parallel-size 8 --context-parallel-size 1
--expert-tensor-parallel-size 1 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--use-mcore-models --sequence-parallel --use-flash-attn --disable-bias-linear --micro-batch-size 1
--global-batch-size 256 --train-samples 268554688 --exit-duration-in-mins 230 --cross-entropy-loss-fusion
--cross-entropy-fusion-impl native --manual-gc --manual-gc-interval 50 --transformer-impl transformer_engine
--data-cache-path cache --tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model --data-path data
--split 99,1,0 --no-mmap-bin-files --num-workers 6 --untie-embeddings-and-output-weights
--position-embedding-type rope --rotary-percent 1.0 --normalization RMSNorm --swiglu --num-layers 56
--hidden-size 6144 --ffn-hidden-size 16384 --num-attention-heads 48 --group-query-attention --num-query-groups 8
--seq-length 4096 --max-position-embeddings 4096 --make-vocab-size-divisible-by 128 --attention-dropout 0.0
--hidden-dropout 0.0 --clip-grad 1.0 --weight-decay 0.1 --lr-decay-samples 255126953 --lr-warmup-samples 162761
--lr 1.2e-5 --min-lr 1.2e-6 --lr-decay-style cosine --adam-beta1 0.9 --adam-beta2 0.95 --num-experts 8
--moe-router-load-balancing-type aux_loss --moe-router-topk 2 --moe-grouped-gemm --moe-aux-loss-coeff 1e-2
--moe-token-dispatcher-type alltoall --moe-permute-fusion --moe-router-fusion --enable-experimental --eval-iters 32
--eval-interval 500 --finetune --auto-detect-ckpt-format --load start --save checkpoints
--no-ckpt-fully-parallel-save --save-interval 500 --dist-ckpt-strictness log_all --init-method-std 0.008
--log-timers-to-tensorboard --log-memory-to-tensorboard --log-num-zeros-in-grad --log-params-norm
--log-validation-ppl-to-tensorboard --log-throughput --log-interval 1 --tensorboard-dir tensorboard
--wandb-project moe --wandb-exp-name mixtral --bf16
"""
# BLOOM, 176B, bigscience-workshop/bigscience at 9e64ede, on the fork Megatron-DeepSpeed; lengths that its script works
# out are put in:
# https://github.com/bigscience-workshop/bigscience train/tr11-176B-ml/tr11-176B-ml.slurm
BLOOM_176B = """
torchrun --nproc_per_node 8 --nnodes 24 pretrain_gpt.py
--tensor-model-parallel-size 4 --pipeline-model-parallel-size 12 --pp-partition-method type:transformer|embedding
--num-layers 70 --hidden-size 14336 --num-attention-heads 112 --seq-length 2048 --max-position-embeddings 2048
--micro-batch-size 2 --rampup-batch-size 192 16 9_765_625 --global-batch-size 2048 --train-samples 220000000
--tokenizer-type PretrainedFromHF --tokenizer-name-or-path bloom-tokenizer --init-method-std 0.0048
--embed-layernorm --sync-tp-duplicated-parameters --bf16 --seed 42 --position-embedding-type alibi
--checkpoint-activations --abort-on-unmet-fused-kernel-constraints --kill-switch-path kill --pad-vocab-size-to 250880
--optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine
--lr-decay-samples 200000000 --lr-warmup-samples 183105 --clip-grad 1.0 --weight-decay 1e-1
--exit-duration-in-mins 5990 --log-interval 1 --save-interval 100 --eval-interval 1000 --eval-iters 1
--tensorboard-dir logs --tensorboard-queue-size 5 --log-timers-to-tensorboard --log-batch-size-to-tensorboard
--log-validation-ppl-to-tensorboard --save main --load main --train-weighted-split-paths-path train.txt
--valid-weighted-split-paths-path valid.txt --num-workers 2 --valid-num-workers 0 --data-impl mmap
--distributed-backend nccl --deepspeed --deepspeed_config ds_config.json --zero-stage 0
--deepspeed-activation-checkpointing
"""
