#!/usr/bin/env bash
# From nothing to a fine-tuned model in Hugging Face format, on CPU, without a download of data or weights:
# a tiny random model learns to add. Run it again and it goes on where it stopped, or shows what is there.
#   scripts/quickstart.sh [--dir DIR]      default: quickstart/ in the project folder
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dir=quickstart
case ${1:-} in
  "") ;;
  --dir) dir=$(realpath -m "${2:?--dir needs a folder}") ;;
  *) sed -n '2,4s/^# *//p' "${BASH_SOURCE[0]}"; exit 2 ;;
esac
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

if [ ! -f "$dir/model/config.json" ]; then
  stage "make a tiny model" python scripts/make_tiny_model.py --family qwen2 --out "$dir/model"
fi
if [ ! -f "$dir/data/test.parquet" ]; then
  stage "prepare data" mfsdp prep-data arithmetic --for sft -o "$dir/data"
fi
mkdir -p "$dir"
stage "fine-tune" mfsdp sft --preset sft-tiny-cpu --model "$dir/model" --train-files "$dir/data/train.parquet" \
  --val-files "$dir/data/test.parquet" --output "$dir/run" >"$dir/checkpoint.txt"
checkpoint=$(<"$dir/checkpoint.txt")
printf '%s\n' "$checkpoint"
stage "inspect the checkpoint" mfsdp ckpt inspect "$checkpoint"
stage "export to Hugging Face" mfsdp ckpt export-hf "$checkpoint" -o "$dir/hf" --overwrite

cat <<EOF

Done in $((SECONDS - started)) s:
$(printf '%s\n' "${summary[@]}")

  run folder                   $dir/run (config.yaml, metrics.jsonl, tensorboard/, attempts/)
  checkpoint                   $checkpoint
  Hugging Face model           $dir/hf

Next: source .venv/bin/activate, then mfsdp --help
EOF
