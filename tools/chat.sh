#!/usr/bin/env bash
# Talks to a GGUF file in llama.cpp, or has it continue texts if it was not trained on conversations.
#
#   bash tools/chat.sh MODEL.gguf [--tokens N]     an empty line or Ctrl-D ends it
#
# Any other program with llama.cpp inside does as well: llama-cli -m MODEL.gguf, Ollama, LM Studio.
set -euo pipefail
model=$(realpath "${1:?"usage: bash tools/chat.sh MODEL.gguf [--tokens N]"}")
shift
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source tools/engines.sh
exec "$ENGINES/bin/python" tools/chat.py "$model" "$@"
