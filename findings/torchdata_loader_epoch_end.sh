#!/usr/bin/env bash
# torchdata 0.11.0, torchdata.nodes: a `Loader` that is given the state of a finished epoch begins the next one, as its
# `restart_on_stop_iteration` promises; but from then on its `state_dict()` is that old state for ever, in the middle
# of this epoch and after any number of further ones. Whoever resumes from a later checkpoint starts again with the
# second epoch and reads the same data again. States saved in the middle of an epoch work.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install torch==2.13.0
"${pip[@]}" install torchdata==0.11.0
cat >"$folder/try.py" <<'PYTHON'
import json
from importlib.metadata import version
from itertools import islice

from torch.utils.data import DistributedSampler
from torchdata.nodes import Loader, SamplerWrapper

LENGTH = 8


def resumed(state=None):
    """Return a loader of 0, …, 7, shuffled anew in each epoch."""
    sampler = DistributedSampler(range(LENGTH), num_replicas=1, rank=0, shuffle=True)
    loader = Loader(SamplerWrapper(sampler))
    if state is not None:
        loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


def read(loader, count):
    """Return the next numbers, epoch after epoch, and the state behind them."""
    seen = []
    while len(seen) < count:
        seen += islice(loader, count - len(seen))
    return seen, loader.state_dict()


def two_stops(first, second):
    """Stop after `first` numbers and after `second` more; return all numbers seen and both states."""
    before, one = read(resumed(), first)
    between, two = read(resumed(one), second)
    after, _ = read(resumed(two), 4)
    return before + between + after, one, two


print("torchdata", version("torchdata"))
for first, second in ((5, 7), (LENGTH, 4), (LENGTH, 3 * LENGTH + 4)):
    through, _ = read(resumed(), first + second + 4)
    seen, one, two = two_stops(first, second)
    print(f"stopped after {first} and {first + second} numbers, epochs of {LENGTH}:")
    print(f"  last four {seen[-4:]}, without stops {through[-4:]}")
    print(f"  the second state {'is the first one' if one == two else 'differs from the first'}: {two}")
    at_end = first == LENGTH
    assert (one == two) == at_end and (seen == through) == (not at_end), "it has changed"
    assert not at_end or seen[-4:] == read(resumed(), LENGTH + 4)[0][-4:], "it has changed"
PYTHON
"$folder/venv/bin/python" "$folder/try.py" 2>"$folder/log" || { tail -n 20 "$folder/log"; exit 1; }
# Output on 2026-11-30:
# torchdata 0.11.0
# stopped after 5 and 12 numbers, epochs of 8:
#   last four [7, 3, 1, 0], without stops [7, 3, 1, 0]
#   the second state differs from the first: {'root': {'_num_yielded': 4, '_epoch': 1}, 'num_yielded': 4}
# stopped after 8 and 12 numbers, epochs of 8:
#   last four [5, 4, 2, 6], without stops [7, 3, 1, 0]
#   the second state is the first one: {'root': {'_num_yielded': 8, '_epoch': 0}, 'num_yielded': 8}
# stopped after 8 and 36 numbers, epochs of 8:
#   last four [5, 4, 2, 6], without stops [5, 1, 4, 0]
#   the second state is the first one: {'root': {'_num_yielded': 8, '_epoch': 0}, 'num_yielded': 8}
