#!/usr/bin/env bash
# grain 0.2.18: `MapDataset.mix` applies its weights before a filter of the parts, `IterDataset.mix` after it. A part of
# which one record in five passes its filter, mixed half and half, gives a sixth of the samples (200 of 1,200) with the
# first, and half with the second: the places of the records that were dropped stay empty in a `MapDataset`. The filtered
# part also reports its old length, so that nothing shows it before the samples are counted.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check install numpy==2.4.6 grain==0.2.18
cat >"$folder/try.py" <<'PYTHON'
from importlib.metadata import version

from grain import IterDataset, MapDataset

print("grain", version("grain"))
code = MapDataset.range(1000).filter(lambda record: record % 5 == 0)
prose = MapDataset.range(1000, 2000)
print("length that the filtered part reports:", len(code))
first = list(MapDataset.mix([code, prose], weights=[0.5, 0.5]).to_iter_dataset())
second = list(IterDataset.mix([code.to_iter_dataset(), prose.to_iter_dataset()], weights=[0.5, 0.5]))
shares = []
for name, samples in (("MapDataset.mix", first), ("IterDataset.mix", second)):
    passed = sum(sample < 1000 for sample in samples)
    shares.append(passed / len(samples))
    print(f"{name}: {passed} of {len(samples)} samples are of the filtered part")
assert shares[0] < 0.2 and shares[1] == 0.5, "it has changed"
PYTHON
cd "$folder"
HOME="$folder" "$folder/venv/bin/python" try.py 2>log || { tail -n 20 log; exit 1; }
# Output on 2026-12-01:
# grain 0.2.18
# length that the filtered part reports: 1000
# MapDataset.mix: 200 of 1200 samples are of the filtered part
# IterDataset.mix: 200 of 400 samples are of the filtered part
