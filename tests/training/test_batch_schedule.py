"""The global batch: whole multiples of windows, even splits, and planning by jumps."""

import re

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


def test_a_ramp_moves_in_multiples_of_its_smallest_batch():
    ramp = BatchConfig(global_batch_tokens=Schedule.parse("0:320 linear 100:960"))
    assert [global_batch_windows(ramp, t, seq_len=32) for t in (0, 49, 50, 100)] == [10, 10, 20, 30]


def test_a_staircase_uses_every_value_exactly():
    config = BatchConfig(global_batch_tokens=Schedule.steps([(0, 8 * 32), (1000, 12 * 32)]))
    assert [global_batch_windows(config, t, seq_len=32) for t in (0, 999, 1000)] == [8, 8, 12]


@pytest.mark.parametrize(
    ("text", "multiple", "complaint"),
    [
        ("31", None, "less than one window of seq_len=32"),
        ("1000", None, r"the value 1000, not a multiple of training.seq_len=32; use 992 or 1024$"),
        ("0:64 constant 9:64.5", None, r"the value 64.5, not .* use 64 or 96$"),
        ("0:320 linear 9:1000", None, r"the value 1000, not .* use 992 or 1024$"),
        (
            "0:256 linear 9:384",
            None,
            r"8 windows, .* \[8, 12\] windows; set .* to 4 or a divisor of it$",
        ),
        ("0:256 constant 9:320", 4, r"320, not .*multiple_of_windows=4 × .*; use 256 or 384$"),
        ("64", 4, r"the value 64, not .*; use 128$"),
    ],
)
def test_values_that_would_be_rounded_are_refused(text: str, multiple: int | None, complaint: str):
    config = BatchConfig(global_batch_tokens=Schedule.parse(text), multiple_of_windows=multiple)
    (refusal,) = config.refusals(32)
    assert re.search(complaint, str(refusal))
    assert "\n" not in str(refusal)


def test_a_multiple_below_one_is_refused():
    (refusal,) = BatchConfig(multiple_of_windows=0).refusals(32)
    assert str(refusal).startswith("batch.multiple_of_windows=0 is below 1; ")


def test_the_smallest_batch_is_a_window():
    for config in (
        BatchConfig(global_batch_tokens=Schedule.constant(32)),
        BatchConfig(global_batch_tokens=Schedule.constant(32), multiple_of_windows=1),
        BatchConfig(global_batch_tokens=Schedule.parse("0:64 linear 9:128")),
    ):
        assert not [*config.refusals(32)]
    ramp = Schedule.parse("0:20 linear 9:40")
    assert BatchConfig(global_batch_tokens=ramp).multiple(32) == 1  # refused, but never 0
    assert BatchConfig(global_batch_tokens=ramp, multiple_of_windows=3).multiple(32) == 3


def test_batch_sizes():
    ramp = BatchConfig(
        global_batch_tokens=Schedule.parse("10:64 linear 100:256 constant 200:512"),
        multiple_of_windows=2,
    )
    assert batch_sizes(ramp, 32, 1) == {2}
    assert batch_sizes(ramp, 32, 56) == {2, 4}  # 162 tokens at 55, 5 windows
    assert batch_sizes(ramp, 32, 200) == {2, 4, 6, 8}
    assert batch_sizes(ramp, 32, 201) == {2, 4, 6, 8, 16}
    stairs = BatchConfig(global_batch_tokens=Schedule.steps([(0, 256), (10**12, 384)]))
    assert batch_sizes(stairs, 32, 2 * 10**12) == {8, 12}


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


def test_planning_trillions_of_tokens_jumps():
    config = BatchConfig(global_batch_tokens=Schedule.parse("0:4194304 constant 1T:8388608"))
    steps = planned(config, 3 * 10**12, seq_len=4096)[1]
    first = -(-(10**12) // 4194304)
    assert steps == first + -(-(3 * 10**12 - first * 4194304) // 8388608)
