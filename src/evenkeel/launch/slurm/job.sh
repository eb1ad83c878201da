# Sourced by the script of every Slurm job of ours, on its first node: where the nodes meet, how they are started, and
# whether the job comes back when it ends. slurm/train.sbatch uses it, and so does what slurm/submit.py submits,
# which has a copy in the folder of the job.

# One task a node, on all nodes we got: of a range, Slurm would start the least. The CPUs of a task are said again,
# because newer versions of Slurm do not hand them down. When one node has ended, the others have the time of a snapshot.
export SLURM_NTASKS=$SLURM_JOB_NUM_NODES SLURM_NNODES=$SLURM_JOB_NUM_NODES SLURM_NTASKS_PER_NODE=1 SLURM_WAIT=50
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export SLURM_EXPORT_ENV=ALL # whatever of the submitting shell this script was not to see, the ranks are to see this one's
export PYTHONUNBUFFERED=1   # srun's own --unbuffered makes the log a terminal, unless it has a file for each task

# What another job, or the shell that submitted this one, has said about ranks and rendezvous is not about this job.
unset RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT "${!TORCHELASTIC_@}"

# A task of an array has a number of its own as well, but the last one's is that of the whole array.
evenkeel_job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
evenkeel_job=${evenkeel_job:-$SLURM_JOB_ID}

# Over all its requeues this is one launch of one run.
export EVENKEEL_LAUNCH=slurm-$evenkeel_job

# A controller may be slow or away for a while, most of all when many jobs are preempted together.
evenkeel_ask() { # COMMAND...
  local try
  for try in 1 2 3 4 5 6; do
    timeout 60 "$@" && return
    sleep $((try * try))
  done
  echo "evenkeel: no answer to: $*" >&2
  return 1
}

# Nodes meet at this one, by the address that Slurm's own daemons use for it, at a port of this start alone: two jobs on one
# node differ by their ids, and a requeued job does not meet what is left of its former self.
evenkeel_meeting() {
  local address port
  address=$(evenkeel_ask scontrol show node --oneliner "$SLURMD_NODENAME" | sed -E 's/.* NodeAddr=([^ ]+).*/\1/')
  address=${address:-$SLURMD_NODENAME}
  port=$((20000 + (SLURM_JOB_ID * 37 + ${SLURM_RESTART_COUNT:-0} * 7) % 12000))
  while (exec 3<>"/dev/tcp/$address/$port") 2>/dev/null; do port=$((port + 1)); done
  case $address in *:*) address="[$address]" ;; esac
  echo "$address:$port"
}
EVENKEEL_MASTER=$(evenkeel_meeting)
export EVENKEEL_MASTER

# Another start makes sense after 75, stopped by a signal and saved, and where somebody was killed: 137, or 253 as Slurm has
# it for want of memory, or a signal before anybody listened. But not if the job has been cancelled, or if a node has said
# by Requeue=0 that nothing would come of it. Slurm itself requeues a job that it preempts or whose node it loses, but not
# one that ends in its grace time.
evenkeel_come_back() {
  local code=$1 job
  case $code in
    201 | 202) exit $((code - 200)) ;; # failed or refused before the start, and no node had to be killed
    75 | 137 | 138 | 140 | 143 | 253) ;;
    *) return ;;
  esac
  job=$(evenkeel_ask scontrol show job --oneliner "$evenkeel_job")
  case $job in
    *Requeue=0*) exit 1 ;;
    *JobState=RUNNING*)
      echo "evenkeel: exit code $code: the job is requeued and continues where it stopped" >&2
      trap '' TERM # the requeue ends this shell as well, but not before it is told so
      evenkeel_ask scontrol requeue "$evenkeel_job" || echo "evenkeel: it cannot be requeued; submit it again" >&2
      ;;
  esac
}
trap 'evenkeel_come_back $?' EXIT
trap : TERM USR1 USR2 # they are for the ranks; this shell must live to see how those end

# Every node must see a folder before any of them waits for the others.
evenkeel_probe() { # FOLDER
  local blind
  # shellcheck disable=SC2016  # for the shells of the nodes
  blind=$(srun sh -c '[ -d "$1" ] || echo "blind: $SLURMD_NODENAME"' sh "$1" 2>/dev/null | sed -n 's/^blind: //p')
  [ -z "$blind" ] && return
  echo "evenkeel: $1: cannot be seen on ${blind//$'\n'/, }; name a --run-dir or --folder that all nodes share" >&2
  exit 2
}
