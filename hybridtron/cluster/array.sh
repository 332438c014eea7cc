
# The steps of every element; the lines above are this array's own.
set -uo pipefail

# forwarding.sh

# SLURM signals before the limit; training saves then and exits with 75.
forwarding "${alone[@]}" hybridtron train "${settings[@]}"
ended=$?

if [ "$ended" -eq 75 ] && [ "$requeue" = true ]; then
  scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi
exit "$ended"
