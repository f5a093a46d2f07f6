# Sourced by the other scripts: everything a fresh machine with only Python 3.11 or later needs to
# train, evaluate, draw and export. Scripts that test or check call `set_up_tests` afterwards.
#
#   TITAN_LOOP_VENV         the virtual environment; default .venv in the checkout
#   TITAN_LOOP_TORCH_INDEX  where the CPU build of torch comes from; default pip's own index
#
# Afterwards $VENV is the environment and the working directory is the checkout. Stamps in the
# environment make the next call a matter of milliseconds until pyproject.toml or tools/constraints
# change.

# Installing anything that needs torch before torch itself may pull gigabytes of CUDA libraries,
# hence torch first, and alone.
CPU_TORCH="torch==2.13.0"

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
VENV=${TITAN_LOOP_VENV:-.venv}

# The environment's variables that decide how fast and how chatty every command below is.
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 TOKENIZERS_PARALLELISM=false

# Words of pip's that mean a connection. It tries again by itself, but not where a download broke off.
LOST='connection (broken|reset|aborted|refused)|connecttimeout|timed out|max retries|incomplete|not match the hashes|http error (429|5..)|name resolution'

setup_stage() { # setup_stage WHAT COMMAND...: one line for a stage, its log when it fails
    local what=$1 start=$SECONDS log="$VENV/setup.log" attempt from lost
    shift
    touch "$log"
    for attempt in 1 2 3; do
        printf 'set-up: %-28s ' "$what"
        from=$(($(wc -l <"$log") + 1))
        if "$@" >>"$log" 2>&1 </dev/null; then
            printf 'done (%d s)\n' $((SECONDS - start))
            return
        fi
        lost=$(tail -n "+$from" "$log" | grep -iE "$LOST" | tail -n 1 | cut -c 1-200) || true
        if [ -z "$lost" ] || [ $attempt = 3 ]; then
            break
        fi
        printf 'a download failed, trying again: %s\n' "$lost"
        sleep $((attempt * 10))
    done
    printf 'FAILED\n'
    if [ -z "$lost" ]; then
        tail -n 40 "$log" >&2
    fi
    printf 'titan-loop: error: set-up failed at "%s"%s; the whole log is %s\n' \
        "$what" "${lost:+: downloads failed three times, at last with \"$lost\"}" "$log" >&2
    exit 1
}

python_is_recent() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    local name
    for name in python3 python3.14 python3.13 python3.12 python3.11 python; do
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

requirements() { # requirements GROUP: a dependency group, one a line; pip 25.1 could read it itself
    "$VENV/bin/python" -c '
import sys, tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"][sys.argv[1]], sep="\n")' "$1"
}

# One version of each package is left for pip to choose: where it had the choice, it tried seventeen
# releases of boto3 in turn.
pip_install() { # pip_install ARGUMENTS...: wheels alone, in the versions of tools/constraints
    "$VENV/bin/python" - "$(usable_torch "$VENV/bin/python")" >"$VENV/constraints.txt" <<'PYTHON' || return
import re
import sys
from importlib.metadata import distributions
from pathlib import Path

file = Path("tools/constraints/py{}{}.txt".format(*sys.version_info))
pins = dict(pin.split("==") for pin in file.read_text().split()) if file.exists() else {}
found = {re.sub(r"[-_.]+", "-", str(each.metadata["Name"])).lower(): each for each in distributions()}
for name, each in found.items():
    if not Path(str(each.locate_file(""))).is_relative_to(sys.prefix):
        pins.pop(name, None)  # a container image's own: kept if pyproject.toml allows it
torch = sys.argv[1]
if torch:
    pins["torch"] = torch
if "triton" in found or not torch:
    pins.pop("triton", None)  # builds of torch for GPUs bring their own
print(*(f"{name}=={version}" for name, version in pins.items()), sep="\n")
PYTHON
    "$VENV/bin/python" -m pip install --only-binary=:all: --progress-bar off \
        -c "$VENV/constraints.txt" "$@"
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

install_torch() {
    if [[ $(nvidia-smi -L 2>/dev/null) == *GPU* ]]; then
        pip_install "$(grep -o '"torch>=[^"]*"' pyproject.toml | tr -d '"')"
    elif [ -n "${TITAN_LOOP_TORCH_INDEX:-}" ]; then
        # Its dependencies come with the package, from pip's own index.
        pip_install --no-deps --index-url "$TITAN_LOOP_TORCH_INDEX" "$CPU_TORCH"
    else
        pip_install "$CPU_TORCH"
    fi
}

install_tests() {
    local -a dev no_deps
    mapfile -t dev < <(requirements dev)
    mapfile -t no_deps < <(requirements no-deps)
    pip_install "${dev[@]}" && pip_install --no-deps "${no_deps[@]}"
}

wanted_stamp() {
    echo "$PWD $(cat pyproject.toml tools/constraints/*.txt | cksum)"
}

is_stamped() { # is_stamped FILE
    [ -f "$1" ] && [ "$(cat "$1")" = "$(wanted_stamp)" ]
}

set_up() {
    local stamp="$VENV/titan-loop-stamp" python
    if is_stamped "$stamp"; then
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
    # Older ones install no project that has only a pyproject.toml; Python 3.11 brings 22.3.
    if ! "$VENV/bin/python" -c '
import sys, pip
sys.exit(tuple(map(int, pip.__version__.split(".")[:2])) < (21, 3))'; then
        setup_stage "pip" pip_install "pip>=21.3"
    fi
    if ! usable_torch "$VENV/bin/python" >/dev/null; then
        setup_stage "torch" install_torch
    fi
    setup_stage "titan_loop and dependencies" pip_install -e .
    wanted_stamp >"$stamp"
}

set_up_tests() { # the packages of tests and checks, into the same environment
    unset PYTHONDONTWRITEBYTECODE # or every process of a session compiles every test file again
    local stamp="$VENV/titan-loop-tests-stamp"
    if ! is_stamped "$stamp"; then
        setup_stage "packages of tests and checks" install_tests
        wanted_stamp >"$stamp"
    fi
}

set_up
case $VENV in /*) ;; *) VENV=$PWD/$VENV ;; esac
