#!/usr/bin/env bash
# torchdata 0.11.0, StatefulDataLoader: if an IterableDataset has no state_dict, the loader saves the number of batches
# read and skips that many on resuming. A resumed loader counts the skipped batches twice, so the number it saves next
# is too large: the first resume is right, and each later one silently leaves out as many batches as the run before it
# had skipped. It is the same in the loader's own process and with one or two workers (of two, an odd
# count ends in "the dataset may have changed" instead). A dataset with a state_dict, and a map-style one, are resumed
# rightly however often.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install torch==2.13.0
"${pip[@]}" install torchdata==0.11.0
cat >"$folder/try.py" <<'PYTHON'
from importlib.metadata import version

from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader


def share():
    """Return the numbers that are this worker's of 0, 1, …, 9999."""
    worker = get_worker_info()
    return range(worker.id, 10_000, worker.num_workers) if worker else range(10_000)


class Plain(IterableDataset):
    def __iter__(self):
        yield from share()


class WithState(IterableDataset):
    at = 0

    def __iter__(self):
        for number in share()[self.at :]:
            self.at += 1
            yield number

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def first_of_each_run(dataset, **options):
    """Return the first number that each of five runs of 100 sees, each resumed from the one before."""
    state, seen = None, []
    for _ in range(5):
        loader = StatefulDataLoader(dataset(), batch_size=None, **options)
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)
        seen.append([int(next(batches)) for _ in range(100)][0])
        state = loader.state_dict()
    return seen


print("torchdata", version("torchdata"))
right, doubled = [0, 100, 200, 300, 400], [0, 100, 300, 700, 1500]
for name, dataset, options, wanted in (
    ("IterableDataset", Plain, {}, doubled),
    ("IterableDataset, 1 worker", Plain, {"num_workers": 1}, doubled),
    ("IterableDataset, 2 workers", Plain, {"num_workers": 2}, doubled),
    ("IterableDataset with a state_dict", WithState, {}, right),
    ("map-style", lambda: range(10_000), {}, right),
):
    seen = first_of_each_run(dataset, **options)
    print(f"{name}: five runs of 100 begin at {seen}")
    assert seen == wanted, "it has changed"
PYTHON
"$folder/venv/bin/python" "$folder/try.py" 2>"$folder/log" || { tail -n 20 "$folder/log"; exit 1; }
# Output on 2026-11-30:
# torchdata 0.11.0
# IterableDataset: five runs of 100 begin at [0, 100, 300, 700, 1500]
# IterableDataset, 1 worker: five runs of 100 begin at [0, 100, 300, 700, 1500]
# IterableDataset, 2 workers: five runs of 100 begin at [0, 100, 300, 700, 1500]
# IterableDataset with a state_dict: five runs of 100 begin at [0, 100, 200, 300, 400]
# map-style: five runs of 100 begin at [0, 100, 200, 300, 400]
