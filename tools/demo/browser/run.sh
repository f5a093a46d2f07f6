#!/usr/bin/env bash
# Opens an exported ONNX folder to a browser on this machine.
#
#   titan-loop convert export runs/mine --to onnx --output mine-onnx
#   bash tools/demo/browser/run.sh mine-onnx [PORT]
set -euo pipefail
model=$(realpath "${1:?"usage: bash tools/demo/browser/run.sh FOLDER [PORT]"}")
shift
source "$(dirname "${BASH_SOURCE[0]}")/../../setup.sh"
source tools/demo/browser/packages.sh
exec "$VENV/bin/python" tools/demo/browser/serve.py "$BROWSER_PACKAGES" "$model" "$@"
