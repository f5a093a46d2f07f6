#!/usr/bin/env bash
# Ten minutes on two nodes: does a chain of jobs survive here what a cluster does to it?
#
#   bash tools/acceptance.sh --gpus-per-node 8 [FLAGS OF slurm submit…]
#   bash tools/acceptance.sh --gpus-per-node 0 --ranks-per-node 2
#
# Trains a tiny model: the node check's collectives on both nodes, a save, a killed rank, a requeue, a
# cancellation that saves, and the end on one node, without the first one. Expect
#
#   1/5 collectives on 2 nodes: right, and the run trains
#   2/5 saved: step 40
#   3/5 a rank was killed: requeued, goes on from step 40
#   4/5 cancelled: saved step 97
#   5/5 one node, without n1: from step 97 to the end, step 200
#   accepted: the data's hash at step 200 is that of an uninterrupted run
#
# with other numbers of steps. The folder is runs/acceptance (ACCEPTANCE_FOLDER names another); all
# nodes must see it. What fails ends the script with the job's log.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

folder=${ACCEPTANCE_FOLDER:-runs/acceptance}
run=$folder/looped
titan_loop=$VENV/bin/titan-loop
patience=600
train=(--batch.global-batch-tokens 8192 --training.local-batch-size 8 --suite.interval 0
    --checkpoint.interval 20 --metrics.log-freq 20)

fail() {
    echo "tools/acceptance.sh: $1" >&2
    tail -n 60 "$folder"/slurm/looped.log >&2 || true
    "$titan_loop" slurm cancel "$folder" >&2 || true
    exit 1
}
submit() { # submit NODES TOKENS FLAGS…: sets job
    "$titan_loop" slurm submit depth_demo --stage looped --nodes "$1" --time 0:20:00 --save-seconds 60 \
        --dump-folder "$folder" --total-tokens "$2" "${train[@]}" "${@:3}" >/dev/null
    job=$("$titan_loop" slurm status "$folder" | awk '$1 == "looped" && $2 ~ /^[0-9]+$/ { print $2; exit }')
}
wait_until() { # wait_until WHAT COMMAND…: for ten minutes; a requeued job is not left waiting
    local what=$1 began=$SECONDS begin
    shift
    until "$@"; do
        [ $((SECONDS - began)) -lt $patience ] || fail "waited $patience s: $what"
        # SLURM lets a requeued job wait two minutes; its nodes need a moment.
        begin=$(squeue -h -j "$job" -t PENDING -o '%r %S' 2>/dev/null | sed -n 's/^BeginTime \([0-9]\)/\1/p')
        if [ -n "$begin" ] && [ $(($(date -d "$begin" +%s) - $(date +%s))) -gt 30 ]; then
            scontrol update "JobId=$job" StartTime=now+3 || true
        fi
        sleep 1
    done
}
newest() { # newest: the step of the newest whole checkpoint, 0 without one
    local step
    step=$(ls "$run"/checkpoints/step-*/manifest.json 2>/dev/null | sed 's/.*step-\([0-9]*\).*/\1/' | sort -n | tail -n 1)
    echo "${step:-0}"
}
newer_than() { [ "$(newest)" -gt "$1" ]; }
ended() { [ -z "$(squeue -h -j "$job" -o %T 2>/dev/null)" ]; }
restarted() { [ "$(scontrol show job "$job" | sed -n 's/.*Restarts=\([0-9]*\).*/\1/p')" -gt 0 ]; }

[ ! -e "$folder" ] || { echo "tools/acceptance.sh: $folder is there already; remove it" >&2; exit 2; }
tokens_a_step=8192
submit 2 $((100000 * tokens_a_step)) "$@"
wait_until "no checkpoint of job $job" newer_than 0
echo "1/5 collectives on 2 nodes: right, and the run trains"
saved=$(newest)
echo "2/5 saved: step $saved"

step=$(squeue -h --steps -j "$job" -o %i | grep -E '\.[0-9]+$' | tail -n 1)
scancel --signal=KILL "$step"
wait_until "job $job was not requeued" restarted
saved=$(newest)
wait_until "job $job does not go on" newer_than "$saved"
echo "3/5 a rank was killed: requeued, goes on from step $saved"

first=$(scontrol show hostnames "$(squeue -h -j "$job" -o %N)" | sed -n 1p)
"$titan_loop" slurm cancel "$folder" >/dev/null
wait_until "job $job does not end" ended
saved=$(newest)
echo "4/5 cancelled: saved step $saved"

last=$((saved + 50))
submit 1 $((last * tokens_a_step)) "$@" --sbatch="--exclude=$first"
wait_until "job $job does not end" ended
[ "$(newest)" = $last ] || fail "the run ends at step $(newest), not $last"
echo "5/5 one node, without $first: from step $saved to the end, step $last"

# The order of the data is a function of the seed and the tokens read, whatever happened on the way.
hash_of() { "$VENV/bin/python" -c 'import json, sys
print(json.loads(open(sys.argv[1] + "/metrics.jsonl").readlines()[-1])["data_hash"])' "$1"; }
"$titan_loop" train depth_demo --stage looped --dump-folder "$folder/uninterrupted" \
    --total-tokens $((last * tokens_a_step)) "${train[@]}" >"$folder/uninterrupted.log" 2>&1 ||
    fail "the uninterrupted run failed, see $folder/uninterrupted.log"
[ "$(hash_of "$run")" = "$(hash_of "$folder/uninterrupted/looped")" ] ||
    fail "the run read other data than an uninterrupted one"
echo "accepted: the data's hash at step $last is that of an uninterrupted run"
