# shellcheck shell=bash
# Sourced by the recipes beside it, which set the model, the layout and the batch, and then call `launch`.
#
#   DATA=/data/corpus_text_document TOKENIZER=/data/tokenizer SCHEDULE=2bw-ef sbatch scripts/slurm/moe-2b.sbatch
#   DATA=... TOKENIZER=... DRY_RUN=1 ./scripts/slurm/moe-2b.sbatch        # prints the command that every task would run
#
# What one may set:
#   DATA        prefix of Megatron's .bin/.idx files, or a blend: "0.7 /data/a 0.3 /data/b"
#   TOKENIZER   folder or name that Hugging Face's AutoTokenizer takes; a folder must be seen by all nodes
#   SCHEDULE    sync (Megatron's flushed 1F1B), 2bw, or 2bw-ef (with Error Feedback, the default)
#   OPTIMIZER   muon (the default) or adam
#   TOKENS, LR  other than the recipe's
#   RUN         folder of checkpoints, TensorBoard and logs, seen by all nodes; default runs/MODEL-SCHEDULE-OPTIMIZER
#   SCRIPT      a Megatron-LM checkout's pretrain_gpt.py; default the package's own entry
#   PYTHON      default python; SRUN_FLAGS, such as --container-image=..., go to srun, more Megatron flags into EXTRA
#   IFNAME      network interface between the nodes; default that of the first node's default route

say() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
}

refuse() {
  say "$*"
  exit 2
}

# Each prefix of $DATA, without the weights of a blend.
data_prefixes() {
  local word
  for word in $DATA; do
    [[ $word =~ ^[0-9.]+$ ]] || printf '%s\n' "$word"
  done
}

