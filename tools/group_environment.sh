# Sourced after setup.sh: a dependency group of pyproject.toml in an environment beside the main one,
# such as a major version of transformers.
#
# It sees the main environment behind its own packages: torch is there already, and only packages
# that the group needs in other versions are installed on top (datatrove then finds an older
# huggingface_hub than it asks for). Kept until pyproject changes. Releases are pinned there, as a
# minor version of transformers 5 renames arguments. A group GROUP-no-deps is installed after GROUP,
# without dependencies.

# What pip finds in the main environment it cannot replace: that lies outside of the environment it
# installs into. The constraint keeps it from laying another torch on top.
install_group() { # install_group GROUP FOLDER
    local -a group
    mapfile -t group < <(requirements "$1")
    layered_environment "$2"
    echo "torch==$(usable_torch "$VENV/bin/python")" >"$2/constraints.txt"
    "$2/bin/python" -m pip install --only-binary=:all: --progress-bar off --no-compile --upgrade \
        -c "$2/constraints.txt" "${group[@]}" || return
    if grep -q "^$1-no-deps = " pyproject.toml; then
        mapfile -t group < <(requirements "$1-no-deps")
        "$2/bin/python" -m pip install --only-binary=:all: --progress-bar off --no-compile \
            --no-deps "${group[@]}"
    fi
}

group_environment() { # group_environment GROUP: its folder is $VENV/GROUP
    local folder=$VENV/$1 wanted
    wanted="$(cat "$VENV/titan-loop-stamp") $(cksum <tools/group_environment.sh)"
    if [ ! -f "$folder/stamp" ] || [ "$(cat "$folder/stamp")" != "$wanted" ]; then
        setup_stage "environment $1" install_group "$1" "$folder"
        echo "$wanted" >"$folder/stamp"
    fi
}
