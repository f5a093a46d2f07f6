#!/usr/bin/env bash
# Whether this checkout trains bit for bit as another revision does: what a refactor has to show.
#
#   bash tools/same_run.sh [--steps N] REVISION RECIPE[:STAGE]...
#   bash tools/same_run.sh HEAD~1 quickstart depth_demo miniature_short:1a miniature_short:gate
#
# Each RECIPE is trained for N steps (default 30), first in a worktree of REVISION, then here; every
# step's loss, data_hash and ce/step_r must be equal. A stage that has a parent starts in both from
# the checkpoint that REVISION's run of the stage named before it left. Both read the corpus of the
# scripts' short forms, prepared by REVISION's code: older code may not read what newer code writes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source tools/corpus.sh

usage() {
    echo "titan-loop: error: $1; usage: tools/same_run.sh [--steps N] REVISION RECIPE[:STAGE]..." >&2
    exit 2
}
steps=30
if [ "${1:-}" = --steps ]; then
    [[ "${2:-}" =~ ^[1-9][0-9]*$ ]] || usage "--steps ${2:-} is not a number of steps"
    steps=$2
    shift 2
fi
[ $# -ge 2 ] || usage "a revision and at least one recipe are needed"
revision=$1
shift
git rev-parse --quiet --verify "$revision^{commit}" >/dev/null || usage "no revision $revision"

export OMP_NUM_THREADS=1 # with several, MKL picks their number by the load, and sums in another order
here=$PWD
folder=$(mktemp -d "${TMPDIR:-/tmp}/titan-loop-same-run.XXXXXX")
trap 'git worktree remove --force "$folder/checkout" 2>/dev/null; rm -rf "$folder"' EXIT
git worktree add --quiet --detach "$folder/checkout" "$revision"

of() { # of CHECKOUT VERB...: titan-loop with the code of that checkout, beside the corpus
    (cd "$folder" && PYTHONPATH="$1" "$VENV/bin/python" -m titan_loop "${@:2}")
}
logged() { # logged LOG COMMAND...: its output only if it fails
    if ! "${@:2}" >"$1" 2>&1; then
        tail -n 30 "$1" >&2
        echo "titan-loop: error: tools/same_run.sh: failed: ${*:2}" >&2
        exit 1
    fi
}
train() { # train CHECKOUT RUN RECIPE FLAGS...
    logged "$2.log" of "$1" train "${@:3}" --dump-folder "$2" --training.steps "$steps" \
        --metrics.log-freq 1
}
titan_loop() { # what prepares the corpus
    of "$folder/checkout" "$@"
}
corpus() {
    cd "$folder" && miniature_corpus "$SHORT_CORPUS" $SHORT_CHAT_MEGABYTES "${SHORT_TEXT[@]}"
}
echo "== the corpus, prepared by $revision"
(export PYTHONPATH=$here && logged "$folder/corpus.log" corpus) # its text is made by tools of this checkout

different=0
parent=""
for name in "$@"; do
    recipe=${name%%:*} stage=""
    [ "$recipe" = "$name" ] || stage=${name#*:}
    flags=()
    case $recipe in
    quickstart) flags+=(--dataloader.mixture "$SHORT_CORPUS/code=0.4,$SHORT_CORPUS/prose=0.4,$SHORT_CORPUS/math=0.2") ;;
    miniature_short) flags+=(--total-tokens 60000) ;; # its own stages have fewer than 30 steps
    esac
    if [ -n "$stage" ]; then
        flags+=(--stage "$stage")
        [ -z "$parent" ] || flags+=(--checkpoint.carry.parent "$parent")
    fi
    echo "== $name: $steps steps in $revision and here"
    train "$folder/checkout" "$folder/before-$name" "$recipe" "${flags[@]}"
    train "$here" "$folder/after-$name" "$recipe" "${flags[@]}"
    if [ -n "$stage" ]; then
        parent=$(find "$folder/before-$name" -path '*checkpoints/step-*' -prune | sort -V | tail -n 1)
        # A revision before tensors.json; it does not mind the file.
        [ -f "$parent/tensors.json" ] || logged "$folder/convert.log" of "$here" checkpoint convert "$parent"
    else
        parent=""
    fi
    "$VENV/bin/python" - "$folder/before-$name" "$folder/after-$name" <<'PYTHON' || different=1
import json
import sys
from pathlib import Path

before, after = map(Path, sys.argv[1:])


def records(folder: Path) -> dict[str, dict[int, dict[str, object]]]:
    """Return every run's steps, and of a step what has to be equal."""
    return {
        str(file.parent.relative_to(folder)): {
            record["step"]: {
                key: value
                for key, value in record.items()
                if key in ("loss", "data_hash") or key.startswith("ce/step_")
            }
            for record in map(json.loads, file.read_text().splitlines())
        }
        for file in sorted(folder.rglob("metrics.jsonl"))
    }


old, new = records(before), records(after)
if not old or old.keys() != new.keys():
    sys.exit(f"different runs: {sorted(old)} and {sorted(new)}")
for run in old:
    if not old[run] or old[run].keys() != new[run].keys():
        sys.exit(f"{run}: different steps: {len(old[run])} and {len(new[run])}")
    for step, values in old[run].items():
        if values != new[run][step] or len(values) < 3:
            sys.exit(f"{run}: step {step} differs:\n  before {values}\n  after  {new[run][step]}")
    print(f"{run}: {len(old[run])} steps, {len(values)} values each, equal")
PYTHON
done
[ $different = 0 ] || {
    echo "tools/same_run.sh: not the same" >&2
    exit 1
}
echo "tools/same_run.sh: the same"
