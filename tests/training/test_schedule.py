"""Schedules: values on and between knots, the text form, and what is refused."""

import json
import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_loop.errors import UserError
from titan_loop.training.schedule import (
    Interpolation,
    Knot,
    Schedule,
)

TEXT = "0:0 linear 2M:0.0003 constant 90M:0.0003 cosine 100M:3e-05"

finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    tokens = draw(st.lists(st.integers(0, 10**15), min_size=1, max_size=6, unique=True))
    kinds = st.sampled_from(get_args(Interpolation))
    return Schedule(tuple(Knot(t, draw(finite), draw(kinds)) for t in sorted(tokens)))


def test_values_on_and_between_knots():
    schedule = Schedule.parse(TEXT)
    assert schedule(0) == 0.0
    assert Schedule.parse("5M:2 linear 6M:3")(0) == 2.0
    assert schedule(1_000_000) == pytest.approx(1.5e-4, rel=1e-12)
    assert schedule(2_000_000) == schedule(50_000_000) == schedule(90_000_000) == 3e-4
    quarter = 3e-5 + (3e-4 - 3e-5) * (1 + math.cos(math.pi / 4)) / 2
    assert schedule(92_500_000) == pytest.approx(quarter, rel=1e-12)
    assert schedule(95_000_000) == pytest.approx((3e-4 + 3e-5) / 2, rel=1e-12)
    assert schedule(100_000_000) == schedule(10**15) == 3e-5


@given(schedules())
def test_text_and_json_round_trip(schedule: Schedule):
    assert Schedule.parse(str(schedule)) == schedule
    record = json.loads(json.dumps(schedule.to_dict()))
    assert tuple(Knot(**knot) for knot in record["knots"]) == schedule.knots
    assert hash(Schedule.parse(str(schedule))) == hash(schedule)


@given(schedules(), st.integers(0, 2 * 10**15))
def test_value_stays_within_the_knots(schedule: Schedule, tokens: int):
    # One rounding of the interpolation, relative to the largest magnitude on either side.
    slack = 1e-12 * max(abs(schedule.smallest), abs(schedule.largest))
    if not math.isfinite(schedule.largest - schedule.smallest):
        return
    assert schedule.smallest - slack <= schedule(tokens) <= schedule.largest + slack


@given(schedules(), st.integers(0, 10**15), st.integers(0, 10**6))
def test_constant_until_promises_a_constant_stretch(schedule: Schedule, tokens: int, ahead: int):
    until = schedule.constant_until(tokens)
    assert until is None or until > tokens
    if until is None or tokens + ahead < until:
        assert schedule(tokens + ahead) == schedule(tokens)


@pytest.mark.parametrize(
    ("knots", "complaint"),
    [
        ([], "schedule has no knots"),
        ([Knot(0, math.inf)], "schedule value=inf at 0 is not finite"),
        ([Knot(0, 1.0, "liner")], "interpolation='liner' is unknown; nearest: linear"),
        ([Knot(5, 1.0), Knot(5, 2.0)], "tokens=5 does not increase .the one before is 5"),
    ],
)
def test_knots_that_make_no_schedule(knots: list[Knot], complaint: str):
    with pytest.raises(UserError, match=complaint):
        Schedule(tuple(knots))


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("3e-4", "0.0003"),
        ("1.5K", "1500"),
        ("0.0005K", "0.5"),
        ("+3", "3"),
        ("0:0 linear 2e6:3e-4 constant 9e7:3e-4 cosine 1e8:3e-5", TEXT),
        ("0:4M constant 1.4T:8M", "0:4M constant 1400B:8M"),
        ("4K", "4K"),
        ("0:8 constant 3B:4", "0:8 constant 3B:4"),
        ("7:1", "7:1"),
    ],
)
def test_canonical_text(text: str, canonical: str):
    assert str(Schedule.parse(text)) == canonical


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "does not end with a knot"),
        ("fast", "'fast' where a number belongs"),
        ("1e999", "'1e999' where a number belongs"),
        ("0:0 lin3ar 2M:1", "nearest: linear"),
        ("0:0 linear", "does not end with a knot"),
        ("0:0 linear 2M", "where TOKENS:VALUE belongs"),
        ("-1:3", "is negative"),
        ("2M:3 linear 2M:4", "does not increase"),
        ("0.5:1", "use a whole number"),
        ("0:nan", "'nan' where a number belongs"),
    ],
)
def test_bad_text_is_one_line(text: str, complaint: str):
    with pytest.raises(UserError, match=complaint) as caught:
        Schedule.parse(text)
    assert "\n" not in str(caught.value)
