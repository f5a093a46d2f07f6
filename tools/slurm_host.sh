#!/usr/bin/env bash
# A SLURM cluster on this one machine, for tests: slurmctld, several slurmd and munge of its own.
#
#   bash tools/slurm_host.sh start FOLDER [NODES]   nodes n1, n2, …, of 4 CPUs each; default 4
#   bash tools/slurm_host.sh stop FOLDER
#
# `start` installs Debian's packages where they are missing and leaves FOLDER/slurm.conf for
# SLURM_CONF; everything else it writes lies in FOLDER, too. Needs root and Debian or Ubuntu; exit
# code 77 and one line say that this machine cannot. A line `export NAME=value` in FOLDER/faults/nK
# enters the environment of every task on node nK (SLURM's TaskProlog): that is how tests break one.
set -euo pipefail

CANNOT=77
PACKAGES=(slurmctld slurmd slurm-client munge)
SECONDS_TO_START=60

cannot() {
    echo "slurm_host.sh: $*" >&2
    exit $CANNOT
}

install_packages() {
    local program missing=0
    for program in slurmctld slurmd sbatch munged; do
        command -v $program >/dev/null || missing=1
    done
    [ $missing = 0 ] && return
    command -v apt-get >/dev/null || cannot "SLURM is not installed and there is no apt-get"
    local install=(apt-get install -y -q --no-install-recommends "${PACKAGES[@]}")
    export DEBIAN_FRONTEND=noninteractive
    "${install[@]}" >"$folder/apt.log" 2>&1 </dev/null ||
        { apt-get update -q && "${install[@]}"; } >>"$folder/apt.log" 2>&1 </dev/null ||
        cannot "apt-get could not install ${PACKAGES[*]}; see $folder/apt.log"
}

free_ports() { # free_ports COUNT: the first of so many free ports in a row
    python3 - "$1" <<'PYTHON'
import random
import socket
import sys
from contextlib import ExitStack

for _ in range(100):
    first = random.randrange(10000, 20000 - int(sys.argv[1]))  # jobs' ranks meet above, srun higher
    try:
        with ExitStack() as stack:
            for port in range(first, first + int(sys.argv[1])):
                stack.enter_context(socket.socket()).bind(("", port))
        print(first)
        break
    except OSError:
        continue
PYTHON
}

write_config() {
    local port host number
    port=$(free_ports $((nodes + 1)))
    host=$(hostname -s)
    mkdir -p "$folder"/{state,spool,log,faults}
    cat >"$folder/task_prolog.sh" <<PROLOG
#!/bin/sh
cat "$folder/faults/\$SLURMD_NODENAME" 2>/dev/null || true
PROLOG
    chmod +x "$folder/task_prolog.sh"
    cat >"$folder/slurm.conf" <<CONF
ClusterName=titan-loop-test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$folder/munge.socket
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog=$folder/task_prolog.sh
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$folder/jobs.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
ReturnToService=1
JobRequeue=1
KillWait=30
MinJobAge=3600
InactiveLimit=0
Waittime=0
SlurmdTimeout=300
PartitionName=main Nodes=n[1-$nodes] Default=YES MaxTime=60 State=UP
CONF
    # Jobs get the nodes of the least weight first, so a test knows which ones it will get.
    for ((number = 1; number <= nodes; number++)); do
        echo "NodeName=n$number NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + number))" \
            "CPUs=4 Weight=$number State=UNKNOWN"
    done >>"$folder/slurm.conf"
}

start() {
    [ "$(id -u)" = 0 ] || cannot "starting SLURM's daemons needs root"
    mkdir -p "$folder"
    install_packages
    [ ! -f "$folder/slurmctld.pid" ] || stop
    write_config
    export SLURM_CONF=$folder/slurm.conf
    head -c 128 /dev/urandom >"$folder/munge.key"
    chmod 600 "$folder/munge.key"
    munged --force --key-file "$folder/munge.key" --socket "$folder/munge.socket" \
        --pid-file "$folder/munged.pid" --log-file "$folder/log/munged.log" \
        --seed-file "$folder/munge.seed" 2>>"$folder/log/munged.err" ||
        cannot "munged did not start; see $folder/log"
    slurmctld -c </dev/null || cannot "slurmctld did not start; see $folder/log"
    local number deadline=$((SECONDS + SECONDS_TO_START))
    for ((number = 1; number <= nodes; number++)); do
        slurmd -N n$number </dev/null || cannot "slurmd did not start; see $folder/log"
    done
    until [ "$(sinfo -h -N -t idle -o %N 2>/dev/null | wc -l)" = "$nodes" ]; do
        [ $SECONDS -lt $deadline ] || cannot "the nodes did not come up; see $folder/log"
        sleep 0.2
    done
}

stop() {
    local file pid tenths
    # Steps and their tasks first: without slurmd nobody ends them.
    [ ! -S "$folder/munge.socket" ] || SLURM_CONF=$folder/slurm.conf timeout 10 scancel --signal=KILL --full -u root || true
    for file in "$folder"/slurmctld.pid "$folder"/slurmd-*.pid "$folder"/munged.pid; do
        [ -f "$file" ] || continue
        pid=$(cat "$file")
        kill "$pid" 2>/dev/null || continue
        # They write into the folder until they are gone; a zombie is.
        for ((tenths = 0; tenths < 100; tenths++)); do
            grep -qs '^State:.[^Z]' "/proc/$pid/status" || break
            sleep 0.1
        done
    done
}

[ $# -ge 2 ] || { sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 2; }
mkdir -p "$2"
folder=$(cd "$2" && pwd)
nodes=${3:-4}
"$1"
