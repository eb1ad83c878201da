#!/usr/bin/env bash
# A real Slurm cluster on one machine, for tests: munge, MariaDB, slurmdbd, slurmctld and N slurmd. Each node has its own
# network, host name, process ids, IPC, mounts, /dev/shm and disk ($LAB_DIR/local); all share the rest of the file system.
#
#   lab.sh install           the Debian packages; starts no daemon
#   lab.sh up [N] [CPUS]     N nodes (default 4) of CPUS CPUs (default 2) and 2 pretend GPUs; does nothing where it is up
#   lab.sh node-kill I       a node's crash: SIGKILL to all its processes (I counts from 1)
#   lab.sh node-start I      bring it back and wait until Slurm gives it work again
#   lab.sh down              end everything and remove it
#
# Needs root. LAB_DIR holds the state. Slurm's commands need  export SLURM_CONF=$LAB_DIR/slurm.conf
# There is one lab on a machine: `up` waits LAB_WAIT seconds (480) for another to go, and removes a dead one.
# LAB_OWNER is the pid of a process without which the lab shall not live (none: it stays until `down`).
#
# All processes of the lab live in one PID namespace, whose first process is `tend`: they end with it, however it ends.
set -uo pipefail

SELF=$(realpath "${BASH_SOURCE[0]}")
NAME=eklab          # cluster, network interface, prefix of network namespaces
NETWORK=10.79.0
HEAD=$NETWORK.1
CONTROLLER_PORT=17917 NODE_PORT=17918 ACCOUNTING_PORT=17919 DATABASE_PORT=13406
LIMIT=120           # seconds that anything may take to start
SHARED=/run/$NAME   # what is known of the lab that is up, whichever LAB_DIR it has
PACKAGES=(slurm-wlm slurmdbd munge mariadb-server iproute2)

say() { echo "lab: $*" >&2; }
die() { say "$@"; exit 1; }
address() { echo "$NETWORK.$((10 + $1))"; }

# ---- processes, each named by pid and start, so that a pid which is used again is nobody's

