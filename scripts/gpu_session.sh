#!/usr/bin/env bash
# What one GPU has to show: the GPU tests and every benchmark, part by part, each with a time limit and a log.
#   scripts/gpu_session.sh OUT [PART ...]      OUT gets PART.log; parts: tests sft packed first-step 7b te checkpoint grpo update pair (default: all)
#   PYTHONPATH=SITE scripts/gpu_session.sh OUT tests       where packages were unpacked into SITE because there is no network
# Where a command may run ten minutes: OUT tests; OUT sft packed first-step 7b; OUT grpo update checkpoint te.
# PYTHON chooses the interpreter (python3). A table of what each part printed comes last; exit code 1 when a part failed.
# Seconds at most (times SLOWER): tests 480, sft 280, packed 100, first-step 75, 7b 200, te 150, checkpoint 150, grpo 330, update 100, pair 570 (two GPUs).
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=$(mkdir -p "${1:?folder for the logs}" && cd "$1" && pwd)
shift
python=${PYTHON:-python3}
site=${PYTHONPATH:-}
export PYTHONPATH=$root${site:+:$site} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1 VLLM_HOST_IP=127.0.0.1 VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0
slower=${SLOWER:-1}
shape=${SHAPE:-1.5b} rl_shape=${RL_SHAPE:-0.5b} tokens=${TOKENS:-16384} seq=${SEQ:-2048}  # smaller ones to try the script itself
bench=("$python" "$root/scripts/bench_sft.py" --tokens "$tokens" --seq "$seq")
cd "$root" || exit 1

declare -A results
# part NAME SECONDS COMMAND...: adds to OUT/NAME.log
part() {
  local name=$1 limit=$(($2 * slower)) started=$SECONDS code=0
  shift 2
  timeout -k 10 "$limit" "$@" >>"$out/$name.log" 2>&1 || code=$?
  results[$name]="${results[$name]:-} exit $code after $((SECONDS - started)) s;"
  ((code == 0)) || failed=1
}
has() { "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"; }

tests() { part tests 480 "$python" -m pytest -p no:cacheprovider -W ignore -s -rs --durations=12 tests/gpu; }
sft() {
  local peers=hf,hf-bf16
  has liger_kernel && peers+=,hf-liger
  has trl && peers+=,trl
  part sft 280 "${bench[@]}" --shape "$shape" --peers "$peers" --profile --trace "$out/sft-trace.json.gz" --timeout $((90 * slower))
}
packed() { part packed 100 "${bench[@]}" --shape "$shape" --data fixed,gsm8k-lengths,gsm8k-answers --timeout $((60 * slower)); }
first-step() { part first-step 75 "${bench[@]}" --shape "$shape" --time-to-first-step; }
7b() {
  part 7b 120 "${bench[@]}" --shape "${BIG_SHAPE:-7b}" --lean --recompute full --steps 4 --warmup 2 --timeout $((100 * slower))
  part 7b 80 "${bench[@]}" --shape "${BIG_SHAPE:-7b}" --lean --tokens $((tokens / 2)) --steps 6 --warmup 2 --timeout $((70 * slower))
}
te() {
  if has transformer_engine; then part te 150 "${bench[@]}" --shape "$shape" --impl local && part te 75 "${bench[@]}" --shape "$shape" --impl transformer_engine
  else results[te]=" TransformerEngine is not installed"; fi
}
checkpoint() {
  for size in ${CHECKPOINT_SHAPES:-0.5b 1.5b}; do part checkpoint 75 "$python" "$root/scripts/bench_checkpoint.py" --shape "$size" --folder "${SCRATCH:-/tmp}"; done
}
grpo() {
  local parts=mfsdp sampler=hf
  has vllm && parts=mfsdp,vllm sampler=vllm
  parts+=,sft
  has trl && has vllm && parts+=,trl
  part grpo 330 "$python" "$root/scripts/bench_grpo.py" --shape "$rl_shape" --sampler "$sampler" --parts "$parts" --timeout $((150 * slower)) ${RL_ARGUMENTS:-}
}
update() {
  part update 100 "$python" "$root/scripts/bench_grpo.py" --shape "$rl_shape" --parts update --profile --log "$out/update.log" --timeout $((90 * slower)) ${RL_ARGUMENTS:-}
}
pair() {  # FSDP over two, each matrix split over two; GRPO on both, one engine on both, engines on a GPU of their own
  if (($(nvidia-smi -L 2>/dev/null | wc -l) < 2)); then results[pair]=" there are no two GPUs"; return; fi
  local both=("$python" "$root/scripts/bench_grpo.py" --shape "$rl_shape" --parts mfsdp --steps 3 --warmup 2 --timeout $((120 * slower)))
  part pair 90 "${bench[@]}" --shape "$shape" --gpus 2 --timeout $((80 * slower))
  part pair 90 "${bench[@]}" --shape "$shape" --gpus 2 --tp 2 --timeout $((80 * slower))
  part pair 130 "${both[@]}" --nproc 2
  part pair 130 "${both[@]}" --nproc 2 --set rollout.tensor_model_parallel_size=2
  part pair 130 "${both[@]}" --set rollout.colocate=False --set rollout.weight_transfer=nccl
}

all_parts=(tests sft packed first-step 7b te checkpoint grpo update pair)
(($#)) || set -- "${all_parts[@]}"
for name in "$@"; do
  [[ " ${all_parts[*]} " == *" $name "* ]] || { echo "no part is called $name" >&2; exit 2; }
done
failed=0
if [[ -n $site && ! -e $site/.compiled ]]; then  # thousands of modules, compiled once and not in every process
  timeout 120 "$python" -m compileall -q -j 0 "$site" >/dev/null 2>&1
  touch "$site/.compiled" 2>/dev/null
  echo "compiled $site: $SECONDS s"
fi
nvidia-smi -L 2>/dev/null
for name in "$@"; do
  "$name"
  echo "== $name:${results[$name]:-}"
  grep -hE '^(mfsdp|hf|trl|the weights|vllm|sft|update|none|NVIDIA|contender|  (rollout|update)|(save|load) [0-9]|launcher|imports|model,|first step|second|third|from the)|(passed|failed|skipped).* in |^FAILED|against|pass rate|predicted|mismatch|off by' \
    "$out/$name.log" 2>/dev/null | cut -c1-230 | tail -"${ROWS:-24}"
done
exit "$failed"
