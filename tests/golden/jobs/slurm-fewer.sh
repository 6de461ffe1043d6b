#!/bin/bash
#SBATCH --job-name=hello
#SBATCH --nodes=1-4
#SBATCH --time=24:00:00
#SBATCH --mem=0
#SBATCH --gres=gpu:8
#SBATCH --signal=USR1@180
#SBATCH --open-mode=append
#SBATCH --exclusive
#SBATCH --requeue

set -u
# a request to stop is for the step, which saves: this shell waits for it, and then looks how it ended
trap : USR1 HUP
# SLURM tells this shell, too, where it ends the job itself: scancel, a limit, preemption
ended=no
trap 'ended=yes' TERM
# nodes reach each other by the name of the first; the port is one that another job of the node hardly has
port=$((10000 + SLURM_JOB_ID % 20000))
# what the job trains, where all its nodes see it
job="$PWD/.megaspec-job-$SLURM_JOB_ID"
trap 'rm -rf "$job"' EXIT
rm -rf "$job"
mkdir -p "$job/recipes" || exit 73
# by it ranks know what another rank wrote where they meet; another one in each start of the job
(umask 077 && head -c 32 /dev/urandom | od -An -v -tx1 | tr -d " \n" > "$job/secret") || exit 73
export MEGASPEC_RUN_SECRET_FILE="$job/secret"
# what nodes say of their hosts; see megaspec_launchers/job_hosts.py
mkdir -p "$job/nodes" "$job/ended" "$job/left-out" || exit 73
# those that SLURM gives, less those that it was told to leave out
scontrol show hostnames "$SLURM_JOB_NODELIST" > "$job/given"
sed -n 2p "$job.excluded" 2> /dev/null | tr , '\n' > "$job/avoided"
grep -F -x -v -f "$job/avoided" "$job/given" > "$job/left"
# on as many nodes as a layout fits
nodes=0
for count in 4 2 1; do
  if [ "$count" -le "$(wc -l < "$job/left")" ]; then nodes=$count; break; fi
done
head -n "$nodes" "$job/left" > "$job/hosts"
host=$(head -n 1 "$job/hosts")
idle=$(grep -F -x -v -f "$job/hosts" "$job/given" | paste -s -d , -)
if [ "$nodes" -lt 4 ]; then
  echo "megaspec: this start trains on $nodes of 4 nodes${idle:+, idle are $idle}" >&2
fi
lost=$(cat "$job.lost" 2> /dev/null)
rm -f "$job.lost"

run=runs/hello
cat > "$job/recipes/of-this-job.yaml" <<'END-OF-RECIPE' || exit 73
defaults:  # no choice of a group adds to what stands here
  - override /model: null
  - override /parallelism: null
  - override /precision: null
  - override /data: null
  - override /optim: null
  - override /kernels: null
  - override /train: null
  - override /checkpoint: null
  - override /log: null
  - override /launcher: null
name: hello
run_dir: runs/hello
about:
  purpose: A first run, on whatever this machine has.
  source: ''
  hardware: null
model:
  n_layers: 4
  d_model: 128
  n_heads: 4
  n_kv_heads: 2
  d_head: 32
  d_ffn: 320
  vocab_size: 257
  vocab_pad_to: 128
  max_seq_len: 256
  tied_embeddings: true
  dropout: 0.0
  init_std: 0.02
  kind: decoder
  embedding_scale: 1.0
  residual_scale: 1.0
  head_bias: false
  logit_scale: 1.0
  logit_cap: null
  positions:
    kind: rotary
    base: 10000.0
    fraction: 1.0
    scaling:
      kind: none
  norm:
    kind: rms
    eps: 1.0e-05
    weight: scale
  layer:
    kind: sequential
    norms: pre
  layer_types: {}
  layer_pattern: []
  attention:
    kind: gqa
    mask:
      kind: causal
    qkv_bias: false
    out_bias: false
    qk_norm: none
    clip_qkv: null
    score_scale: null
    score_cap: null
    sinks: false
    output_gate: false
    temperature:
      kind: none
    dropout: 0.0
  mlp:
    kind: gated
    activation: silu
    bias: false
  moe: null
parallelism:
  tp: 1
  pp: 1
  cp: 1
  ep: 1
  etp: 1
  dp_strategy: replicate
  dp_replicate: 32
  dp_shard: 1
  sequence_parallel: false
  pipeline:
    schedule: 1f1b
    virtual_stages: 1
    micro_batch_group: 1
    first_layers: null
    last_layers: null
    count_embedding: false
    count_loss: false
    layout: null
  context:
    kind: ring
    factors: null
  dispatch: all_to_all
  recompute:
    kind: none
    parts: null
    method: null
    layers: null
  offload:
    layers: 0
    optimizer: 0.0
  overlap:
    grad_reduce: true
    param_gather: true
    tp: true
    p2p: true
    shared_experts: true
  grad_reduce: fp32
  bucket_mb: 100.0
