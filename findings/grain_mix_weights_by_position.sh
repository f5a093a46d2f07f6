#!/usr/bin/env bash
# grain 0.2.18: `grain.IterDataset.mix` of named datasets gives the weights out by position, not by name, where JAX is not
# installed, as beside PyTorch. Weights whose keys stand in another order than the datasets' are swapped in silence: a
# dataset that should give 70 of 100 samples gives 31. With JAX its tree functions sort the keys of both, so that names
# count; the same code and data then also come in another order than without it, where the datasets' keys are not sorted.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for with in plain jax; do
    python3 -m venv "$folder/$with"
    "$folder/$with/bin/python" -m pip --quiet --disable-pip-version-check install numpy==2.4.6 grain==0.2.18
done
"$folder/jax/bin/python" -m pip --quiet --disable-pip-version-check install numpy==2.4.6 jax==0.10.2
cat >"$folder/try.py" <<'PYTHON'
import sys
from importlib.metadata import version

import grain

STARTS = {"code": 0, "prose": 1000}


def mixed(datasets, weights):
    """Return the first 100 samples of a mixture."""
    parts = {name: grain.MapDataset.range(STARTS[name], STARTS[name] + 500).to_iter_dataset() for name in datasets}
    samples = iter(grain.IterDataset.mix(parts, weights=weights))
    return [next(samples) for _ in range(100)]


with_jax = sys.argv[1] == "jax"
print("grain", version("grain"), *(["jax", version("jax")] if with_jax else ["without jax"]))
counts = []
for datasets in (["code", "prose"], ["prose", "code"]):
    for weights in ({"code": 0.7, "prose": 0.3}, {"prose": 0.3, "code": 0.7}):
        samples = mixed(datasets, weights)
        counts.append(sum(sample < 1000 for sample in samples))
        print(f"{datasets}, {weights}: {counts[-1]} samples of code, first {samples[:4]}")
right = [abs(count - 70) <= 1 for count in counts]
assert right == ([True] * 4 if with_jax else [True, False, False, True]), "it has changed"
PYTHON
cd "$folder"
for with in plain jax; do
    HOME="$folder" "$folder/$with/bin/python" try.py "$with" 2>log || { tail -n 20 log; exit 1; }
done
# Output on 2026-12-01:
# grain 0.2.18 without jax
# ['code', 'prose'], {'code': 0.7, 'prose': 0.3}: 70 samples of code, first [0, 1, 2, 1000]
# ['code', 'prose'], {'prose': 0.3, 'code': 0.7}: 31 samples of code, first [0, 1000, 1001, 1]
# ['prose', 'code'], {'code': 0.7, 'prose': 0.3}: 30 samples of code, first [1000, 1001, 1002, 0]
# ['prose', 'code'], {'prose': 0.3, 'code': 0.7}: 69 samples of code, first [1000, 0, 1, 1001]
# grain 0.2.18 jax 0.10.2
# ['code', 'prose'], {'code': 0.7, 'prose': 0.3}: 70 samples of code, first [0, 1, 2, 1000]
# ['code', 'prose'], {'prose': 0.3, 'code': 0.7}: 70 samples of code, first [0, 1, 2, 1000]
# ['prose', 'code'], {'code': 0.7, 'prose': 0.3}: 70 samples of code, first [0, 1, 2, 1000]
# ['prose', 'code'], {'prose': 0.3, 'code': 0.7}: 70 samples of code, first [0, 1, 2, 1000]
