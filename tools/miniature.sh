#!/usr/bin/env bash
# Ouro's whole recipe in miniature: data, all stages and the fork, plots, depths, exit policies and a
# report. On a fresh machine with only Python 3.11 or later.
#
#   bash tools/miniature.sh          24 minutes on two cores, see train_configs/LOG.md
#   bash tools/miniature.sh --short  1/32 of the tokens, to see that all of it works
#
# What is complete is skipped and an interrupted stage continues; to start over, remove the folders
# printed at the end.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source tools/corpus.sh

LONG_WINDOW=1024 CHAT_WINDOW=512 # of the stages that read packed windows
name=miniature
corpus=corpora/miniature
text_flags=(--code-megabytes 3 --prose-megabytes 3 --math-megabytes 2 --held-out-fraction 0.1)
chat_mb=0.8
windows=16
case "${1:-}" in
"") ;;
--short)
    name=miniature_short
    corpus=$SHORT_CORPUS
    text_flags=("${SHORT_TEXT[@]}")
    chat_mb=0.2
    windows=4
    ;;
*)
    echo "titan-loop: error: unknown flag $1 for miniature.sh; known: --short" >&2
    exit 2
    ;;
esac
run=runs/$name

SECONDS=0
stage "1/6 corpus: code, prose, mathematics and chats from this Python installation"
local_text "$corpus" "${text_flags[@]}"
if [ ! -f "$corpus/text/chat/card.json" ]; then
    titan_loop data local-chats "$corpus/text/chat" --held-out-fraction 0.1 --megabytes $chat_mb
fi

stage "2/6 tokenizer ($VOCABULARY tokens), token shards, packed windows"
local_tokenizer "$corpus"
for domain in code prose math; do
    local_source "$corpus" $domain
done
local_source "$corpus" chat --chat
pack() { # pack NAME WINDOW
    if [ ! -f "$corpus/$1/train/packed_$2.windows" ]; then
        titan_loop data pack "$corpus/$1" --seq-len "$2" --long-documents split
    fi
}
pack code $LONG_WINDOW
pack prose $LONG_WINDOW
pack chat $CHAT_WINDOW

stage "3/6 training: 1a, then five stages of each branch"
titan_loop train $name

stage "4/6 what duplicating the layers alone does to the loss"
rm -rf "$run-upcycled"
titan_loop upcycle "$run/1a" --output "$run-upcycled" --layers 8 --report --windows $windows

stage "5/6 stages"
titan_loop status "$run"

stage "6/6 plots; depths, exit policies and the report of the gate stage"
titan_loop plot "$run"
titan_loop eval "$run/gate" --frontier --windows $windows
titan_loop report "$run/gate"

printf '\nminiature: %d s. Data: %s, runs: %s\n' $SECONDS "$corpus" "$run"
