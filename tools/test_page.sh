#!/usr/bin/env bash
# The server's page in a real Chromium: type, stream, move the sliders, stop, lose the server, come back,
# and WCAG's rules in light, dark and on a phone. Then the page that runs a model itself (tools/demo/browser).
#
#   bash tools/test_page.sh [PYTEST ARGUMENTS]
#
# Needs node, npm and Chromium; as root it installs Debian's. Where these cannot be had it says so and
# succeeds, unless TITAN_LOOP_REQUIRE=browser. TITAN_LOOP_SCREENSHOTS names a folder for pictures.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
set_up_tests

PACKAGES=(playwright-core@1.65.1 axe-core@4.14.1)

name=${PACKAGES[*]}
folder=$VENV/page-${name//[^a-z0-9.]/-}
mkdir -p "$folder"
install=(apt-get install -y -q --no-install-recommends chromium fonts-dejavu-core)
if ! command -v chromium >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { "${install[@]}" || { apt-get update -q && "${install[@]}"; }; } >"$folder/apt.log" 2>&1 </dev/null ||
        echo "apt-get could not install Chromium; see $folder/apt.log" >&2
fi
if [ ! -d "$folder/node_modules/axe-core" ]; then
    npm install --silent --no-fund --no-audit --prefix "$folder" "${PACKAGES[@]}" ||
        echo "npm's ${PACKAGES[*]} cannot be had" >&2
fi
if [ -d "$folder/node_modules/axe-core" ]; then
    export TITAN_LOOP_NODE_MODULES=$folder/node_modules
fi
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$VENV/bin/python" -m pytest -q -m browser tests/serve "$@"
source tools/group_environment.sh
group_environment onnx
if source tools/demo/browser/packages.sh; then # without them the test is skipped
    export TITAN_LOOP_BROWSER_PACKAGES=$BROWSER_PACKAGES
fi
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$VENV/onnx/bin/python" -m pytest -q -m browser tests/tools "$@"
