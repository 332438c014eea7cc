#!/bin/bash
# A real SLURM of two nodes on this machine, as root: its controller, two slurmd and its own munge, all in one folder.
# A third node is only in the partition `three`, for jobs with a spare node.
#   two_nodes.sh start FOLDER PORT    (it takes PORT to PORT + 3); then export SLURM_CONF=FOLDER/slurm.conf
#   two_nodes.sh stop FOLDER          (ends every process that start began; the folder can be removed then)
set -eu
folder=$2
export SLURM_CONF=$folder/slurm.conf

start() {
  local port=$1 host
  host=$(hostname -s)
  mkdir -p "$folder"/{state,spool,run}
  chmod 700 "$folder"
  head -c 128 /dev/urandom >"$folder/munge.key"
  chmod 400 "$folder/munge.key"
  cat >"$SLURM_CONF" <<END
ClusterName=two
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/run/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=0
JobRequeue=1
KillWait=20
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=5
SlurmctldPidFile=$folder/run/slurmctld.pid
SlurmdPidFile=$folder/run/slurmd.%n.pid
SlurmdSpoolDir=$folder/spool/%n
StateSaveLocation=$folder/state
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.%n.log
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=1 RealMemory=1000 State=UNKNOWN
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=1 RealMemory=1000 State=UNKNOWN
NodeName=n3 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 3)) CPUs=1 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=60 State=UP
PartitionName=small Nodes=n1 MaxTime=INFINITE State=UP
PartitionName=three Nodes=n1,n2,n3 MaxTime=60 State=UP
END
  munged --force --key-file "$folder/munge.key" --socket "$folder/run/munge.socket" --seed-file "$folder/run/seed" \
    --pid-file "$folder/run/munged.pid" --log-file "$folder/munged.log"
  slurmctld -f "$SLURM_CONF"
  for node in n1 n2 n3; do slurmd -f "$SLURM_CONF" -N $node; done
  for _ in $(seq 60); do
    [ "$(sinfo --noheader --partition three --states idle --format %D 2>/dev/null)" != 3 ] || return 0
    sleep 0.5
  done
  sinfo >&2
  tail -n 20 "$folder"/*.log >&2
  return 1
}

stop() {
  local pids
  scancel --user root 2>/dev/null || true
  for _ in $(seq 40); do
    [ -n "$(squeue --noheader 2>/dev/null)" ] || break
    sleep 0.5
  done
  pids=$(cat "$folder"/run/*.pid 2>/dev/null || true)
  for pid in $pids; do kill "$pid" 2>/dev/null || true; done
  for pid in $pids; do
    for _ in $(seq 20); do ! runs "$pid" || sleep 0.25; done
    ! runs "$pid" || kill -KILL "$pid"
  done
}

runs() {  # PID: neither gone nor a zombie that its parent has not noticed
  [ -d "/proc/$1" ] && ! grep -q '^State:.Z' "/proc/$1/status"
}

case $1 in
  start) start "$3" ;;
  stop) stop ;;
esac
