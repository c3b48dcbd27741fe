#!/usr/bin/env bash
# Train on two machines. Start the same line on each, in any order; they meet at MASTER and number themselves.
#
#   scripts/torchrun.sh MASTER PROCESSES [config.yaml] [key=value ...]
#   scripts/torchrun.sh 10.0.0.1 4 data=/shared/my.yaml model=v11s project=/shared/runs name=two_hosts
#
#   MASTER     address of one of the two machines, the same on both; port 29500 must be open between them
#   PROCESSES  processes on this machine: its GPUs
#
# The environment can set NODES (2), PORT (29500), RUN_ID (detector; another for each run that is on at the same time)
# and PYTHON (.venv's). GLOO_SOCKET_IFNAME (CPU) and NCCL_SOCKET_IFNAME (GPU) name the network card between the machines
# where the first guess is wrong. More: docs/distributed.md
set -euo pipefail
if [ $# -lt 3 ]; then
    sed -n '2,14s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
master="$1" processes="$2" port="${PORT:-29500}"
shift 2
python="${PYTHON:-$(cd "$(dirname "$0")/.." && pwd)/.venv/bin/python}"

# This machine's address on the way to MASTER, and whether it is MASTER. Torchrun would go by the host name, which many
# systems resolve to 127.0.1.1 or to another network.
read -r here is_master < <("$python" - "$master" "$port" <<'PY'
import socket, sys

with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting sends nothing
    probe.connect((sys.argv[1], int(sys.argv[2])))
    here, there = probe.getsockname()[0], probe.getpeername()[0]
print("loopback" if here.startswith("127.") else here, int(here == there))
PY
)
if [ "$here" = loopback ]; then
    echo "$0: $master is this machine's loopback here; give the address that the other machine sees" >&2
    exit 2
fi

exec "$python" -m torch.distributed.run \
    --nnodes "${NODES:-2}" --nproc-per-node "$processes" \
    --rdzv-backend c10d --rdzv-endpoint "$master:$port" --rdzv-id "${RUN_ID:-detector}" \
    --rdzv-conf "is_host=$is_master" --local-addr "$here" \
    -m detector train "$@"
