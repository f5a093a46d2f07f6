#!/usr/bin/env bash
# From nothing to a trained LoopLM and its plots, on a fresh machine with only Python 3.11 or later.
#
#   bash tools/quickstart.sh          about 8 minutes on two cores after set-up
#   bash tools/quickstart.sh --short  the same pipeline on less data, to see that it works
#
# Stages that are complete are skipped and an interrupted training continues; to start over, remove
# the folders printed at the end.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

VOCABULARY=1024
name=quickstart
code_mb=12 prose_mb=8 math_mb=6
train_flags=()
eval_windows=64
case "${1:-}" in
"") ;;
--short)
    name=quickstart-short
    code_mb=2 prose_mb=1.5 math_mb=1
    train_flags=(--total-tokens 80000 --held-out.interval 0 --dump-folder "runs/$name"
        --dataloader.mixture "corpora/$name/code=0.4,corpora/$name/prose=0.4,corpora/$name/math=0.2")
    eval_windows=8
    ;;
*)
    echo "titan-loop: error: unknown flag $1 for quickstart.sh; known: --short" >&2
    exit 2
    ;;
esac
corpus=corpora/$name
run=runs/$name

stage() {
    printf '\n== %s\n' "$*"
}
titan_loop() {
    "$VENV/bin/titan-loop" "$@"
}

SECONDS=0
stage "1/5 corpus: code, prose and mathematics from this Python installation"
if [ ! -f "$corpus/text/card.json" ]; then
    titan_loop data local-python "$corpus/text" \
        --code-megabytes $code_mb --prose-megabytes $prose_mb --math-megabytes $math_mb
fi

stage "2/5 tokenizer ($VOCABULARY tokens) and token shards"
if [ ! -f "$corpus/tokenizer.json" ]; then
    titan_loop data train-tokenizer "$corpus"/text/{code,prose,math}/train.jsonl \
        --vocab-size $VOCABULARY --output "$corpus/tokenizer.json"
fi
for domain in code prose math; do
    if [ ! -f "$corpus/$domain/source.json" ]; then
        titan_loop data tokenize "$corpus/text/$domain" --output "$corpus/$domain" \
            --tokenizer "$corpus/tokenizer.json" --licence "see $corpus/text/card.json"
    fi
done

stage "3/5 training, four recurrent steps"
titan_loop train quickstart "${train_flags[@]}"

stage "4/5 held-out bits per byte after 1 to 6 recurrent steps, 95 % intervals"
titan_loop eval "$run" --windows $eval_windows

stage "5/5 plots"
titan_loop plot "$run"

printf '\nquick start: %d s. Data: %s, run: %s\n' $SECONDS "$corpus" "$run"
