#!/usr/bin/env bash
# Kills tiny runs at random moments, starts them again and compares them with uninterrupted ones.
#
#   bash tools/chaos.sh [--kills N] [--seed S] [--folder FOLDER]     default: 8 kills
#
# SIGKILL of a rank, of all, of the agent, SIGTERM, SIGSTOP for a while, a disk that fails (EIO) or is
# full (ENOSPC) for a while; while starting, between steps, in saves and in copies to a remote folder,
# with the local checkpoints lost now and then; on 1, 2 and 4 gloo ranks and eight layouts, one thread
# each. Stream, learning rate, R and tokens of every step must be equal, losses bit for bit where the
# layout stayed the same; the last copy must equal the local checkpoint.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

folder=$(mktemp -d "${TMPDIR:-/tmp}/titan-loop-chaos.XXXXXX")
trap 'rm -rf "$folder"' EXIT
PYTHONPATH=. OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES="" \
    "$VENV/bin/python" tools/chaos.py --folder "$folder" "$@" || {
    tail -n 30 "$folder"/*.log-* >&2
    exit 1
}
