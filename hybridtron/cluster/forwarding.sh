# Runs a command and exits as it does. Every signal is forwarded as SIGUSR1, which srun passes to all tasks; at SIGTERM
# it would kill them. `wait` ends early when a signal comes, so it is called again while there is a job.
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
