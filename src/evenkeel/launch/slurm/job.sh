# Sourced by the script of every Slurm job of ours, on its first node: where the nodes meet, how they are started, and
# whether the job is requeued when it ends. slurm/train.sbatch uses it; slurm/submit.py copies it into the folder of the
# job.

# One task per node, on all nodes we got: of a range, Slurm would start the least. The CPUs per task are set again,
# because newer versions of Slurm do not pass them on. When one node has ended, the others get time for a snapshot.
export SLURM_NTASKS=$SLURM_JOB_NUM_NODES SLURM_NNODES=$SLURM_JOB_NUM_NODES SLURM_NTASKS_PER_NODE=1 SLURM_WAIT=50
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export SLURM_EXPORT_ENV=ALL # the ranks get this script's environment, even if --export limits the submitting shell's
export PYTHONUNBUFFERED=1   # srun's own --unbuffered turns the log into a terminal, unless each task has a file

# Variables about ranks and rendezvous from another job or the submitting shell are not for this job.
unset RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT "${!TORCHELASTIC_@}"

# A task of an array also has a plain job id, but that of the last task is the id of the whole array.
evenkeel_job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
evenkeel_job=${evenkeel_job:-$SLURM_JOB_ID}

# All requeues count as one launch of one run.
export EVENKEEL_LAUNCH=slurm-$evenkeel_job

# A controller may be slow or down for a while, most often when many jobs are preempted together.
evenkeel_ask() { # COMMAND...
  local try
  for try in 1 2 3 4 5 6; do
    timeout 60 "$@" && return
    sleep $((try * try))
  done
  echo "evenkeel: no answer to: $*" >&2
  return 1
}

# Nodes meet at this one, by the address that Slurm's own daemons use, at a port of this start only: two jobs on one node
# differ by their ids, and a requeued job does not meet leftovers of its previous start.
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

# Here the first node writes the names of nodes that twice computed wrong (--verify-every) or held up the others in a hang.
EVENKEEL_WRONG_NODES=$(mktemp)
export EVENKEEL_WRONG_NODES

# A job may be changed only while it is pending, which is after its requeue; and that is about to end all that runs here.
# So one process does both, and not `timeout`, which a SIGTERM ends even where it is ignored.
evenkeel_requeue_without() { # NODES, AND WHAT WAS ExcNodeList
  echo "evenkeel: $1: computed wrong or hung twice; the job goes on without" >&2
  printf '%s\n' "requeue $evenkeel_job" "update JobId=$evenkeel_job ExcNodeList=$1,${2/(null)/}" | scontrol >/dev/null
}

# Requeue after 75 (stopped by a signal and saved), after a kill (137, or 253 from Slurm when memory runs out), and after a
# signal that came before the handlers. But not if the job was cancelled, or if a node has forbidden it by Requeue=0. Slurm
# itself requeues a job that it preempts or whose node it loses, but not one that ends in its grace time.
evenkeel_come_back() {
  local code=$1 job wrong
  wrong=$(cat "$EVENKEEL_WRONG_NODES" 2>/dev/null)
  rm -f "$EVENKEEL_WRONG_NODES"
  case $code in
    201 | 202) exit $((code - 200)) ;; # failed or refused before the start, and no node was killed
    75 | 137 | 138 | 140 | 143 | 253) ;;
    *) return ;;
  esac
  job=$(evenkeel_ask scontrol show job --oneliner "$evenkeel_job")
  case $job in
    *Requeue=0*) exit 1 ;;
    *JobState=RUNNING*)
      echo "evenkeel: exit code $code: the job is requeued and continues where it stopped" >&2
      trap '' TERM # the requeue also ends this shell, but not before scontrol has returned
      if [ -n "$wrong" ]; then
        evenkeel_requeue_without "$wrong" "$(sed -nE 's/.* ExcNodeList=([^ ]+).*/\1/p' <<<"$job")"
      else
        evenkeel_ask scontrol requeue "$evenkeel_job" || echo "evenkeel: cannot requeue it; submit it again" >&2
      fi
      ;;
  esac
}
trap 'evenkeel_come_back $?' EXIT
trap : TERM USR1 USR2 # for the ranks; this shell must live until they end

# Every node must see a folder before any node waits for the others.
evenkeel_probe() { # FOLDER
  local blind
  # shellcheck disable=SC2016  # for the shells of the nodes
  blind=$(srun sh -c '[ -d "$1" ] || echo "blind: $SLURMD_NODENAME"' sh "$1" 2>/dev/null | sed -n 's/^blind: //p')
  [ -z "$blind" ] && return
  echo "evenkeel: $1: is not visible on ${blind//$'\n'/, }; name a --run-dir or --folder that all nodes share" >&2
  exit 2
}
