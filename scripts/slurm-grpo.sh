#!/usr/bin/env bash
# GRPO on several nodes with Slurm: a Ray cluster for the length of the job, and mfsdp grpo on its first node.
#
#   sbatch --nodes=4 scripts/slurm-grpo.sh --config run.yaml --output /shared/runs/a
#
# All arguments go to mfsdp grpo, after those given here, so they win. The run folder, the model and the data must lie where every
# node sees them. Three minutes before the time limit Slurm sends USR1: the run saves and ends with 75, and the job is queued again,
# to go on from there; any other end is left as it is. Change the #SBATCH lines to what your cluster wants.
#SBATCH --job-name=mfsdp-grpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

STOPPED=75 # exit code: stopped by a signal, state saved
LIMIT_S=${MFSDP_RAY_LIMIT_S:-300}

if [[ -z ${SLURM_JOB_ID:-} ]]; then
  echo "error: this is a file for sbatch: sbatch --nodes=N $0 --config run.yaml --output FOLDER" >&2
  exit 2
fi
# mfsdp and ray of one environment
mfsdp=$(command -v mfsdp || echo "${SLURM_SUBMIT_DIR:-.}/.venv/bin/mfsdp")
ray=$(dirname "$mfsdp")/ray
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
address=$head:$((20000 + SLURM_JOB_ID % 10000)) # a port of its own for each job
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun does not take it from sbatch by itself
export RAY_USAGE_STATS_ENABLED=0
export RAY_AUTH_MODE=token # without it, whoever reaches the port may run what they like
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN
unset RAY_ADDRESS

on_head=(srun --overlap --nodes=1 --ntasks=1 --nodelist="$head")
cluster=()
end_cluster() {
  local step
  for step in "${cluster[@]}"; do kill "$step" 2>/dev/null || true; done
  wait
}
trap end_cluster EXIT

"${on_head[@]}" "$ray" start --head --node-ip-address="$head" --port="${address#*:}" --block >&2 &
cluster+=($!)
if [[ ${#nodes[@]} -gt 1 ]]; then
  others=$((${#nodes[@]} - 1))
  srun --overlap --nodes="$others" --ntasks="$others" --exclude="$head" "$ray" start --address="$address" --block >&2 &
  cluster+=($!)
fi

# A run larger than the cluster is refused at once, so all nodes must have joined.
joined() { "${on_head[@]}" "$ray" status --address="$address" 2>/dev/null | grep -c '^ 1 node_' || true; }
until [[ $(joined) -ge ${#nodes[@]} ]]; do
  if ((SECONDS >= LIMIT_S)); then
    echo "error: after $LIMIT_S s only $(joined) of ${#nodes[@]} nodes have joined Ray at $address" >&2
    exit 4
  fi
  sleep 2
done

"${on_head[@]}" "$mfsdp" grpo --nnodes "${#nodes[@]}" --ray-address "$address" \
  ${SLURM_GPUS_ON_NODE:+--nproc "$SLURM_GPUS_ON_NODE"} "$@" &
step=$!
trap 'kill -USR1 "$step"' USR1 TERM # srun hands it on to mfsdp

# A trapped signal ends `wait` early, with the step still running.
code=0
wait "$step" || code=$?
while kill -0 "$step" 2>/dev/null; do
  code=0
  wait "$step" || code=$?
done

if [[ $code -eq $STOPPED ]]; then
  echo "stopped with its state saved: queueing job $SLURM_JOB_ID again" >&2
  end_cluster
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
