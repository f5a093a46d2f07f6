# Sourced after setup.sh: llama.cpp from a wheel, in the environment $ENGINES beside the main one.
install_engines() { # install_engines FOLDER: pyproject's group, and nothing of the main environment
    local -a group
    mapfile -t group < <(requirements engines)
    rm -rf "$1"
    "$VENV/bin/python" -m venv "$1"
    "$1/bin/python" -m pip install --only-binary=:all: --progress-bar off "${group[@]}"
}

ENGINES=$VENV/engines
wanted="$(requirements engines) $("$VENV/bin/python" -V)"
if [ ! -f "$ENGINES/stamp" ] || [ "$(cat "$ENGINES/stamp")" != "$wanted" ]; then
    setup_stage "environment engines" install_engines "$ENGINES"
    echo "$wanted" >"$ENGINES/stamp"
fi
