# Sourced after setup.sh: llama.cpp from a wheel, in the environment $ENGINES beside the main one.
install_alone() { # install_alone GROUP FOLDER: pyproject's group, and nothing of the main environment
    local -a group
    mapfile -t group < <(requirements "$1")
    rm -rf "$2"
    "$VENV/bin/python" -m venv "$2"
    "$2/bin/python" -m pip install --only-binary=:all: --progress-bar off "${group[@]}"
}

engine_environment() { # engine_environment GROUP: its folder is $VENV/GROUP
    local folder=$VENV/$1 wanted
    wanted="$(requirements "$1") $("$VENV/bin/python" -V)"
    if [ ! -f "$folder/stamp" ] || [ "$(cat "$folder/stamp")" != "$wanted" ]; then
        setup_stage "environment $1" install_alone "$1" "$folder"
        echo "$wanted" >"$folder/stamp"
    fi
}

ENGINES=$VENV/engines
engine_environment engines
