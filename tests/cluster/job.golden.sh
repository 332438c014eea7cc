#!/bin/bash
#SBATCH --job-name=samba_421m
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --mem=0
#SBATCH --partition=gpu
#SBATCH --account=research
#SBATCH --time=1-00:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/shared/runs/samba_421m/logs/slurm-%j.txt
#SBATCH --chdir=/home/someone/hybridtron
#SBATCH --exclusive
# samba_421m: 4 nodes of 8 processes
# Written by hybridtron submit. Users may edit this script and submit it with: sbatch /shared/runs/samba_421m/slurm/job.sh
# shellcheck disable=SC2016,SC2054  # settings are quoted, so $ and commas have no special meaning
run=/shared/runs/samba_421m
per_node=8
fitting=4  # numbers of nodes that fit the layout
spares=0  # nodes in addition, which take the place of lost nodes
requeue=true
drain=false
stage=''  # folder on each node for copies of the data
local_dir=''  # folder on each node for local checkpoints
mkdir -p /home/someone/.cache  # the container mounts this folder
container=(--container-image=/shared/images/hybridtron.sqsh --container-mounts=/shared/runs/samba_421m:/shared/runs/samba_421m,/home/someone/hybridtron:/home/someone/hybridtron,/home/someone/.cache:/home/someone/.cache,/data:/data --container-workdir=/home/someone/hybridtron --container-env=PYTHONPATH,XDG_CACHE_HOME,TRITON_CACHE_DIR,TORCHINDUCTOR_CACHE_DIR,NCCL_SOCKET_IFNAME,NCCL_IB_HCA,NCCL_IB_TIMEOUT,GLOO_SOCKET_IFNAME,OMP_NUM_THREADS)
unpacked=hybridtron-$SLURM_JOB_ID  # the container that each node unpacks once, for all steps and attempts
container+=(--container-name="$unpacked")
alone=(srun --overlap --nodes=1 --ntasks=1 "${container[@]}" python -P -m)
task=(python -P -m)
step=(--wait=1860 --cpus-per-task=12 "${container[@]}")
settings=(
  recipe=samba_421m
  cluster=h100_infiniband
  data.path=/data/slimpajama
  phases.0.micro_batch=4
  run.dir=/shared/runs/samba_421m
)
[ -n "${XDG_CACHE_HOME:-}" ] || export XDG_CACHE_HOME='/home/someone/.cache'
[ -n "${TRITON_CACHE_DIR:-}" ] || export TRITON_CACHE_DIR='/home/someone/.cache/triton'
[ -n "${TORCHINDUCTOR_CACHE_DIR:-}" ] || export TORCHINDUCTOR_CACHE_DIR='/home/someone/.cache/torchinductor'
export NCCL_SOCKET_IFNAME='eth0'
export NCCL_IB_HCA='=mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7'
export NCCL_IB_TIMEOUT='22'
export GLOO_SOCKET_IFNAME='eth0'
export OMP_NUM_THREADS='12'

# Steps that are the same for every job. The lines above are this job's own values.
set -uo pipefail  # only after the software was loaded, whose scripts may fail with these options
export PYTHONPATH=$run/code${PYTHONPATH:+:$PYTHONPATH}
MASTER_PORT=$(shuf -i 20000-31999 -n 1)  # new at each start, below the system's range for connections
export MASTER_PORT
HYBRIDTRON_RUN_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')  # ranks of another start find no keys in the store
export HYBRIDTRON_RUN_TOKEN
logs=$run/logs/slurm-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)
mkdir -p "$logs"

# Run a command and return its exit code. Every signal is forwarded as SIGUSR1, which srun passes to all tasks; SIGTERM
# would make srun kill them. A signal interrupts `wait`, so it is called again until the command has ended.
stopped='' job=''
trap 'stopped=yes; [ -z "$job" ] || kill -USR1 "$job" 2>/dev/null' TERM INT USR1
forwarding() {
  local code
  "$@" & job=$!
  [ -z "$stopped" ] || kill -USR1 "$job"
  while kill -0 "$job" 2>/dev/null; do wait "$job"; done
  wait "$job"; code=$?
  job=''
  return "$code"
}

use_nodes() {  # NODE,NODE,...: choose nodes; rank 0 runs on the first one, and the other ranks connect to it
  nodes=$1
  MASTER_ADDR=$(scontrol show node "${nodes%%,*}" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)
  export MASTER_ADDR
}