check_inputs() {
  local prefix
  [[ -n ${DATA:-} ]] || refuse "DATA is not set: give the prefix of Megatron's .bin and .idx files"
  for prefix in $(data_prefixes); do
    [[ -f $prefix.bin && -f $prefix.idx ]] ||
      refuse "DATA names $prefix, but there is no $prefix.bin with its .idx: make them with Megatron's" \
        "tools/preprocess_data.py, or python -m megatron_asyncpp corpus"
  done
  [[ -n ${TOKENIZER:-} ]] || refuse "TOKENIZER is not set: give the folder of a Hugging Face tokenizer, or its name"
  [[ $TOKENIZER != /* && $TOKENIZER != ./* || -e $TOKENIZER ]] ||
    refuse "TOKENIZER names $TOKENIZER, which isn't there: give the folder of a Hugging Face tokenizer, or its name"
  if ! mkdir -p "$RUN"/{checkpoints,tensorboard,logs,cache} 2>/dev/null || [[ ! -w $RUN/checkpoints ]]; then
    refuse "$RUN can't be written by $(id -un): set RUN to a folder that all nodes can write"
  fi
}

# Sets `words` to the plugin's flags. The synchronous run goes through the plugin too, so that all three have the same
# optimizer, log and checkpoints: 1f1b is Megatron's own schedule, bit for bit.
schedule_flags() {
  case $SCHEDULE in
    sync) words=(--asyncpp-schedule 1f1b) ;;
    2bw) words=(--asyncpp-schedule 2bw) ;;
    2bw-ef) words=(--asyncpp-schedule 2bw --asyncpp-error-feedback) ;;
    *) refuse "SCHEDULE $SCHEDULE is none: take sync, 2bw or 2bw-ef" ;;
  esac
}

# Adds the optimizer's flags to `words`. The paper compares optimizers; its Muon is Megatron's with other settings than
# Megatron's defaults. AdamW's betas are ours.
optimizer_flags() {
  case $OPTIMIZER in
    muon) words+=(--optimizer muon --asyncpp-muon-preset paper) ;;
    adam) words+=(--optimizer adam) ;;
    *) refuse "OPTIMIZER $OPTIMIZER is none: take muon or adam" ;;
  esac
  words+=(--adam-beta1 0.9 --adam-beta2 0.95)
}

# What one task runs, a word an element, in `command`.
compose() {
  local words=() data=()
  iterations=$((TOKENS / (BATCH * SEQUENCE)))
  schedule_flags
  optimizer_flags
  read -ra data <<<"$DATA"
  # Clipping, decay, warm-up and schedule of the learning rate are the paper's; its peak is ours, see the recipe.
  words+=(
    --asyncpp-model "$MODEL"
    --seq-length "$SEQUENCE" --max-position-embeddings "$SEQUENCE"
    --micro-batch-size "$MICRO_BATCH" --global-batch-size "$BATCH" --train-iters "$iterations"
    --lr "$LR" --min-lr "$(awk "BEGIN { print $LR / 10 }")" --lr-decay-style cosine --lr-warmup-fraction 0.1
    --weight-decay 0.1 --clip-grad 1.0
    --bf16 --use-distributed-optimizer
    --data-path "${data[@]}" --data-cache-path "$RUN/cache" --split "99,1,0"
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER"
    --no-create-attention-mask-in-dataloader # the attention kernels know what causal is
    --rerun-mode disabled                    # Megatron's default repeats iterations, which no pipeline without flush can
    --save "$RUN/checkpoints" --load "$RUN/checkpoints" --save-interval "$SAVE_INTERVAL" --ckpt-format torch_dist
    --exit-signal-handler # saves and leaves at SIGTERM; the plugin passes the request on without a wait
    --distributed-timeout-minutes 20
    --tensorboard-dir "$RUN/tensorboard" --log-interval 10
    --eval-interval 1000 --eval-iters 20
  )
  command=("${PYTHON:-python}" -m megatron_asyncpp run "${SCRIPT:-pretrain_gpt}" "${words[@]}" "${FLAGS[@]}")
  command+=(${EXTRA:+$EXTRA})
}

environment() {
  # One hardware queue: kernels start in the order in which Megatron launches them, so that a collective isn't stuck
  # behind the computation that it should overlap with. Megatron demands it for some layouts.
  export CUDA_DEVICE_MAX_CONNECTIONS=1
  # The sums of the optimizer step go over gloo between the nodes, beside NCCL. Gloo takes the address that a host name
  # resolves to, which on many clusters is the node's own 127.0.1.1; NCCL starts over the same interface, and finds
  # InfiniBand by itself.
  local interface=${IFNAME:-$(ip route show default 2>/dev/null | sed -n '1s/.* dev \([^ ]*\).*/\1/p')}
  if [[ -n $interface ]]; then
    export GLOO_SOCKET_IFNAME=$interface NCCL_SOCKET_IFNAME=$interface
  fi
  # 4 us * 2^22, some 17 s, for each of 7 tries: a link that comes back is no reason to lose a run.
  export NCCL_IB_TIMEOUT=22
  # NCCL's warnings name the link and the peer; without them a hang says nothing.
  export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
  read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST") || refuse "scontrol names no node of the job"
  export MASTER_ADDR
  # Jobs that share a node must not share the port.
  export MASTER_PORT=$((20000 + ${SLURM_JOB_ID:-0} % 20000))
}

# Runs $command in every task. srun starts the ranks itself, not torchrun: Slurm then signals each rank, and a rank has
# all the time of --signal to save. torchrun would pass a SIGTERM on, and kill all after 30 seconds.
# shellcheck disable=SC2016 # the variables are the task's
per_task='export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS; exec "$@"'

launch() {
  SCHEDULE=${SCHEDULE:-2bw-ef} OPTIMIZER=${OPTIMIZER:-muon}
  RUN=${RUN:-$root/runs/$MODEL-$SCHEDULE-$OPTIMIZER}
  check_inputs
  compose
  if [[ -n ${DRY_RUN:-} ]]; then
    printf '%q ' "${command[@]}"
    printf '\n'
    return
  fi
  [[ -n ${SLURM_JOB_ID:-} ]] || refuse "this is no Slurm job: call it with sbatch, or with DRY_RUN=1"
  environment
  trap : TERM # of a preemption: this shell must outlive the ranks, which save
  # shellcheck disable=SC2086 # SRUN_FLAGS are words
  srun --kill-on-bad-exit=1 --output="$RUN/logs/%j-%t.log" --open-mode=append ${SRUN_FLAGS:-} \
    bash -c "$per_task" task "${command[@]}"
  # The ranks have ended well: done, or asked to save and leave.
  local reached=0 tracker=$RUN/checkpoints/latest_checkpointed_iteration.txt
  [[ ! -f $tracker ]] || reached=$(<"$tracker")
  if ((reached < iterations)); then
    say "iteration $reached of $iterations is saved: going on in the next slot"
    scontrol requeue "$SLURM_JOB_ID"
  else
    say "all $iterations iterations are done"
  fi
}
