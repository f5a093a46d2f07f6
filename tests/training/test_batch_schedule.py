"""The global batch: whole multiples of windows, even splits, and planning by jumps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_loop.training.batch_schedule import (
    BatchConfig,
    batch_sizes,
    global_batch_windows,
    planned,
)
from titan_loop.training.schedule import Interpolation, Knot, Schedule


def test_batch_grows_in_multiples():
    config = BatchConfig(
        global_batch_tokens=Schedule.parse("0:1024 linear 100K:4096"), multiple_of_windows=8
    )
    windows = [global_batch_windows(config, t, seq_len=32) for t in (0, 50_000, 99_000, 100_000)]
    assert windows == [32, 80, 120, 128]


KNOTS = st.lists(
    st.tuples(
        st.integers(0, 4000), st.integers(1, 9), st.sampled_from(["constant", "linear", "cosine"])
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda knot: knot[0],
)


@given(KNOTS, st.integers(1, 5), st.booleans(), st.integers(1, 5000), st.integers(0, 20))
def test_a_plan_and_its_sizes_equal_a_walk(
    knots: list[tuple[int, int, Interpolation]],
    multiple: int,
    is_given: bool,
    total: int,
    done: int,
):
    knots.sort()
    if not is_given:  # then the smallest value has to be the common multiple
        knots[-1] = (knots[-1][0], 1, knots[-1][2])
    schedule = Schedule(tuple(Knot(t, 16.0 * multiple * k, how) for t, k, how in knots))
    config = BatchConfig(
        global_batch_tokens=schedule, multiple_of_windows=multiple if is_given else None
    )
    walk = [0]
    sizes = set()
    while walk[-1] < total:
        sizes.add(global_batch_windows(config, walk[-1], seq_len=16))
        walk.append(walk[-1] + global_batch_windows(config, walk[-1], seq_len=16) * 16)
    steps = len(walk) - 1
    assert planned(config, total, seq_len=16)[1] == steps
    done = min(done, steps)
    assert planned(config, total, seq_len=16, tokens=walk[done], steps=done)[1] == steps
    possible = batch_sizes(config, 16, total)
    assert sizes <= possible
    assert possible <= set(range(multiple, 9 * multiple + 1, config.multiple(16)))


@pytest.mark.parametrize(
    ("text", "multiple", "fix"),
    [
        ("32", None, None),
        ("31", None, "use at least 32 tokens"),
        ("100", 2, "a multiple of 2 windows of training.seq_len=32; use 64 or 128"),
        ("40", 2, "use 64"),
        ("0:64 linear 9:96", None, "use 64 or 128, or set batch.multiple_of_windows"),
    ],
)
def test_a_batch_that_is_no_whole_number_of_windows(
    text: str, multiple: int | None, fix: str | None
):
    config = BatchConfig(global_batch_tokens=Schedule.parse(text), multiple_of_windows=multiple)
    found = [str(refusal) for refusal in config.refusals(32)]
    assert [line for line in found if fix is None or fix not in line] == []
    assert len(found) == (fix is not None)
