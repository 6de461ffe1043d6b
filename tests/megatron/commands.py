"""Command lines as Megatron's users have them."""

GPT3_175B = """
torchrun --nproc_per_node 8 --nnodes 16 --master_addr localhost --master_port 6000 examples/pretrain_gpt.py
--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048
--attention-backend auto --micro-batch-size 1
--step-batch-size-schedule 0:16,2.4B:320,4.8B:624,7.2B:928,9.6B:1232,12B:1536
--train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0
--fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000
--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --data-path data/pile --vocab-file gpt2-vocab.json
--merge-file gpt2-merges.txt --tokenizer-type GPT2BPETokenizer --split 949,50,1 --log-interval 100
--save-interval 10000 --eval-interval 1000 --save ckpt --load ckpt --eval-iters 10 --tensorboard-dir logs
"""
LLAMA3_8B = """
CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node=8 --nnodes=1 pretrain_gpt.py
--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
--normalization RMSNorm --position-embedding-type rope --rotary-base 500000 --rotary-percent 1.0
--attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --untie-embeddings-and-output-weights --disable-bias-linear
--micro-batch-size 1 --global-batch-size 128 --train-samples 1953125 --lr-decay-samples 1949218
--lr-warmup-samples 3906 --lr 0.00015 --min-lr 0.00001 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1
--adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion
--calculate-per-token-loss --manual-gc --empty-unused-memory-level 1 --exit-duration-in-mins 235
--tensor-model-parallel-size 1 --context-parallel-size 2 --sequence-parallel --use-distributed-optimizer
--overlap-grad-reduce --overlap-param-gather --mock-data --tokenizer-type NullTokenizer --vocab-size 128256
--data-cache-path cache --no-mmap-bin-files --num-workers 1 --log-interval 1 --eval-iters 32 --eval-interval 100
--save-interval 1000 --profile --profile-step-start 4 --distributed-timeout-minutes 60 --ckpt-format torch_dist
"""
LLAMA3_8B_FP8 = f"""{LLAMA3_8B} --normalization LayerNorm --apply-layernorm-1p --fp8-format hybrid
--fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather --decoupled-lr 5.0e-4
--decoupled-min-lr 4.5e-5
"""
MIXTRAL_8X7B = """
torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py
--use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32
--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01 --attention-dropout 0.0
--hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu
--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion
--no-position-embedding --rotary-base 1000000 --num-experts 8 --moe-router-topk 2
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm
--moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce --tokenizer-type Llama2Tokenizer
--tokenizer-model tokenizer.model --data-path 30 data/a 70 data/b --split 99990,8,2 --micro-batch-size 1
--global-batch-size 256 --lr 1e-4 --train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine
--min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0 --bf16 --tensor-model-parallel-size 1
--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2 --expert-model-parallel-size 8
--use-distributed-optimizer --sequence-parallel --log-interval 1 --save-interval 10000 --eval-interval 1000
--eval-iters 10 --save ckpt --load ckpt --no-load-optim --no-load-rng
"""
DEEPSEEK_V3 = """
--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128
--max-position-embeddings 4096 --seq-length 4096 --normalization RMSNorm --position-embedding-type rope --swiglu
--rotary-base 10000 --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0
--hidden-dropout 0 --vocab-size 129280 --qk-layernorm --multi-latent-attention --q-lora-rank 1536
--kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --num-experts 256
--moe-layer-freq ([0]*3+[1]*58) --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
--moe-router-load-balancing-type seq_aux_loss --moe-router-topk 8 --moe-router-pre-softmax
--moe-token-dispatcher-type flex --moe-enable-deepep --moe-router-num-groups 8 --moe-router-group-topk 4
--moe-router-topk-scaling-factor 2.5 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
--moe-router-bias-update-rate 1e-3 --moe-router-dtype fp32 --moe-aux-loss-coeff 1e-4 --moe-grouped-gemm
--moe-permute-fusion --micro-batch-size 1 --global-batch-size 1024 --train-iters 1000 --lr 2.2e-4 --bf16
--tensor-model-parallel-size 8 --expert-tensor-parallel-size 1 --expert-model-parallel-size 32
--sequence-parallel --use-distributed-optimizer --recompute-granularity selective --recompute-modules mla_up_proj
mlp --data-path data/tokens
"""
# The least that a recipe needs, for tests that add to it.
SMALL = """
--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
--micro-batch-size 1 --global-batch-size 8 --train-iters 100 --lr 1e-3 --vocab-size 256 --data-path data/x
"""
LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