precision:
  kind: fp32
data:
  seq_len: 256
  seed: 1234
  document_mask: false
  document_lengths: null
  kind: indexed
  blend:
    - prefix: data/hello
      weight: null
  split: [969.0, 30.0, 1.0]
  cache: data/index-cache
  download_dir: runs/downloads
  prepare:
    tokenizer: byte
    input: python
optim:
  lr: 0.003
  weight_decay: 0.1
  weight_decay_ramp:
    kind: constant
    end: null
    steps: null
    first_step: 0
  clip: 1.0
  schedule:
    kind: cosine
    first_step: 0
    warmup_steps: 20
    decay_steps: 240
    init_lr: 0.0
    min_lr: 0.0003
    wsd_decay_steps: null
    wsd_decay: linear
    pieces: []
    after_pieces: null
  kind: adamw
  beta1: 0.9
  beta2: 0.95
  eps: 1.0e-08
  formats:
    master: fp32
    exp_avg: fp32
    exp_avg_sq: fp32
kernels:
  attention: sdpa
  attention_merge: triton
  cross_entropy: triton
  linear: torch
  grouped: reference
  unpermute: triton
  norm: reference
  gated: reference
  rope: reference
  fp8_cast: triton
  scaled_product: cublaslt
  scaled_grouped: reference
  adamw: triton
  compile: block
train:
  steps: 240
  global_batch: 64
  micro_batch: 2
  batch_ramp: null
  seed: 1234
  deterministic: false
  trainable: null
  numbers:
    skips: 0
    within: 100
    rollbacks: 0
    before: 0
    spikes: null
  checks:
    replicas_every: 0
    sum_every: 1
    state: 0.0
    recompute: 0.0
  eval_every: 80
  eval_samples: 32
  sample:
    prompt: 'The '
    tokens: 64
    temperature: 0.8
    top_k: null
    top_p: null
    min_p: null
    stop: []
init:
  from_hf: null
  load: null
  step: null
  include: ['*']
  exclude: []
  rename: []
  missing: error
  vocab: same
  new_rows: drawn
  upcycle: none
checkpoint:
  every: 0
  keep: 2
  keep_every: 0
  keep_best: 0
  best_by: mean
  saving: blocking
  retries: 1
  fallback_dir: null
  copy_to: null
  last: training
log:
  every: 10
  console: live
  tensorboard: true
profile:
  steps: null
  ranks: [0]
  memory: true
launcher:
  kind: local
  ranks: 32
  max_restarts: 0
  restarts:
    most: 100
    window_hours: 24.0
    without_progress: 3
    first_wait_seconds: 1.0
    longest_wait_seconds: 300.0
    look_seconds: 30.0
  layouts: [[parallelism.dp_replicate=16, launcher.ranks=16], [parallelism.dp_replicate=8, launcher.ranks=8]]
  grace_seconds: 120.0
  timeout_seconds: 600.0
END-OF-RECIPE

if [ "$nodes" -gt 0 ]; then
  srun --nodes="$nodes" --ntasks="$nodes" --nodelist="$(paste -s -d , "$job/hosts")" --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=180 --cpu-bind=none --export=ALL \
  python3 -P -m megaspec_launchers.node --nodes="$nodes" --ranks=8 --rank-from=SLURM_NODEID --grace=120 \
  --host="$host" --port="$port" --job="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" --run-dir="$run" \
  --job-dir="$job" --host-from=SLURMD_NODENAME --restarts="${SLURM_RESTART_COUNT:-0}" --lost="$lost" \
  -- train --config-dir "$job" recipe=of-this-job resume=auto
  code=$?
else
  echo "megaspec: the run keeps away from all but $(wc -l < "$job/left") of $idle, and launcher.min_nodes=1; to let one in again, delete its line in avoided.jsonl and $job.excluded" >&2
  code=77
fi

