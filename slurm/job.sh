# Sourced by the script of every Slurm job of ours, on its first node: where the nodes meet, how they are started, and
# whether the job comes back when it ends. Both slurm/train.sbatch and what slurm/submit.py submits use it.
#
#   EVENKEEL_PYTHON   the Python of the job

# One task a node, on all nodes we got: of a range, Slurm would start the least. The CPUs of a task are said again,
# because newer versions of Slurm do not hand them down. When one node has ended, the others have the time of a snapshot.
export SLURM_NTASKS=$SLURM_JOB_NUM_NODES SLURM_NNODES=$SLURM_JOB_NUM_NODES SLURM_NTASKS_PER_NODE=1 SLURM_WAIT=50
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

export PYTHONUNBUFFERED=1 # srun's own --unbuffered would make the log a terminal

# What another job, or the shell that submitted this one, has said about ranks and rendezvous is not about this job.
unset RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT "${!TORCHELASTIC_@}"

# Over all its requeues this is one launch of one run.
export EVENKEEL_LAUNCH=slurm-$SLURM_JOB_ID

# Nodes meet at this one, by the address that Slurm's own daemons use for it, at a port of this start alone: two jobs on one
# node differ by their ids, and a requeued job does not meet what is left of its former self.
evenkeel_meeting() {
  local address port
  address=$(scontrol show node --oneliner "$SLURMD_NODENAME" | sed -E 's/.* NodeAddr=([^ ]+).*/\1/')
  port=$((20000 + (SLURM_JOB_ID * 37 + ${SLURM_RESTART_COUNT:-0} * 7) % 12000))
  while (exec 3<>"/dev/tcp/$address/$port") 2>/dev/null; do port=$((port + 1)); done
  case $address in *:*) address="[$address]" ;; esac
  echo "$address:$port"
}
EVENKEEL_MASTER=$(evenkeel_meeting)
export EVENKEEL_MASTER

# 75: stopped by a signal and saved; 137: killed. Only then does another start make sense, and only if nobody has cancelled
# the job. Slurm itself requeues a job that it preempts or whose node it loses, but not one that ends in its grace time.
evenkeel_come_back() {
  local code=$1 state
  [ "$code" != 202 ] || exit 2 # refused; on the way here it has to be the highest of all nodes
  state=$(timeout 60 squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)
  if { [ "$code" = 75 ] || [ "$code" = 137 ]; } && [ "$state" = RUNNING ]; then
    echo "evenkeel: exit code $code: the job is requeued and will go on where it stopped" >&2
    timeout 60 scontrol requeue "$SLURM_JOB_ID" || echo "evenkeel: it cannot be requeued; submit it again to go on" >&2
  fi
}
trap 'evenkeel_come_back $?' EXIT
trap : TERM USR1 USR2 # they are for the ranks; this shell must live to see how those end

# Every node must see the run's folder before any of them waits for the others.
evenkeel_probe() {
  local folder=$1 blind
  # shellcheck disable=SC2016  # for the shells of the nodes
  blind=$(srun sh -c '[ -d "$1" ] || echo "$SLURMD_NODENAME"' sh "$folder" 2>/dev/null)
  [ -z "$blind" ] && return
  echo "evenkeel: $folder: cannot be seen on ${blind//$'\n'/, }; name a --run-dir or --folder that all nodes share" >&2
  exit 2
}
