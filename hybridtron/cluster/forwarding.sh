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
