# Sourced by the other scripts: everything a fresh machine with only Python 3.11 or later needs.
#
#   TITAN_LOOP_VENV         the virtual environment; default .venv in the checkout
#   TITAN_LOOP_TORCH_INDEX  where the CPU build of torch comes from; default pip's own index
#
# Afterwards $VENV is the environment and the working directory is the checkout. A stamp in the
# environment makes the next call a matter of milliseconds until pyproject.toml changes.

# Installing anything that needs torch before torch itself may pull gigabytes of CUDA libraries,
# hence torch first, and alone.
CPU_TORCH="torch==2.13.0"

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
VENV=${TITAN_LOOP_VENV:-.venv}

# The environment's variables that decide how fast and how chatty every command below is.
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 TOKENIZERS_PARALLELISM=false

setup_stage() { # setup_stage WHAT COMMAND...: one line for a stage, its log when it fails
    local what=$1 start=$SECONDS log="$VENV/setup.log"
    shift
    printf 'set-up: %-28s ' "$what"
    if "$@" >>"$log" 2>&1 </dev/null; then
        printf 'done (%d s)\n' $((SECONDS - start))
    else
        printf 'FAILED\n'
        tail -n 40 "$log" >&2
        printf 'titan-loop: error: set-up failed at "%s"; the whole log is %s\n' "$what" "$log" >&2
        exit 1
    fi
}

python_is_recent() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    local name
    for name in python3 python3.13 python3.12 python3.11 python; do
        if command -v "$name" >/dev/null && python_is_recent "$name"; then
            command -v "$name"
            return
        fi
    done
    echo "titan-loop: error: no Python 3.11 or later on PATH; install one" >&2
    exit 1
}

usable_torch() { # usable_torch PYTHON: print the version of a torch within pyproject's bounds
    "$1" - <<'PYTHON'
import re
import sys
from importlib.metadata import PackageNotFoundError, version

low, high = re.search(r'"torch>=([\d.]+),<([\d.]+)"', open("pyproject.toml").read()).groups()
try:
    found = version("torch")
except PackageNotFoundError:
    sys.exit(1)
number = tuple(map(int, re.match(r"(\d+)\.(\d+)", found).groups()))
if not tuple(map(int, low.split("."))) <= number < tuple(map(int, high.split("."))):
    sys.exit(1)
print(found)
PYTHON
}

install_torch() {
    if nvidia-smi -L 2>/dev/null | grep -q GPU; then
        local bounds
        bounds=$(grep -o '"torch>=[^"]*"' pyproject.toml | tr -d '"')
        "$VENV/bin/python" -m pip install "$bounds"
    elif [ -n "${TITAN_LOOP_TORCH_INDEX:-}" ]; then
        # Its dependencies come with the package, from pip's own index.
        "$VENV/bin/python" -m pip install --no-deps --index-url "$TITAN_LOOP_TORCH_INDEX" "$CPU_TORCH"
    else
        "$VENV/bin/python" -m pip install "$CPU_TORCH"
    fi
}

install_package() {
    # `pip install --group` needs pip 25.1; reading the group here works with any pip.
    local -a dev
    mapfile -t dev < <("$VENV/bin/python" -c '
import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["dev"], sep="\n")')
    echo "torch==$(usable_torch "$VENV/bin/python")" >"$VENV/constraints.txt"
    "$VENV/bin/python" -m pip install -c "$VENV/constraints.txt" -e . "${dev[@]}"
}

layered_environment() { # layered_environment FOLDER: a new one that sees $VENV behind its own packages
    rm -rf "$1"
    "$VENV/bin/python" -m venv --without-pip "$1"
    "$VENV/bin/python" - "$("$1/bin/python" -c 'import site; print(site.getsitepackages()[0])')" <<'PYTHON'
import pathlib
import site
import sys

below = "".join(f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages())
pathlib.Path(sys.argv[1], "main-environment.pth").write_text(below)
PYTHON
}

set_up() {
    local stamp="$VENV/titan-loop-stamp" wanted python
    wanted="$PWD $(cksum <pyproject.toml)"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return
    fi
    if [ ! -x "$VENV/bin/python" ]; then
        python=$(find_python) || exit 1
        mkdir -p "$VENV" || exit 1
        # A torch that is already there (a container image, a cluster's module) is kept.
        if usable_torch "$python" >/dev/null; then
            setup_stage "virtual environment" "$python" -m venv --system-site-packages "$VENV"
        else
            setup_stage "virtual environment" "$python" -m venv "$VENV"
        fi
    fi
    if ! usable_torch "$VENV/bin/python" >/dev/null; then
        setup_stage "torch" install_torch
    fi
    setup_stage "titan_loop and dependencies" install_package
    echo "$wanted" >"$stamp"
}

set_up
case $VENV in /*) ;; *) VENV=$PWD/$VENV ;; esac
