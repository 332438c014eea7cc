#!/bin/bash
#SBATCH --job-name=samba_421m
#SBATCH --nodes=1-4
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --mem=0
#SBATCH --partition=gpu
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/shared/runs/samba_421m/logs/slurm-%j.txt
#SBATCH --chdir=/home/someone/hybridtron
# samba_421m: 1 or 2 or 4 nodes of 8 processes
# Written by slurm/submit.py. It may be edited, and submitted again with: sbatch /shared/runs/samba_421m/slurm/job.sh
# shellcheck disable=SC2016  # settings are quoted, so that the shell leaves them as they are
run=/shared/runs/samba_421m
code=$run/code
python=python
per_node=8
logs=$run/logs/slurm-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
mkdir -p "$logs"
module load cuda/13.0
# shellcheck disable=SC1091
source /shared/venvs/hybridtron/bin/activate
export NCCL_SOCKET_IFNAME='ens3'
export NCCL_IB_HCA='=rocep0,rocep1,rocep2,rocep3'
export NCCL_IB_GID_INDEX='3'
export NCCL_IB_TC='106'
export GLOO_SOCKET_IFNAME='ens3'
export OMP_NUM_THREADS='12'
set -uo pipefail  # after the software, whose scripts may not bear it

# Runs a command and exits as it does. Signals go on as SIGUSR1, which srun hands on to every task; at SIGTERM it would
# kill them. `wait` ends early when a signal comes, so it is asked again while there is a job.
stopped='' job=''
trap 'stopped=yes; [ -z "$job" ] || kill -USR1 "$job" 2>/dev/null' TERM INT USR1
attend() {
  local code
  "$@" & job=$!
  [ -z "$stopped" ] || kill -USR1 "$job"
  while kill -0 "$job" 2>/dev/null; do wait "$job"; done
  wait "$job"; code=$?
  job=''
  return "$code"
}

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))

meet_on() {  # NODE,NODE,...: the nodes to use from now on; rank 0 runs on the first of them
  nodes=$1
  MASTER_ADDR=$(scontrol show node "${nodes%%,*}" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)
  export MASTER_ADDR
}

inside() { "$@"; }  # one process on this node

# shellcheck disable=SC2329  # `attend` calls it
everywhere() {  # LOG PROGRAM ...: one process for each GPU (or CPU process) of the chosen nodes
  local output=$1 count; shift
  count=$(tr ',' '\n' <<<"$nodes" | wc -l)
  exec srun "--nodelist=$nodes" \
    "--nodes=$count" \
    "--ntasks=$((count * per_node))" \
    "--ntasks-per-node=$per_node" \
    --distribution=block \
    --kill-on-bad-exit=0 \
    --wait=1860 \
    "--output=$output" \
    --cpus-per-task=12 \
    "$python" "$@"
}

# What the run's history says: a word, the nodes that it is about, and nodes that were found to be bad just now; a dash
# stands for none. The reasons go to this job's log.
ask() {
  read -r word named bad < <(inside "$python" "$code/slurm/attempt.py" "$@" --run "$run" --job "$SLURM_JOB_ID" \
    --restart "${SLURM_RESTART_COUNT:-0}" | tail -n 1)
  [ "${named:--}" != - ] || named=''
  [ "${bad:--}" != - ] || bad=''
}

again() {  # [NODE,...]: requeue this job, without these nodes
  # what SLURM has ended already (cancelled, or requeued by somebody else) is left to it
  [ "$(squeue --noheader --job "$SLURM_JOB_ID" --format %T)" = RUNNING ] || exit 1
  trap '' TERM  # requeueing ends this script too, and the nodes can be told only after it
  scontrol requeue "$SLURM_JOB_ID" || exit 1
  [ -z "$1" ] || scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$1"
  exit 1
}

# Is there anything to do?
ask begin --nodes "$nodes"
case $word in
  go) ;;
  done) exit 0 ;;
  *) exit 1 ;;
esac

# Is every node fit to train on?
meet_on "$nodes"
attend everywhere "$logs/check-%t.txt" "$code/slurm/preflight.py" --reports "$logs" \
  --gpus 8 --disk-gb 500 --shared-gb 16 --clock-s 5 --timeout 300 --node-gb-per-s 250.0 --network-gb-per-s 40.0 --fabric rocep0,rocep1,rocep2,rocep3
code_of_check=$?
if [ -z "$stopped" ]; then
  ask check --nodes "$nodes" --reports "$logs" --code "$code_of_check" --fitting 1,2,4
  case $word in
    go) meet_on "$named" ;;
    again) again "$named" ;;
    *) exit 1 ;;
  esac
fi

# The run itself, and what comes after it
code_of_run=75  # told to stop before it began
if [ -z "$stopped" ]; then
  attend everywhere "$logs/rank-%t.txt" "$code/train.py" \
    recipe=samba_421m \
    cluster=h100_roce \
    data.path=/data/slimpajama \
    run.dir=/shared/runs/samba_421m
  code_of_run=$?
fi

ask end --code "$code_of_run" ${stopped:+--stopped}
case $word in
  done) exit 0 ;;
  again) again "$named" ;;
  *) exit 1 ;;
esac
