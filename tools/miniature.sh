#!/usr/bin/env bash
# Ouro's whole recipe in miniature: data, all stages and the fork, plots, depths, exit policies and a
# report. On a fresh machine with only Python 3.11 or later.
#
#   bash tools/miniature.sh             24 minutes on two cores, see train_configs/miniature/README.md
#   bash tools/miniature.sh --short     1/32 of the tokens, to see that all of it works
#   bash tools/miniature.sh --readable  without the fork, with an objective that reads every step
#
# What is complete is skipped and an interrupted stage continues; to start over, remove the folders
# printed at the end.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source tools/corpus.sh

name=miniature
corpus=corpora/miniature
text_flags=(--code-megabytes 3 --prose-megabytes 3 --math-megabytes 2 --held-out-fraction 0.1)
chat_mb=0.8
windows=16
case "${1:-}" in
"") ;;
--readable) name=miniature_readable ;;
--short)
    name=miniature_short
    corpus=$SHORT_CORPUS
    text_flags=("${SHORT_TEXT[@]}")
    chat_mb=$SHORT_CHAT_MEGABYTES
    windows=4
    ;;
*)
    echo "titan-loop: error: unknown flag $1 for miniature.sh; known: --short, --readable" >&2
    exit 2
    ;;
esac
run=runs/$name

SECONDS=0
stage "1/5 corpus: code, prose, mathematics and chats; tokenizer, token shards, packed windows"
miniature_corpus "$corpus" $chat_mb "${text_flags[@]}"

stage "2/5 training: 1a, then the stages of each branch"
titan_loop train $name

stage "3/5 what duplicating the layers alone does to the loss"
rm -rf "$run-upcycled"
titan_loop upcycle "$run/1a" --output "$run-upcycled" --layers 8

stage "4/5 stages"
titan_loop status "$run"

stage "5/5 plots; depths, exit policies and the report of the gate stage"
titan_loop plot "$run"
titan_loop eval "$run/gate" --frontier --windows $windows
titan_loop report "$run/gate"

printf '\nminiature: %d s. Data: %s, runs: %s\n' $SECONDS "$corpus" "$run"
