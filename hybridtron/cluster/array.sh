
# The steps of every element; the lines above are this array's own.
set -uo pipefail

# SLURM signals before the limit; training saves then and exits with 75. `wait` ends early when a signal comes.
stopped='' job=''
trap 'stopped=yes; [ -z "$job" ] || kill -USR1 "$job" 2>/dev/null' TERM INT USR1
"${alone[@]}" hybridtron train "${settings[@]}" & job=$!
[ -z "$stopped" ] || kill -USR1 "$job"
while kill -0 "$job" 2>/dev/null; do wait "$job"; done
wait "$job"
ended=$?

if [ "$ended" -eq 75 ] && [ "$requeue" = true ]; then
  scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi
exit "$ended"
