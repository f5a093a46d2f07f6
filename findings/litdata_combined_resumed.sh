#!/usr/bin/env bash
# litdata 0.2.76: a `StreamingDataLoader` of a `CombinedStreamingDataset` with two workers resumes at wrong places of the
# mixed datasets: an epoch that is stopped and resumed repeats some samples and never has others, without a warning. The
# loader saves how many samples of each dataset all workers have yielded together. On resuming, that
# number is dealt out to the workers as if each had taken whole batches of that one dataset in turn, while a
# batch mixes the datasets; only the random choice between the datasets is set back for each worker by its own count.
# With one worker, or with one dataset, the resumed epoch is the same as one without a stop.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install torch==2.13.0
"${pip[@]}" install numpy==2.4.6 litdata==0.2.76
cat >"$folder/try.py" <<'PYTHON'
import itertools
import os
from collections import Counter
from importlib.metadata import version

from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset
from litdata.streaming.writer import BinaryWriter


def write(name, numbers):
    os.makedirs(name)
    writer = BinaryWriter(name, chunk_size=16)
    for index, number in enumerate(numbers):
        writer[index] = number
    writer.done()
    writer.merge()


def loader(names, workers):
    datasets = [StreamingDataset(name, shuffle=True, seed=3) for name in names]
    if len(datasets) > 1:
        datasets = [CombinedStreamingDataset(datasets, seed=1, iterate_over_all=True)]
    return StreamingDataLoader(datasets[0], batch_size=4, num_workers=workers)


def resumed(names, workers, before):
    """Return whether a resumed epoch equals one without a stop, and the samples that it has twice and never."""
    whole = [batch.tolist() for batch in loader(names, workers)]
    first = loader(names, workers)
    seen = [batch.tolist() for batch in itertools.islice(first, before)]
    second = loader(names, workers)
    second.load_state_dict(first.state_dict())
    seen += [batch.tolist() for batch in second]
    wanted, found = (Counter(itertools.chain(*batches)) for batches in (whole, seen))
    assert max(wanted.values()) == 1
    return whole == seen, sorted(found - wanted), sorted(wanted - found)


if __name__ == "__main__":
    print("litdata", version("litdata"))
    write("a", range(60))
    write("b", range(100, 140))
    for names, workers in ((["a"], 2), (["a", "b"], 1), (["a", "b"], 2)):
        wrong = False
        for before in (5, 8, 9):
            same, twice, never = resumed(names, workers, before)
            print(f"{names}, {workers} workers, stop after {before} batches: same {same}, twice {twice}, never {never}")
            wrong |= bool(twice and never)
            assert same or workers == len(names) == 2, "it has changed"
        assert wrong == (workers == len(names) == 2), "it has changed"
PYTHON
cd "$folder"
HOME="$folder" TMPDIR="$folder" "$folder/venv/bin/python" try.py 2>log || { tail -n 20 log; exit 1; }
# Output on 2026-12-01:
# litdata 0.2.76
# ['a'], 2 workers, stop after 5 batches: same True, twice [], never []
# ['a'], 2 workers, stop after 8 batches: same True, twice [], never []
# ['a'], 2 workers, stop after 9 batches: same True, twice [], never []
# ['a', 'b'], 1 workers, stop after 5 batches: same True, twice [], never []
# ['a', 'b'], 1 workers, stop after 8 batches: same True, twice [], never []
# ['a', 'b'], 1 workers, stop after 9 batches: same True, twice [], never []
# ['a', 'b'], 2 workers, stop after 5 batches: same False, twice [], never []
# ['a', 'b'], 2 workers, stop after 8 batches: same False, twice [8, 129], never [50, 135]
# ['a', 'b'], 2 workers, stop after 9 batches: same False, twice [8, 106], never [52, 126]
