
# Steps that are the same for every element. The lines above are this array's own values.
set -uo pipefail

# forwarding.sh

# SLURM sends a signal before the time limit; training then writes a checkpoint and exits with 75.
forwarding "${alone[@]}" hybridtron train "${settings[@]}"
ended=$?

if [ "$ended" -eq 75 ] && [ "$requeue" = true ]; then
  scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi
exit "$ended"