# shellcheck disable=SC2329  # `forwarding` calls it
everywhere() {  # LOG MODULE ...: run a module on the chosen nodes, one process for each GPU (or CPU process)
  local output=$1 count; shift
  count=$(tr ',' '\n' <<<"$nodes" | wc -l)
  exec srun --nodelist="$nodes" --nodes="$count" --ntasks=$((count * per_node)) --ntasks-per-node="$per_node" \
    --distribution=block --kill-on-bad-exit=0 --output="$output" "${step[@]}" "${task[@]}" "$@"
}

# shellcheck disable=SC2329  # `forwarding` calls it
once_a_node() {  # LOG MODULE ...: run a module as one process on each chosen node, without a limit for the slower nodes
  per_node=1
  step=(--wait=0 "${step[@]:1}")
  everywhere "$@"
}

outside() {  # COMMAND: run a command on each node, outside the container; a node that does not answer is not waited for
  timeout 120 srun --overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
    --kill-on-bad-exit=0 "$@"
}

finish() {  # CODE: end the job for good, and remove the unpacked container, which some settings of pyxis leave there
  if [ -n "$unpacked" ]; then
    outside timeout 60 enroot remove --force "pyxis_$unpacked" >"$logs/removed.txt" 2>&1
  fi
  exit "$1"
}

# Get a decision, which follows from the run's history: a word, the nodes that it applies to, the nodes that were just
# found to be bad, and the number of spare nodes, which are the last ones. A dash means none. The job's log has reasons.
ask() {
  read -r word named bad HYBRIDTRON_SPARES < <("${alone[@]}" hybridtron.cluster.attempt "$@" --run "$run" \
    --job "$SLURM_JOB_ID" --restart "${SLURM_RESTART_COUNT:-0}" | tail -n 1)
  [ "${named:--}" != - ] || named=''
  [ "${bad:--}" != - ] || bad=''
}

again() {  # [NODE,...]: requeue this job and exclude these nodes
  if [ "$requeue" != true ]; then
    echo "the run is not at its end, and cluster.requeue=false: the chain's next job resumes it, or submit it again" >&2
    finish 1
  fi
  # a job that was already cancelled, or requeued by somebody else, must not be requeued
  [ "$(squeue --noheader --job "$SLURM_JOB_ID" --format %T)" = RUNNING ] || exit 1
  trap '' TERM  # requeueing terminates this script, but nodes can be excluded only after that
  scontrol requeue "$SLURM_JOB_ID" || exit 1
  [ -z "$1" ] || scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$1"
  exit 1
}

follow() {  # continue on the nodes that a check has named, or end this attempt
  case $word in
    go) use_nodes "$named"; export HYBRIDTRON_SPARES ;;
    again) again "$named" ;;
    *) finish 1 ;;
  esac
}

# Is there anything to do?
# containers mount these folders; a node where it fails reports that itself
[ -z "$stage" ] || outside mkdir -p "$stage"
[ -z "$local_dir" ] || outside mkdir -p "$local_dir"
ask begin --nodes "$nodes"
case $word in
  go) ;;
  done) finish 0 ;;
  *) finish 1 ;;
esac

# Is every node fit to train on?
use_nodes "$nodes"
forwarding everywhere "$logs/check-%t.txt" hybridtron.cluster.preflight --reports "$logs" "${settings[@]}"
code_of_check=$?
if [ -z "$stopped" ]; then
  ask check --nodes "$nodes" --reports "$logs" --code "$code_of_check" --fitting "$fitting" --spares "$spares"
  if [ "$drain" = true ] && [ -n "$bad" ]; then
    scontrol update NodeName="$bad" State=DRAIN Reason="failed the check of job $SLURM_JOB_ID"
  fi
  follow
fi

# Copy the data to each node's own disk. A node that fails is left out.
if [ -n "$stage" ] && [ -z "$stopped" ]; then
  mkdir -p "$logs/stage"
  forwarding once_a_node "$logs/stage/check-%t.txt" hybridtron.cluster.stage --reports "$logs/stage" "${settings[@]}"
  code_of_stage=$?
  if [ -z "$stopped" ]; then
    ask check --copy --nodes "$nodes" --reports "$logs/stage" --code "$code_of_stage" \
      --fitting "$fitting" --spares "$spares"
    follow
  fi
fi

# Train, then decide what follows.
code_of_run=75  # stopped before it began
if [ -z "$stopped" ]; then
  forwarding everywhere "$logs/rank-%t.txt" hybridtron train "${settings[@]}"
  code_of_run=$?
fi

ask end --code "$code_of_run" ${stopped:+--stopped}
case $word in
  done) finish 0 ;;
  again) again "$named" ;;
  *) finish 1 ;;
esac
