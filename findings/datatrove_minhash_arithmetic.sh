#!/usr/bin/env bash
# datatrove 0.10.1: near-duplicate removal by MinHash, with its defaults, takes every number for 0 and
# drops operators and punctuation before it compares. 200 sheets of sums that share no sum are one
# document to it: 199 are removed. The switch is MinhashConfig.norm_config, and the removal says nothing.
# Seen: 1 of 200 sheets is kept; with norm_numbers and remove_punctuation off, 200.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    'datatrove==0.10.1' 'spacy==3.8.18' 'xxhash==3.6.0' 'orjson>=3.10,<4' 'tokenizers==0.23.3' regex
cat >"$folder/try.py" <<'PYTHON'
import random
import sys

from datatrove.data import Document
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.utils.text import TextNormConfig

random.seed(0)
sums = random.sample([(a, b) for a in range(100, 400) for b in range(100, 400)], 200 * 40)
sheets = [
    "\n".join(f"{a} {random.choice('+-*/')} {b} = {a * b}" for a, b in sums[40 * n : 40 * n + 40])
    for n in range(200)
]


def kept(place: str, config: MinhashConfig) -> int:
    def documents():
        return (Document(text=text, id=str(n)) for n, text in enumerate(sheets))

    MinhashDedupSignature(f"{place}/s", config=config, language="eng").run(documents(), 0, 1)
    for bucket in range(config.num_buckets):
        MinhashDedupBuckets(f"{place}/s", f"{place}/b", config=config).run(None, bucket, config.num_buckets)
    MinhashDedupCluster(f"{place}/b", f"{place}/r", config=config).run(None, 0, 1)
    return sum(1 for _ in MinhashDedupFilter(f"{place}/r").run(documents(), 0, 1))


default = kept(f"{sys.argv[1]}/default", MinhashConfig())
exact = TextNormConfig(norm_numbers=False, remove_punctuation=False)
switched = kept(f"{sys.argv[1]}/switched", MinhashConfig(norm_config=exact))
print(f"kept of 200 different sheets: {default}; with numbers and operators: {switched}")
assert default == 1, "the defaults compare numbers now"
assert switched == 200
PYTHON
"$folder/venv/bin/python" "$folder/try.py" "$folder" 2>"$folder/log" || { tail -5 "$folder/log"; exit 1; }
