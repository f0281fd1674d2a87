#!/usr/bin/env bash
# Fine-tuning on several nodes with Slurm: one launcher a node, torchrun's rendezvous on the first.
#
#   sbatch --nodes=4 scripts/slurm-sft.sh --config run.yaml --output /shared/runs/a
#
# All arguments go to mfsdp sft, after those given here, so they win. The run folder, the model and the data must lie where every
# node sees them. Two minutes before the time limit Slurm sends USR1: the run saves and ends with 75, and the job is queued again,
# to go on from there; any other end is left as it is. Change the #SBATCH lines to what your cluster wants.
#SBATCH --job-name=mfsdp-sft
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

STOPPED=75 # exit code: stopped by a signal, state saved

if [[ -z ${SLURM_JOB_ID:-} ]]; then
  echo "error: this is a file for sbatch: sbatch --nodes=N $0 --config run.yaml --output FOLDER" >&2
  exit 2
fi
mfsdp=$(command -v mfsdp || echo "${SLURM_SUBMIT_DIR:-.}/.venv/bin/mfsdp")
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
endpoint=${nodes[0]}:$((20000 + SLURM_JOB_ID % 10000)) # a port of its own for each job
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}    # srun does not take it from sbatch by itself

# The task's number is the node's. It is known inside the task only, hence the shell, which mfsdp replaces so that signals reach it.
# --wait: when one node's launcher has ended, the others have this long to end too.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=0 --wait=300 bash -c 'exec "$0" sft --node-rank "$SLURM_PROCID" "$@"' "$mfsdp" \
  --nnodes "${#nodes[@]}" --rdzv-endpoint "$endpoint" ${SLURM_GPUS_ON_NODE:+--nproc "$SLURM_GPUS_ON_NODE"} "$@" &
step=$!
trap 'kill -USR1 "$step"' USR1 TERM # srun hands it on to every launcher

# A trapped signal ends `wait` early, with the step still running.
code=0
wait "$step" || code=$?
while kill -0 "$step" 2>/dev/null; do
  code=0
  wait "$step" || code=$?
done

if [[ $code -eq $STOPPED ]]; then
  echo "stopped with its state saved: queueing job $SLURM_JOB_ID again" >&2
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
