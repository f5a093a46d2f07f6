#!/usr/bin/env bash
# From nothing to a trained LoopLM and its plots, on a fresh machine with only Python 3.11 or later.
#
#   bash tools/quickstart.sh            everything; minutes, not hours, on two cores
#   bash tools/quickstart.sh --short    the same pipeline on less data, to see that it works
#   bash tools/quickstart.sh --verbose  with the whole log of the training
#
# It fails if this installation has less than 20 MB of text, or if the model does not need at least
# 30 % fewer bits per byte than a unigram model and 5 % fewer than a bigram model (the short form asks
# for neither).
# Stages that are complete are skipped and an interrupted training continues; to start over, remove
# the folders printed at the end.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source tools/corpus.sh

corpus=$FULL_CORPUS run=runs/quickstart
text_flags=()
train_flags=()
arithmetic_flags=()
eval_windows=64
eval_flags=(--beats-unigram 0.3 --beats-bigram 0.05)
verbose=""
for flag in "$@"; do
    case $flag in
    --short)
        corpus=$SHORT_CORPUS run=runs/quickstart-short
        text_flags=("${SHORT_TEXT[@]}")
        train_flags=(--total-tokens 80000 --held-out.interval 0
            --dataloader.mixture "$corpus/code=0.4,$corpus/prose=0.4,$corpus/math=0.2")
        arithmetic_flags=(--total-tokens 50000)
        eval_windows=8
        eval_flags=() # it has hardly trained
        ;;
    --verbose) verbose=yes ;;
    *)
        echo "titan-loop: error: unknown flag $flag for quickstart.sh; known: --short, --verbose" >&2
        exit 2
        ;;
    esac
done
unlooped=$run-without-loops arithmetic=$run-arithmetic

brief() { # brief: a log of training without its notices, and with a step for each 5 % of them
    local line due=0
    if [ -n "$verbose" ]; then
        cat
        return
    fi
    trap '' INT # Ctrl-C reaches the training too, which still has to say that it saves
    while IFS= read -r line; do
        if [[ $line =~ ^\[titan\].*\ -\ INFO\ -\ (.*) ]]; then
            line=${BASH_REMATCH[1]}
            if [[ $line =~ ^step\ +[0-9]+/[0-9]+\ +([0-9]+)% ]]; then
                [ "${BASH_REMATCH[1]}" -ge $due ] || continue
                due=$((BASH_REMATCH[1] + 5))
            elif [[ $line != "Trained to the end"* ]]; then
                continue
            fi
        fi
        printf '%s\n' "$line" # a warning or an error, too
    done
}

beside() { # beside RECIPE FLAG...: the second core's next training
    "$VENV/bin/titan-loop" train "$@" &
    wait $!
}

SECONDS=0
stage "1/6 corpus of code, prose and mathematics from this Python installation, tokenizer, token shards"
titan_loop data demo "$corpus" "${text_flags[@]}"

stage "2/6 training, on a core each"
cat <<PLAN
  first core   a layer on text, applied four times                                  log: $run/log.txt
  second core  the same layer on the same text without loops, then a layer on
               arithmetic, applied four times, and once at the same cost      log: $run-second-core.log
Next: bits per byte of unseen text, plots, text that both write, and who is right in arithmetic.
Below, of the first: loss in nats per token, tokens a second, and the time that is left.
PLAN
mkdir -p runs
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
{
    export OMP_NUM_THREADS=1
    trap 'kill $(jobs -p) 2>/dev/null; exit 1' TERM
    beside quickstart "${train_flags[@]}" --recurrence.steps 1 --held-out.depths 1 \
        --dump-folder "$unlooped"
    for arm in looped not_looped; do
        beside quickstart_arithmetic --stage $arm "${arithmetic_flags[@]}" --dump-folder "$arithmetic"
    done
} >"$run-second-core.log" 2>&1 &
second_core=$!
OMP_NUM_THREADS=1 titan_loop train quickstart "${train_flags[@]}" --dump-folder "$run" 2>&1 | brief
echo "The first core is done; the second may take a little longer."
wait $second_core || {
    tail -n 20 "$run-second-core.log" >&2
    exit 1
}

stage "3/6 held-out bits per byte after 1 to 6 recurrent steps, 95 % intervals"
# One table for both: the row of the model without loops stands above the n-gram models.
titan_loop eval "$unlooped" --windows $eval_windows --depths 1 >"$unlooped/bits_per_byte.txt" &
beaten=0
titan_loop eval "$run" --windows $eval_windows "${eval_flags[@]}" >"$run/bits_per_byte.txt" || beaten=$?
wait $!
without=$(sed -n 's/^R = 1 (trained)/without loops  /p' "$unlooped/bits_per_byte.txt")
sed "/^unigram/i $without" "$run/bits_per_byte.txt"
[ $beaten = 0 ] || exit $beaten

stage "4/6 plots: the loss, and the table above"
titan_loop plot "$run" "$unlooped"

stage "5/6 text that both go on to write, drawn at temperature 0.8"
write() { # write RUN
    titan_loop generate "$1" --temperature 0.8 --seed 1 --max-new-tokens 64 \
        --prompt 'def' --prompt 'The function' --prompt 'x =' 2>/dev/null |
        tr -d '\000-\010\013-\037' | expand -t 4 | fold -s -w 72
}
write "$unlooped" >"$unlooped/completions.txt" &
write "$run" >"$run/completions.txt"
wait $!
printf '%-76s%s\n' "without loops" "applied four times"
pr -m -t -w 150 "$unlooped/completions.txt" "$run/completions.txt"

stage "6/6 arithmetic: the same layer and the same compute, applied once and four times"
"$VENV/bin/python" -m tools.demo.questions "$arithmetic/looped" "$arithmetic/not_looped"
[ ${#arithmetic_flags[@]} = 0 ] || echo "The short form has hardly trained them: both guess."

printf '\nquick start: %d s. Data: %s, runs: %s, %s, %s\n' $SECONDS \
    "$corpus" "$run" "$unlooped" "$arithmetic"
printf 'Next, a page on which it writes: %s/bin/pip install -e ".[serve]" && %s/bin/titan-loop serve %s\n' \
    "$VENV" "$VENV" "$run"