start_of() {  # clock ticks from boot; fails where there is no such process
  local stat
  { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return 1
  read -ra stat <<<"${stat##*) }"
  [ "${stat[0]}" != Z ] && echo "${stat[19]}"
}
alive() { [ "${1:-0}" != 0 ] && [ "$(start_of "$1")" = "$2" ]; }  # PID START
identify() {  # FILE REST...: write there who this process is, as the machine sees it: /proc is still the machine's
  local pid
  read -r pid _ </proc/self/stat  # $$ is of the PID namespace
  echo "$pid $(start_of "$pid") ${*:2}" >"$1.new" && mv "$1.new" "$1"
}

wait_until() {  # WHAT COMMAND...: until COMMAND succeeds
  local what=$1 end=$((SECONDS + LIMIT)); shift
  until "$@" >/dev/null 2>&1; do
    ((SECONDS < end)) || { say "no $what after $LIMIT s"; return 1; }
    sleep 0.1
  done
}
gone() { ! alive "$@"; }
listens() { timeout 5 bash -c "exec 3<>/dev/tcp/$1/$2"; }

background() {  # NAME COMMAND...: in the lab's PID namespace; a shell would hand down an ignored SIGINT
  local name=$1; shift
  env --default-signal setsid nsenter --target "$root" --pid -- "$@" >"$L/log/$name.out" 2>&1 </dev/null 9>&- &
  disown
}

# ---- the record of the lab that is up: PID and start of its first process, of its owner; nodes and CPUs; LAB_DIR

lock() { mkdir -p "$SHARED" && exec 9>"$SHARED/lock" && flock -w "${1:-$LIMIT}" 9; }
unlock() { exec 9>&-; }
read_record() { { read -r root root_start owner owner_start nodes cpus dir <"$SHARED/record"; } 2>/dev/null; }
tended() { read_record && alive "$root" "$root_start"; }
wanted() { [ "$owner" = 0 ] || alive "$owner" "$owner_start"; }

remove() {  # what the record names, and whatever has our names
  local space pid
  if read_record && [ "$dir" ]; then
    alive "$root" "$root_start" && kill -KILL "$root"
    wait_until "end of process $root" gone "$root" "$root_start"
    clear_state "$dir"
  fi
  for space in $(ip netns list | grep -oE "^$NAME-\S+"); do
    for pid in $(ip netns pids "$space"); do kill -KILL "$pid" 2>/dev/null; done
    ip netns del "$space"
  done
  ip link del "$NAME" 2>/dev/null
  rm -f "$SHARED/record"
}
clear_state() { rm -rf "${1:?}"/{state,log,spool,run,dev,mysql,disk,local,etc,slurm.conf,gres.conf,cgroup.conf,slurmdbd.conf}; }

# ---- building

write_config() {
  local i j
  mkdir -p "$L"/{state,log,spool,run,dev,mysql,disk,local,etc}
  chmod 755 "$L" "$L"/*/
  for i in 0 1; do mknod -m 666 "$L/dev/nvidia$i" c 1 3 || return 1; done  # Slurm wants character devices; these are /dev/null
  for ((i = 1; i <= nodes; i++)); do
    mkdir -p "$L/disk/node$i" "$L/spool/node$i"
    {  # as Debian installs a machine: its own name is not the address by which others reach it
      echo "127.0.0.1 localhost"; echo "127.0.1.1 node$i"; echo "$HEAD $(hostname -s)"
      for ((j = 1; j <= nodes; j++)); do ((j == i)) || echo "$(address "$j") node$j"; done
    } >"$L/etc/hosts.node$i"
  done
  cat >"$L/slurm.conf" <<END
ClusterName=$NAME
SlurmctldHost=$(hostname -s)($HEAD)
SlurmctldPort=$CONTROLLER_PORT
SlurmdPort=$NODE_PORT
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$L/run/munge.socket
StateSaveLocation=$L/state
SlurmdSpoolDir=$L/spool/%n
SlurmctldPidFile=$L/run/slurmctld.pid
SlurmdPidFile=$L/run/slurmd.%n.pid
SlurmctldLogFile=$L/log/slurmctld.log
SlurmdLogFile=$L/log/slurmd.%n.log
MailProg=/bin/true
# Finds a job's processes by their parents. One whose parent has died escapes, which cgroups would not let happen.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=$HEAD
AccountingStoragePort=$ACCOUNTING_PORT
AccountingStoragePass=$L/run/munge.socket
AccountingStorageTRES=gres/gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
InactiveLimit=0
KillWait=5
OverTimeLimit=0
MinJobAge=3600
BatchStartTimeout=60
MessageTimeout=15
SlurmctldTimeout=60
SlurmdTimeout=20
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,sched_min_interval=0,bf_interval=2,batch_sched_delay=0,preempt_youngest_first
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
NodeName=node[1-$nodes] NodeAddr=$NETWORK.[11-$((10 + nodes))] CPUs=$cpus RealMemory=4000 Gres=gpu:2 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 MaxTime=1:00:00 State=UP PreemptMode=REQUEUE GraceTime=15
PartitionName=lowhard Nodes=ALL PriorityTier=1 MaxTime=1:00:00 State=UP PreemptMode=REQUEUE GraceTime=0
PartitionName=short Nodes=ALL PriorityTier=1 MaxTime=2 State=UP PreemptMode=REQUEUE GraceTime=15
PartitionName=high Nodes=ALL PriorityTier=10 MaxTime=1:00:00 State=UP PreemptMode=OFF
END
  echo "NodeName=node[1-$nodes] Name=gpu File=$L/dev/nvidia[0-1]" >"$L/gres.conf"
  echo "CgroupPlugin=cgroup/v1" >"$L/cgroup.conf"  # the other one kills slurmd in a network namespace
  cat >"$L/slurmdbd.conf" <<END
DbdHost=$(hostname -s)
DbdAddr=$HEAD
DbdPort=$ACCOUNTING_PORT
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$L/run/munge.socket
LogFile=$L/log/slurmdbd.log
PidFile=$L/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$DATABASE_PORT
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
END
  chmod 600 "$L/slurmdbd.conf"
}

network_up() {  # the switch has a namespace of its own, so that no firewall of the machine stands between nodes
  local i switch=$NAME-switch
  ip netns add "$switch" && ip -n "$switch" link set lo up || return 1
  ip -n "$switch" link add br0 type bridge && ip -n "$switch" link set br0 up || return 1
  ip link add "$NAME" type veth peer name p0 netns "$switch" || return 1
  ip -n "$switch" link set p0 master br0 up && ip addr add "$HEAD/24" dev "$NAME" && ip link set "$NAME" up || return 1
  for ((i = 1; i <= nodes; i++)); do
    ip netns add "$NAME-node$i" && ip -n "$NAME-node$i" link set lo up || return 1
    ip -n "$switch" link add "p$i" type veth peer name eth0 netns "$NAME-node$i" || return 1
    ip -n "$switch" link set "p$i" master br0 up || return 1
    ip -n "$NAME-node$i" addr add "$(address "$i")/24" dev eth0 && ip -n "$NAME-node$i" link set eth0 up || return 1
  done
}

munge_up() {
  dd if=/dev/urandom of="$L/run/munge.key" bs=128 count=1 status=none && chmod 600 "$L/run/munge.key" || return 1
  background munged munged --foreground --force --key-file="$L/run/munge.key" --socket="$L/run/munge.socket" \
    --pid-file="$L/run/munged.pid" --log-file="$L/log/munged.log" --seed-file="$L/run/munge.seed"
  wait_until munge munge --no-input --socket="$L/run/munge.socket"
}

database_up() {  # without slurmdbd sacct fails, and submitit never learns that a job was killed
  local client=(mariadb --no-defaults --socket="$L/run/mysql.socket" --user=root)
  mariadb-install-db --no-defaults --user=root --datadir="$L/mysql" --auth-root-authentication-method=socket \
    --skip-test-db >"$L/log/install-db.out" 2>&1 9>&- || return 1
  background mysql mariadbd --no-defaults --user=root --datadir="$L/mysql" --socket="$L/run/mysql.socket" \
    --pid-file="$L/run/mysql.pid" --bind-address=127.0.0.1 --port=$DATABASE_PORT --innodb-buffer-pool-size=64M \
    --innodb-lock-wait-timeout=900 --innodb-flush-log-at-trx-commit=0 --skip-log-bin
  wait_until "database" "${client[@]}" -e 'select 1' || return 1
  "${client[@]}" -e "create database slurm_acct_db; create user 'slurm'@'127.0.0.1' identified by 'slurm';
    create user 'slurm'@'localhost' identified by 'slurm'; grant all on slurm_acct_db.* to 'slurm'@'127.0.0.1';
    grant all on slurm_acct_db.* to 'slurm'@'localhost';"
}

daemons_up() {
  background slurmdbd env SLURM_CONF="$SLURM_CONF" slurmdbd -D
  wait_until slurmdbd listens "$HEAD" $ACCOUNTING_PORT || return 1
  timeout 60 sacctmgr -i -Q add cluster $NAME >/dev/null || return 1
  background slurmctld slurmctld -D -f "$SLURM_CONF"
  wait_until slurmctld timeout 10 scontrol ping
}

build() {
  local i
  write_config && network_up && munge_up && database_up && daemons_up || return 1
  for ((i = 1; i <= nodes; i++)); do boot "$i"; done
  for ((i = 1; i <= nodes; i++)); do wait_until "answer of node$i" registered "$i" 0 || return 1; done
  touch "$L/run/ready"
}

# ---- nodes

boot() {
  background "node$1" ip netns exec "$NAME-node$1" unshare --uts --ipc --pid --mount --fork --kill-child -- bash "$SELF" node "$1"
}

node() {  # the first process of node I, in its namespaces: with it ends the node
  identify "$L/run/node$1.init"
  hostname "node$1" && mount -t proc proc /proc && mount -t tmpfs -o size=2g shm /dev/shm || exit 1
  mount --bind "$L/etc/hosts.node$1" /etc/hosts && mount --bind "$L/disk/node$1" "$L/local" || exit 1
  env --default-signal slurmd -D -N "node$1" &
  wait $!
}

registered() {  # I SINCE: slurmctld has heard from a slurmd that was started since then (seconds of the clock), and uses it
  local shown
  shown=$(SLURM_TIME_FORMAT=%s timeout 20 scontrol -o show node "node$1") || return 1
  [[ $shown =~ SlurmdStartTime=([0-9]+) ]] && ((BASH_REMATCH[1] >= $2)) || return 1
  [[ $shown =~ State=(IDLE|MIXED|ALLOCATED)(\+CLOUD)?\  ]]
}

node_init() { { read -r init init_start _ <"$L/run/node$1.init"; } 2>/dev/null && alive "$init" "$init_start"; }

node_kill() {
  node_init "$1" || return 0
  kill -KILL "$init" && wait_until "end of node$1" gone "$init" "$init_start"
}

node_start() {
  local now
  node_init "$1" && return
  now=$(date +%s)
  # Slurm does this to a node that has rebooted unexpectedly; it asks for the uptime, which here is the machine's.
  # Otherwise a job whose batch script runs on another node would wait for ever for the processes that were here.
  timeout 60 scontrol update "nodename=node$1" state=down reason=rebooted || return 1
  boot "$1" && wait_until "answer of node$1" registered "$1" "$now"
}

# ---- what goes on while it is up

tend() {  # the first process of the lab
  local id restarts reason
  declare -A since
  identify "$SHARED/record" "$@"
  while sleep 1; do
    [ -e "$L/run/ready" ] || continue
    # Slurm lets a requeued job wait for 121 s, until its old credentials have expired. A node refuses a job within the
    # second of its end ("credential revoked"), so two whole seconds will do.
    while read -r id restarts reason; do
      [[ $restarts != 0 && $reason == BeginTime ]] || continue
      : "${since[$id.$restarts]:=$SECONDS}"
      ((SECONDS - since[$id.$restarts] < 3)) || timeout 20 scontrol update "jobid=$id" StartTime=now
    done < <(timeout 20 squeue -h -t PD -O JobID:20,RestartCnt:10,Reason:40)
  done
}

guard() {  # ROOT START: remove the lab when its owner is gone
  lock; read_record; unlock
  while [ "$root $root_start" = "$*" ] && alive "$root" "$root_start" && alive "$owner" "$owner_start"; do sleep 1; done
  lock && read_record && [ "$root $root_start" = "$*" ] && remove && rmdir "$L"
}

found() {  # start the lab's first process, which writes the record, and its guard
  local by=${LAB_OWNER:-0}
  mkdir -p "$L/log"
  env --default-signal setsid unshare --pid --fork --kill-child -- bash "$SELF" tend "$by" \
    "$(start_of "$by" || echo 0)" "$1" "$2" "$L" >"$L/log/tend.out" 2>&1 </dev/null 9>&- &
  disown
  local first=$!
  wait_until "first process" tended || { kill -KILL "$first"; return 1; }
  [ "$by" = 0 ] && return
  setsid bash "$SELF" guard "$root" "$root_start" >/dev/null 2>&1 </dev/null 9>&- &
  disown
}

up() {  # N CPUS
  local i end=$((SECONDS + ${LAB_WAIT:-480})) told=
  while true; do
    lock $LIMIT || die "another lab.sh has been busy for $LIMIT s"
    tended && wanted || break
    if [ "$dir" = "$L" ]; then
      [ "$nodes $cpus" = "$1 $2" ] && timeout 20 scontrol ping >/dev/null 2>&1 || break
      for ((i = 1; i <= nodes; i++)); do node_start "$i" || die "node$i does not come back"; done
      return
    fi
    unlock
    ((SECONDS < end)) || die "there is a lab in $dir, and only one can be on a machine; end it with: LAB_DIR=$dir $SELF down"
    [ "$told" ] || say "waiting for the lab in $dir to end"
    told=1
    sleep 1
  done
  remove; clear_state "$L"
  found "$1" "$2" && build && return
  tail -n 15 "$L"/log/* >&2
  remove
  die "does not come up"
}

down() {
  lock || die "another lab.sh has been busy for $LIMIT s"
  tended && [ "$dir" != "$L" ] || remove  # somebody else's lab stays
  clear_state "$L"
}

install() {  # policy-rc.d: nothing that is installed may start a daemon
  local policy=/usr/sbin/policy-rc.d
  if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy"
    trap 'rm -f '"$policy" EXIT
  fi
  apt-get -o DPkg::Lock::Timeout=300 update -qq
  DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends "${PACKAGES[@]}"
}

need_node() {
  tended && [ "$dir" = "$L" ] || die "no lab is up in $L"
  [[ ${1:-} =~ ^[1-9][0-9]*$ ]] && (($1 <= nodes)) || die "nodes are 1 to $nodes"
}

command=${1:-}
case $command in
  install) install; exit ;;
  up | node-kill | node-start | down | tend | guard | node) shift ;;
  *) sed -n '2,16s/^# \{0,1\}//p' "$SELF"; exit 2 ;;
esac
[ "$(id -u)" = 0 ] || die "needs root"
[ "${LAB_DIR:-}" ] || die "set LAB_DIR to a folder for the state"
L=$(realpath -m "$LAB_DIR")
((${#L} <= 80)) || die "LAB_DIR is too long for a socket in it: $L"
mkdir -p "$L" || exit 1
export LAB_DIR=$L SLURM_CONF=$L/slurm.conf
case $command in
  up) up "${1:-4}" "${2:-2}" ;;
  node-kill) need_node "${1:-}" && node_kill "$1" ;;
  node-start) need_node "${1:-}" && node_start "$1" ;;
  down) down ;;
  *) "$command" "$@" ;;
esac
