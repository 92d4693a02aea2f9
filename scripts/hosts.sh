#!/usr/bin/env bash
# Runs a command on several hosts, each a network namespace of this machine with a hostname of its own.
#
#   scripts/hosts.sh N RATE DELAY COMMAND ...
#   scripts/hosts.sh 2 500mbit 0.2ms torchrun --nnodes 2 --node_rank {rank} --master_addr {master} train.py
#
# The hosts are joined by a bridge; RATE and DELAY hold for each link, in tc's words ("none" and 0 leave them alone).
# The hosts are named host0, host1, ...; a host's own name leads to 127.0.1.1, as after an installation of Debian.
# In COMMAND {rank} is the number of the host, and {master} the address of host 0. Host 0's output is shown, and that of
# the others only if a host fails. Linux with iproute2, as root.
set -euo pipefail
if [ "${1:-}" = --help ] || [ $# -lt 4 ]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
    exit 2
fi
hosts=$1 rate=$2 delay=$3
shift 3
id=hz$$ logs=$(mktemp -d) launched=()

remove() {
    # unshare ignores SIGTERM, and so does the first process of a namespace.
    for pid in "${launched[@]:-}"; do kill -KILL -- "-$pid" 2>/dev/null || true; done
    for ((host = 0; host < hosts; host++)); do ip netns del "$id-$host" 2>/dev/null || true; done
    ip netns del "$id-switch" 2>/dev/null || true
    rm -rf "$logs" /etc/netns/"$id"-*
}
trap remove EXIT

limit() { # NAMESPACE DEVICE
    [ "$rate" = none ] || ip netns exec "$1" tc qdisc add dev "$2" root handle 1: tbf rate "$rate" burst 256kb latency 400ms
    [ "$rate" = none ] || [ "$delay" = 0 ] ||
        ip netns exec "$1" tc qdisc add dev "$2" parent 1:1 handle 10: netem delay "$delay" limit 20000 2>/dev/null ||
        echo "hosts.sh: this kernel has no netem: the link of $2 has no delay" >&2
}

ip netns add "$id-switch"
ip -n "$id-switch" link add bridge type bridge
ip -n "$id-switch" link set bridge up
for ((host = 0; host < hosts; host++)); do
    ip netns add "$id-$host"
    mkdir -p "/etc/netns/$id-$host" # what is there covers /etc in the namespace
    { echo "127.0.0.1 localhost" && echo "127.0.1.1 host$host"
      for ((other = 0; other < hosts; other++)); do echo "10.77.0.$((other + 1)) host$other"; done
    } | awk '!seen[$2]++' >"/etc/netns/$id-$host/hosts"
    ip -n "$id-$host" link set lo up
    ip -n "$id-$host" link add eth0 type veth peer name "port$host" netns "$id-switch"
    ip -n "$id-$host" addr add "10.77.0.$((host + 1))/24" dev eth0
    ip -n "$id-$host" link set eth0 up
    ip -n "$id-switch" link set "port$host" master bridge
    ip -n "$id-switch" link set "port$host" up
    limit "$id-$host" eth0
    limit "$id-switch" "port$host"
done
for ((host = hosts - 1; host >= 0; host--)); do
    command=("${@//\{rank\}/$host}")
    log=$logs/host$host
    [ "$host" != 0 ] || log=/dev/stdout
    # A namespace of process ids of its own: when the command ends, whatever it started ends too.
    setsid ip netns exec "$id-$host" unshare --uts --pid --fork --kill-child --mount-proc \
        bash -c 'hostname "$0"; exec "$@"' "host$host" \
        "${command[@]//\{master\}/10.77.0.1}" >"$log" 2>&1 &
    launched+=($!)
done
status=0
for pid in "${launched[@]}"; do wait "$pid" || status=$?; done
[ "$status" = 0 ] || tail -n 20 "$logs"/* 2>/dev/null || true
exit "$status"
