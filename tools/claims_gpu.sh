#!/usr/bin/env bash
# Trains more seeds of the claims that train_configs/REPRODUCE.md does not decide: many arms side by
# side, the shortest first, each result written as its arm ends. For a GPU, under MPS, or for cores.
#
#   bash tools/claims_gpu.sh [--at-once N] [--list] [--unclean] [--seeds "4 5 6"] [RECIPE:STAGE,STAGE ...]
#
# --at-once: processes at a time; by default 14 on a GPU, otherwise one a core, each with one thread.
# --list: prints the arms and the minutes that earlier seeds took, and trains nothing.
# An arm is trained after the stages that it starts from, in the same process. What is recorded is
# skipped, and what was interrupted goes on, so the command may be given again. Its log is
# runs/claims/RECIPE-STAGE-seedS.log.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source tools/corpus.sh

if [ "${1:-}" = --arm ]; then # --arm RECIPE SEED STAGES UNCLEAN...: what this script starts
    recipe=$2
    read -ra names <<<"${4//,/ }"
    case $recipe in
        physics_exams) exec bash tools/physics.sh --exams "${@:5}" --seeds "$3" "${names[@]}" ;;
        physics_small) exec bash tools/physics.sh "${@:5}" --seeds "$3" "${names[@]}" ;;
        depth_pays_tuned) exec bash tools/depth_pays.sh --tuned "${@:5}" --seeds "$3" "${names[@]}" ;;
    esac
    choose "$recipe" "${@:5}" --seeds "$3" "${names[@]}"
    train_arms "$recipe"
    exit
fi

arms=(
    adaptive_small:plain,loop3,iso_flop,loop3_memory
    latent_small:eased,eased_correction,eased_end_to_end
    three_hop_small:discoloop_gate
    recurrent_depth_small:depth_r8_half_rate
    recurrent_depth_ood:r4
    physics_exams:mano5_1x4_5e-3,mano5_4x1_5e-3,mano_1x4,mano_4x1,hops_r1_25,hops_r4_25,hops_r1_50,hops_r4_50
    physics_small:capo_l1,capo_l4
    depth_pays_tuned:every_step_1e-2,looped_2e-2
)
at_once=$(nproc) seeds="4 5 6" listing=no unclean=()
if [[ $(nvidia-smi -L 2>/dev/null) == *GPU* ]]; then
    at_once=14
fi
while [[ "${1:-}" = --* ]]; do
    case $1 in
        --at-once) at_once=${2:-} ;;&
        --seeds) seeds=${2:-} ;;&
        --at-once | --seeds) [ $# -gt 1 ] && shift ;;
        --list) listing=yes ;;
        --unclean) unclean=(--unclean) ;;
        *) refuse "$1 is unknown; known: --at-once N, --list, --unclean, --seeds \"4 5 6\"" ;;
    esac
    shift
done
[[ "$at_once" =~ ^[1-9][0-9]*$ ]] || refuse "--at-once '$at_once' is no number of processes"
[[ "$seeds" =~ ^[0-9]+(\ [0-9]+)*$ ]] || refuse "--seeds '$seeds' is no list such as \"4 5 6\""
if [ $# -gt 0 ]; then
    arms=("$@")
fi

# Each line: minutes, then RECIPE SEED STAGES. Arms that start from one stage share a process.
queue=$(
    "$VENV/bin/python" - "$seeds" "${arms[@]}" <<'PYTHON'
import json
import sys
from pathlib import Path
from statistics import mean

from titan_loop.errors import UserError
from titan_loop.recipes.registry import load_recipe


def recorded(recipe, stage, seed):
    return [*Path("train_configs").glob(f"*/results/{recipe}/{stage}-seed{seed}.json")]


rows = []
for name, _, chosen in (arm.partition(":") for arm in sys.argv[2:]):
    by_root = {}
    try:
        recipe = load_recipe(name)
        leaves = [recipe.stage(stage) for stage in chosen.split(",")]
    except UserError as error:
        sys.exit(f"titan-loop: error: tools/claims_gpu.sh: {name}:{chosen}: {error}")
    for leaf in leaves:
        line = [leaf.name]
        while parent := recipe.stage(line[0]).parent:
            line.insert(0, parent)
        by_root.setdefault(line[0], []).extend(line)
    for seed in sys.argv[1].split():
        for stages in map(dict.fromkeys, by_root.values()):
            left = [each for each in stages if not recorded(name, each, seed)]
            known = ([json.loads(p.read_text())["seconds"] for p in recorded(name, each, "*")] for each in left)
            if left:
                rows.append((sum(mean(each or [600]) for each in known) / 60, name, seed, ",".join(left)))
for minutes, *arm in sorted(rows):
    print(f"{minutes:.1f}", *arm)
PYTHON
)
if [ $listing = yes ] || [ -z "$queue" ]; then
    printf '%s\n' "${queue:-every result is there}"
    exit
fi
if [[ "${arms[*]}" == *depth_pays* ]]; then
    full_corpus
fi
export OMP_NUM_THREADS=1
# Without its daemon the processes of a GPU take turns; one that runs already is left alone.
if [ "$at_once" -gt 1 ] && command -v nvidia-cuda-mps-control >/dev/null && nvidia-cuda-mps-control -d; then
    trap 'echo quit | nvidia-cuda-mps-control' EXIT
fi
mkdir -p runs/claims
# xargs ends with 123 if an arm failed, after all others.
xargs -P "$at_once" -L 1 bash -c 'log=runs/claims/$3-${5//,/-}-seed$4.log
    if bash "$1" --arm "${@:3:3}" $2 >"$log" 2>&1; then
        echo "$3 $5, seed $4: done"
    else
        echo "$3 $5, seed $4: FAILED, see $log" && exit 1
    fi' _ "${BASH_SOURCE[0]}" "${unclean[*]}" < <(cut -d ' ' -f 2- <<<"$queue")
"$VENV/bin/python" -m tools.reproduce
