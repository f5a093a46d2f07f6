#!/usr/bin/env bash
# The line for vLLM on the cards of exported folders, as printed, with vLLM's build for CPUs.
#
#   bash tools/test_vllm.sh [PYTEST ARGUMENTS]
#
# Outside of CI, since the environment takes 3.5 GB. Last run 2026-11-29.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
set_up_tests

source tools/engines.sh
engine_environment vllm
# Its torch may be a build for CPUs, whose operators PyPI's torchvision lacks; text needs neither.
"$VENV/vllm/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TITAN_LOOP_REQUIRE=vllm TITAN_LOOP_VLLM_PYTHON=$VENV/vllm/bin/python \
    "$VENV/bin/python" -m pytest -q -m vllm tests/contracts "$@"
