#!/bin/bash
#SBATCH --job-name=samba_421m
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --no-requeue
#SBATCH --open-mode=append
#SBATCH --output=/shared/runs/samba_421m/logs/slurm-%j.txt
#SBATCH --chdir=/home/someone/hybridtron
# samba_421m: 4 nodes of 4 processes
# Written by slurm/submit.py. It may be edited, and submitted again with: sbatch /shared/runs/samba_421m/slurm/job.sh
# shellcheck disable=SC2016  # settings are quoted, so that the shell leaves them as they are
run=/shared/runs/samba_421m
code=$run/code
python=python
per_node=4
logs=$run/logs/slurm-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
mkdir -p "$logs"
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

inside() { apptainer exec --nv --bind /shared/runs/samba_421m:/shared/runs/samba_421m,/home/someone/hybridtron:/home/someone/hybridtron,/data:/data:ro --pwd /home/someone/hybridtron /shared/hybridtron.sif "$@"; }  # one process on this node

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
    apptainer exec --nv --bind /shared/runs/samba_421m:/shared/runs/samba_421m,/home/someone/hybridtron:/home/someone/hybridtron,/data:/data:ro --pwd /home/someone/hybridtron /shared/hybridtron.sif "$python" "$@"
}

# What the run's history says: a word, the nodes that it is about, and nodes that were found to be bad just now; a dash
# stands for none. The reasons go to this job's log.
ask() {
  read -r word named bad < <(inside "$python" "$code/slurm/attempt.py" "$@" --run "$run" --job "$SLURM_JOB_ID" \
    --restart "${SLURM_RESTART_COUNT:-0}" | tail -n 1)
  [ "${named:--}" != - ] || named=''
  [ "${bad:--}" != - ] || bad=''
}

again() {  # [NODE,...]: this cluster's jobs don't requeue themselves
  echo "the run is not at its end, and cluster.requeue=false: the next job of the chain goes on, or submit it again" >&2
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
  --gpus 4 --disk-gb 10 --shared-gb 1 --clock-s 5 --timeout 300 --no-all-reduce
code_of_check=$?
if [ -z "$stopped" ]; then
  ask check --nodes "$nodes" --reports "$logs" --code "$code_of_check" --fitting 4
  [ -z "$bad" ] || scontrol update NodeName="$bad" State=DRAIN Reason="failed the check of job $SLURM_JOB_ID"
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
    'model.pattern=(M-W-)*3' \
    run.dir=/shared/runs/samba_421m
  code_of_run=$?
fi

ask end --code "$code_of_run" ${stopped:+--stopped}
case $word in
  done) exit 0 ;;
  again) again "$named" ;;
  *) exit 1 ;;
esac
