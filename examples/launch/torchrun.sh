#!/usr/bin/env bash
# Several hosts with torchrun. Run this on every one of them, from the same folder:
#
#   HEAD=node1 NNODES=2 NODE_RANK=0 bash examples/launch/torchrun.sh   # numbered hosts: NODE_RANK=1 on the next one
#   HEAD=node1 NNODES=2 bash examples/launch/torchrun.sh               # c10d rendezvous: the same line on all of them
#
# HEAD       one of the hosts (the one with NODE_RANK=0), by a name or an address that all of them can reach
# NNODES     how many hosts there are
# NODE_RANK  the number of this host, from 0; without it the hosts number themselves
# NPROC      ranks to start on this host; default: one an accelerator, one on a CPU
# PORT       a free TCP port on HEAD that the others may connect to; ranks also connect to each other on ports of
#            the system's choice, so hosts must not be separated by a firewall
# IFACE      the network interface between the hosts (`ip -br address` lists them), where the default is a wrong one:
#            gloo takes the address that this host's name resolves to, which may be 127.0.1.1; NCCL the first interface
#
# Arguments are the script to run and its own arguments; default: examples/train.py
set -euo pipefail
: "${HEAD:?one of the hosts}" "${NNODES:?how many hosts}"

if [ -n "${IFACE:-}" ]; then
    export GLOO_SOCKET_IFNAME=$IFACE NCCL_SOCKET_IFNAME=$IFACE
fi
if [ -n "${NODE_RANK:-}" ]; then
    meet=(--node-rank "$NODE_RANK" --master-addr "$HEAD" --master-port "${PORT:-29500}")
else
    meet=(--rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29500}" --rdzv-id "${JOB:-hsdp}")
fi
exec torchrun --nnodes "$NNODES" --nproc-per-node "${NPROC:-auto}" "${meet[@]}" "${@:-examples/train.py}"
