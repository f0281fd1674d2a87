#!/usr/bin/env bash
# From nothing to a fine-tuned model in Hugging Face format, on CPU, without a download of data or weights: a tiny random
# model learns to add by examples (SFT), then by its own attempts (GRPO). Run it again and it goes on where it stopped, or
# shows what is there.
#   scripts/quickstart.sh [--dir DIR] [--seed N]      default: quickstart/ in the project folder, seed 0
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dir=quickstart seed=0
while [ $# -gt 0 ]; do
  case $1 in
    --dir) dir=$(realpath -m "${2:?--dir needs a folder}") ;;
    --seed) seed=${2:?--seed needs a number} ;;
    *) sed -n '2,5s/^# *//p' "${BASH_SOURCE[0]}"; exit 2 ;;
  esac
  shift 2
done
"$root/scripts/install.sh"
cd "$root"
export PATH=$root/.venv/bin:$PATH
started=$SECONDS
summary=()

# stage NAME COMMAND...: show the command, run it, remember how long it took. Its stdout passes through.
stage() {
  local name=$1 start=$SECONDS
  shift
  printf '\n$ %s\n' "$(printf '%q ' "$@" | sed 's/ $//')" >&2
  "$@"
  summary+=("$(printf '  %-28s %4d s' "$name" $((SECONDS - start)))")
}

mkdir -p "$dir"
if [ ! -f "$dir/model/config.json" ]; then
  stage "make a tiny model" python scripts/make_tiny_model.py --family qwen2 --intermediate 256 --seed "$seed" --out "$dir/model"
fi
for kind in sft rl; do
  if [ ! -f "$dir/$kind/test.parquet" ]; then
    stage "prepare data for $kind" mfsdp prep-data arithmetic --for $kind --seed "$seed" -o "$dir/$kind"
  fi
done
stage "fine-tune on examples (SFT)" mfsdp sft --preset sft-tiny-cpu --model "$dir/model" --train-files "$dir/sft/train.parquet" \
  --val-files "$dir/sft/test.parquet" --output "$dir/run-sft" trainer.seed="$seed" >"$dir/sft.txt"
taught=$(<"$dir/sft.txt")
stage "improve by trial (GRPO)" mfsdp grpo --preset grpo-tiny-cpu --model "$taught" --train-files "$dir/rl/train.parquet" \
  --val-files "$dir/rl/test.parquet" --output "$dir/run-grpo" trainer.seed="$seed" >"$dir/grpo.txt"
improved=$(<"$dir/grpo.txt")
stage "look at answers" mfsdp samples "$dir/run-grpo"
stage "inspect the checkpoint" mfsdp ckpt inspect "$improved"
stage "export to Hugging Face" mfsdp ckpt export-hf "$improved" -o "$dir/hf" --overwrite

# The share of the 200 test questions that are answered right, before and after, from the run's own records.
rates=$(python - "$dir/run-grpo/metrics.jsonl" <<'PYTHON'
import json
import sys

rates = [(r["step"], r["val_pass_rate"]) for r in map(json.loads, open(sys.argv[1])) if "val_pass_rate" in r]
print("  pass rate on new questions   " + " -> ".join(f"{rate:.1%} (step {step})" for step, rate in (rates[0], rates[-1])))
PYTHON
)
cat <<EOF

Done in $((SECONDS - started)) s:
$(printf '%s\n' "${summary[@]}")

$rates
  run folders                  $dir/run-sft, $dir/run-grpo (config.yaml, metrics.jsonl, tensorboard/, samples/, attempts/)
  checkpoints                  $taught
                               $improved
  Hugging Face model           $dir/hf

Next: source .venv/bin/activate, then mfsdp --help
EOF
