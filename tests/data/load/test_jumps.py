"""Windows that are jumped over, against a plain list; and a loader that leaves them out."""

from itertools import pairwise

import hypothesis.strategies as st
import torch
from hypothesis import given

from tests.data.load.splits import load
from titan_loop.data.load.jumps import joined, jumped_before, next_windows
from titan_loop.data.load.loader import WindowLoader

SOME = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=5)


@given(SOME, st.integers(0, 70), st.integers(0, 30))
def test_next_windows_equal_a_search_one_by_one(pairs, first, count):
    ranges = joined((start, start + length) for start, length in pairs if length)
    left_out = {w for start, length in pairs for w in range(start, start + length)}
    expected, window = [], first
    while len(expected) < count:
        expected += [window] if window not in left_out else []
        window += 1
    assert next_windows(first, count, ranges).tolist() == expected
    assert jumped_before(first, ranges) == sum(w < first for w in left_out)
    assert all(a[1] < b[0] for a, b in pairwise(ranges))


def read(from_loader: WindowLoader, steps: int, windows: int = 8) -> torch.Tensor:
    rows = [b[0]["input"] for _ in range(steps) for b in from_loader.read_step(windows)]
    return torch.cat(rows)


def test_a_loader_leaves_windows_out_and_a_resumed_one_too(source):
    plain = read(load([str(source)], local_batch=4), 5)
    jumping = load([str(source)], local_batch=4)
    before = read(jumping, 1)
    jumping.jump([(8, 16), (20, 22)])
    whole = torch.cat([before, read(jumping, 2)])
    kept = [w for w in range(34) if not (8 <= w < 16 or 20 <= w < 22)]
    assert torch.equal(whole, plain[kept])
    assert jumping.windows_consumed == 34
    resumed = load([str(source)], 2, local_batch=2)
    halfway = load([str(source)], local_batch=4)
    read(halfway, 1)
    halfway.jump([(8, 16), (20, 22)])
    read(halfway, 1)
    resumed.load_state_dict(halfway.state_dict())
    read(resumed, 1)
    assert resumed.data_hash == jumping.data_hash  # at another split, too
    unjumped = load([str(source)], local_batch=4)
    read(unjumped, 3)
    assert unjumped.data_hash != jumping.data_hash
    assert "jumped" not in unjumped.state_dict()
    for each in (jumping, halfway, resumed, unjumped):
        each.close()
