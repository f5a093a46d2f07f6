# Sourced by quickstart.sh and miniature.sh after setup.sh: text from this Python installation, made
# into what a mixture reads. What is complete is skipped.

VOCABULARY=1024
# Both scripts' short forms read one corpus: the second one finds it made.
SHORT_CORPUS=corpora/short
SHORT_TEXT=(--code-megabytes 0.6 --prose-megabytes 0.6 --math-megabytes 0.4 --held-out-fraction 0.1)

stage() {
    printf '\n== %s\n' "$*"
}
titan_loop() {
    "$VENV/bin/titan-loop" "$@"
}

local_text() { # local_text CORPUS FLAGS...: code, prose and mathematics
    if [ ! -f "$1/text/card.json" ]; then
        titan_loop data local-python "$1/text" "${@:2}"
    fi
}
local_tokenizer() { # local_tokenizer CORPUS
    if [ ! -f "$1/tokenizer.json" ]; then
        titan_loop data train-tokenizer "$1"/text/{code,prose,math}/train.jsonl \
            --vocab-size $VOCABULARY --output "$1/tokenizer.json"
    fi
}
local_source() { # local_source CORPUS NAME FLAGS...: the token shards of one domain
    if [ ! -f "$1/$2/source.json" ]; then
        titan_loop data tokenize "$1/text/$2"/train.jsonl \
            --held-out-inputs "$1/text/$2"/held_out.jsonl --output "$1/$2" \
            --tokenizer "$1/tokenizer.json" --licence "see $1/text" "${@:3}"
    fi
}
