# Sourced after setup.sh: transformers of a major version, in an environment beside the main one.
#
# It sees the main environment behind its own packages: torch is there already, and only packages
# that this transformers needs in other versions are installed on top (datatrove then finds an older
# huggingface_hub than it asks for). Kept until pyproject changes. Releases are pinned there, as a
# minor version of transformers 5 renames arguments.

# What pip finds in the main environment it cannot replace: that lies outside of the environment it
# installs into. The constraint keeps it from laying another torch on top.
install_transformers() { # install_transformers MARKER FOLDER: pyproject's group of that name
    local -a group
    mapfile -t group < <(requirements "$1")
    layered_environment "$2"
    echo "torch==$(usable_torch "$VENV/bin/python")" >"$2/constraints.txt"
    "$2/bin/python" -m pip install --only-binary=:all: --progress-bar off --no-compile --upgrade \
        -c "$2/constraints.txt" "${group[@]}"
}

transformers_environment() { # transformers_environment MARKER: its folder is $VENV/MARKER
    local folder=$VENV/$1 wanted
    wanted="$(cat "$VENV/titan-loop-stamp") $(cksum <tools/transformers.sh)"
    if [ ! -f "$folder/stamp" ] || [ "$(cat "$folder/stamp")" != "$wanted" ]; then
        setup_stage "environment $1" install_transformers "$1" "$folder"
        echo "$wanted" >"$folder/stamp"
    fi
}
