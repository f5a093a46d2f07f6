# Sourced by quickstart.sh, miniature.sh and same_run.sh after setup.sh: text from this Python
# installation, made into what a mixture reads. What is complete is skipped.

VOCABULARY=1024
# The short forms of the three scripts read one corpus: whichever runs first makes it.
SHORT_CORPUS=corpora/short
SHORT_TEXT=(--code-megabytes 0.6 --prose-megabytes 0.6 --math-megabytes 0.4 --held-out-fraction 0.1)
SHORT_CHAT_MEGABYTES=0.2
LONG_WINDOW=1024 CHAT_WINDOW=512 # of the miniature's stages that read packed windows

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
packed_source() { # packed_source CORPUS NAME WINDOW
    if [ ! -f "$1/$2/train/packed_$3.windows" ]; then
        titan_loop data pack "$1/$2" --seq-len "$3" --long-documents split
    fi
}
miniature_corpus() { # miniature_corpus CORPUS CHAT_MEGABYTES FLAGS...: all the miniature reads
    local_text "$1" "${@:3}"
    if [ ! -f "$1/text/chat/card.json" ]; then
        titan_loop data local-chats "$1/text/chat" --held-out-fraction 0.1 --megabytes "$2"
    fi
    local_tokenizer "$1"
    local domain
    for domain in code prose math; do
        local_source "$1" $domain
    done
    local_source "$1" chat --chat
    packed_source "$1" code $LONG_WINDOW
    packed_source "$1" prose $LONG_WINDOW
    packed_source "$1" chat $CHAT_WINDOW
}
