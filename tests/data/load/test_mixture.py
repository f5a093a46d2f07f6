from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_loop.data.load.mixture import (
    PERIOD_WINDOWS,
    CappedMixture,
    MixtureEntry,
    MixtureOrder,
    parse_mixture,
    weight_shares,
)
from titan_loop.errors import UserError


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any))
def test_every_prefix_is_within_the_stated_bound(shares):
    order = MixtureOrder(shares)
    windows = 2 * order.period + 3
    source, _ = order.locate(np.arange(windows))
    bound = 1 - Fraction(1, 2 * len(shares) - 2) if len(shares) > 1 else Fraction(0)
    served = [0] * len(shares)
    for step, index in enumerate(source.tolist(), start=1):
        served[index] += 1
        for count, share in zip(served, shares, strict=True):
            assert abs(count - Fraction(step * share, order.period)) <= bound


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "dataloader.mixture is empty"),
        (["a=x"], "'a=x' is not PATH=WEIGHT"),
        (["a=-1"], "'a=-1' is not PATH=WEIGHT"),
        (["=1"], "'=1' is not PATH=WEIGHT"),
        (["a=1", "./b/../a/=2"], "./b/../a/ is listed twice"),
        (["a=0", "b=0"], "all weights are 0"),
        (["a=1e308", "b=1e308"], "the weights' sum overflows: give smaller weights"),
        (["a=1:max_epochs=0"], "max_epochs=0 must be at least 1"),
        (["a=1:max_epochs=two"], "max_epochs=two must be at least 1"),
        (["a=1:pakced"], r"'a=1:pakced' is not PATH=WEIGHT\[:packed\]"),
        (["s3://bucket/a=1"], "dataloader.mixture: s3://bucket/a is in an object store"),
    ],
)
def test_mistakes_name_field_and_value(entries, message):
    with pytest.raises(UserError, match=message):
        parse_mixture(entries)


def test_a_weight_that_would_never_be_read_is_refused():
    counts = [f"{name}={tokens}" for name, tokens in zip("abc", (10**7, 90, 2), strict=True)]
    with pytest.raises(UserError, match=r"2 of 3 sources .* first is b=90: raise .* to 1000\.01,"):
        weight_shares(parse_mixture(counts))


def test_options_of_an_entry():
    assert parse_mixture(["a=b:c=0.5:packed:max_epochs=4", "d:max_epochs=1", "e:packed=2"]) == (
        MixtureEntry(path="a=b:c", weight=0.5, packed=True, max_epochs=4),
        MixtureEntry(path="d", weight=1, max_epochs=1),
        MixtureEntry(path="e:packed", weight=2),
    )


capped = st.lists(
    st.tuples(st.integers(0, 20), st.one_of(st.none(), st.integers(0, 40))), min_size=1, max_size=5
).filter(lambda sources: any(share for share, _ in sources))


@given(capped, st.sampled_from(["stop", "renormalise"]), st.integers(0, 10))
def test_a_capped_mixture_equals_a_window_by_window_reference(sources, when_exhausted, first):
    """Weights in force are those of the sources below their caps, from the piece's start on."""
    mixture = [MixtureEntry(path=str(i), weight=share) for i, (share, _) in enumerate(sources)]
    caps = [cap for _, cap in sources]
    before = [min(i, cap or 0) for i, cap in enumerate(caps)]
    order = CappedMixture(mixture, caps, when_exhausted, first_window=first, first_counts=before)
    windows = first + 150 if order.end is None else min(order.end, first + 150)
    located = zip(*(part.tolist() for part in order.locate(np.arange(first, windows))), strict=True)
    counts, start, in_stretch = list(before), first, [0] * len(sources)
    starts = [stretch.first_window for stretch in order.stretches]
    for window, (source, counter) in enumerate(located, start=first):
        if window in starts:
            start, in_stretch = window, [0] * len(sources)
            left = [
                when_exhausted == "stop" or cap is None or count < cap
                for count, cap in zip(counts, caps, strict=True)
            ]
            shares = [share * keep for (share, _), keep in zip(sources, left, strict=True)]
        assert counter == counts[source]
        counts[source] += 1
        in_stretch[source] += 1
        cap = caps[source]
        assert cap is None or counts[source] <= cap
        active = sum(map(bool, shares))
        bound = 1 - Fraction(1, 2 * active - 2) if active > 1 else Fraction(0)
        rounding = Fraction(window + 1 - start, PERIOD_WINDOWS)  # of weights to 1/10,000
        for count, share in zip(in_stretch, shares, strict=True):
            wanted = Fraction((window + 1 - start) * share, sum(shares))
            assert abs(count - wanted) <= bound + rounding
        assert order.counts(window + 1).tolist() == counts


@given(capped, st.sampled_from(["stop", "renormalise"]))
def test_a_capped_mixture_ends_where_the_next_window_would_exceed_a_cap(sources, when_exhausted):
    mixture = [MixtureEntry(path=str(i), weight=share) for i, (share, _) in enumerate(sources)]
    caps = [cap for _, cap in sources]
    order = CappedMixture(mixture, caps, when_exhausted)
    weighted = [cap for share, cap in sources if share]
    endless = None in weighted and (when_exhausted == "renormalise" or set(weighted) == {None})
    assert (order.end is None) == endless
    if order.end is None:
        return
    counts = order.counts(order.end).tolist()
    if when_exhausted == "renormalise":
        assert counts == [cap if share else 0 for share, cap in sources]
    else:
        uncapped = CappedMixture(mixture, [None] * len(mixture))
        ((source,), (counter,)) = uncapped.locate(np.asarray([order.end]))
        assert counts == uncapped.counts(order.end).tolist()
        assert counter == caps[source]
    assert len(order.stretches) <= len(mixture)