# of a task that was killed srun tells 128 and the signal; Python tells 1 of what it could not even begin
if [ "$code" -ge 128 ]; then code=74; elif [ "$code" -eq 1 ]; then code=70; fi
# what sbatch was told to exclude, and what was left out since: kept while the job is in the queue
own=
before=
if [ -e "$job.excluded" ]; then { read -r own; read -r before; } < "$job.excluded"; fi
# hosts that stand in avoided.jsonl, as each node found it at its end; without a word of any the list stays
avoided=$before
named=no
for said in "$job"/left-out/*; do
  if [ -e "$said" ]; then avoided=; fi
done
sort -u "$job"/left-out/* > "$job/avoided" 2> /dev/null
while read -r name; do
  if scontrol show node "$name" > /dev/null 2>&1; then
    avoided="$avoided${avoided:+,}$name"
    if grep -F -x -q -e "$name" "$job/hosts"; then named=yes; fi
  else
    echo "megaspec: $name of $run/avoided.jsonl is no node of this cluster, and is not left out" >&2
  fi
done < "$job/avoided"
# a host is lost where it alone says nothing of its end, ranks of others missed its own, and none was killed
# SLURM ends what this shell has started, too, as soon as it sees that a node is lost
(
  trap '' TERM
  gone=
  while read -r name; do
    if [ ! -e "$job/ended/$name" ]; then gone="$gone${gone:+,}$name"; fi
  done < "$job/hosts"
  if [ "$code" -eq 74 ] && [ -n "$gone" ] && [ "${gone#*,}" = "$gone" ] &&
    grep -q -s missed "$job"/ended/* && ! grep -q -s failed "$job"/ended/*; then
    echo "megaspec: host $gone was lost; at the second time the run keeps away from it" >&2
    echo "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0} $gone" > "$job.lost"
  fi
)
again=no
printf '%s\n' "$avoided" | tr , '\n' > "$job/avoided"
others=$(grep -F -x -v -c -f "$job/avoided" "$job/given")
if [ "$nodes" -eq 0 ]; then named=yes; fi
if [ "$(wc -l < "$job/left")" -lt "$(wc -l < "$job/given")" ]; then before=-; fi
case "$code" in
74|75|77)
  # SLURM would requeue a job that is cancelled, too; one whose time is over, or that is preempted, goes on
  if [ "$ended" = yes ] && ! scontrol show job "$SLURM_JOB_ID" | grep -E -q 'Reason=TimeLimit|PreemptTime=[0-9]'; then
    # where a node was lost SLURM has counted the restart already, and starts the job again by itself
    restarts=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/.* Restarts=\([0-9]*\).*/\1/p')
    if [ "${restarts:-0}" -gt "${SLURM_RESTART_COUNT:-0}" ]; then
      again=yes
      echo "megaspec: exit code $code: SLURM itself puts the job back into the queue" >&2
    else
      echo "megaspec: exit code $code: SLURM was told to end the job, which stays ended" >&2
    fi
  elif [ "$code" -eq 77 ] && [ "$named" = no ]; then
    echo "megaspec: exit code $code: no host of the job can be named, which stays ended" >&2
  elif [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ]; then
    echo "megaspec: exit code $code: the job goes back into the queue" >&2
    again=yes
    rm -rf "$job"
    if [ -n "$avoided" ]; then echo "megaspec: left out: $avoided ($run/avoided.jsonl says why)" >&2; fi
    if [ "$avoided" != "$before" ] && [ ! -e "$job.excluded" ]; then
      own=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/.*ExcNodeList=\([^ (]*\).*/\1/p')
    fi
    # SLURM ends this shell when the job is back in the queue: not before what follows is done
    trap '' TERM
    if scontrol requeue "$SLURM_JOB_ID" && [ "$avoided" != "$before" ]; then
      list="$own${own:+${avoided:+,}}$avoided"
      tries=0
      until scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$list"; do
        tries=$((tries + 1))
        if [ "$tries" -eq 5 ]; then break; fi
        sleep 1
      done
      if [ "$tries" -lt 5 ]; then
        printf '%s\n' "$own" "$avoided" > "$job.excluded"
      elif [ "$others" -ge 1 ]; then
        printf '%s\n' "$own" "$avoided" > "$job.excluded"
        if [ -n "$avoided" ]; then echo "megaspec: SLURM does not leave out $avoided: the job itself does, where it is given them" >&2; fi
      else
        scontrol hold "$SLURM_JOB_ID"
        echo "megaspec: SLURM does not leave out $list: the job is held. To go on, give" >&2
        echo "  scontrol update JobId=$SLURM_JOB_ID ExcNodeList=$list" >&2
        echo "  scontrol release $SLURM_JOB_ID" >&2
        echo "or end it: scancel $SLURM_JOB_ID" >&2
      fi
    fi
  else
    echo "megaspec: exit code $code after 100 restarts (launcher.max_restarts)" >&2
  fi ;;
esac
if [ "$again" = no ]; then rm -f "$job.lost" "$job.excluded"; fi
exit "$code"
