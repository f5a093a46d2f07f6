"""The source of window k of a job: a pure function of k, weights and repetition caps.

One period of the mixture is laid out when the loader starts. Window k looks up k mod period, so
resuming at window 10**12 replays nothing.
"""

import heapq
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from titan_loop.errors import UserError
from titan_loop.storage.file_names import require_local

PERIOD_WINDOWS = 10_000  # four decimal places of a weight are exact

Exhausted = Literal["stop", "renormalise"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureEntry:
    """One source of a mixture.

    Attributes:
        packed: Whether to read the packed index (whole documents, padded) instead of fixed cuts.
        max_epochs: Number of times it may be read; None leaves that to `dataloader.max_epochs`.
    """

    path: str
    weight: float
    packed: bool = False
    max_epochs: int | None = None


def parse_mixture(entries: Sequence[str]) -> tuple[MixtureEntry, ...]:
    """Read a mixture from `PATH=WEIGHT[:packed][:max_epochs=N]`; a path alone has weight 1."""
    if not entries:
        raise UserError("dataloader.mixture is empty: give at least one source, as PATH=WEIGHT")
    mixture: list[MixtureEntry] = []
    for text in entries:
        entry = _parse_entry(text)
        # Two entries would read the same windows in the same order.
        if os.path.realpath(entry.path) in (os.path.realpath(known.path) for known in mixture):
            raise UserError(
                f"dataloader.mixture: {entry.path} is listed twice: list it once with the combined "
                "weight"
            )
        mixture.append(entry)
    if not any(entry.weight for entry in mixture):
        raise UserError("dataloader.mixture: all weights are 0: give one source a positive weight")
    if math.isinf(sum(entry.weight for entry in mixture)):
        raise UserError("dataloader.mixture: the weights' sum overflows: give smaller weights")
    return tuple(mixture)


def _parse_entry(text: str) -> MixtureEntry:
    rest, packed, max_epochs = text, False, None
    while True:  # options stand at the end; a path may contain their separators
        before, _, option = rest.rpartition(":")
        if before and option == "packed":
            rest, packed = before, True
        elif before and option.startswith("max_epochs="):
            number = option.removeprefix("max_epochs=")
            if not number.isdecimal() or not int(number):
                raise UserError(f"dataloader.mixture: {text!r}: {option} must be at least 1")
            rest, max_epochs = before, int(number)
        else:
            break
    path, _, number = rest.rpartition("=") if "=" in rest else (rest, "", "1")
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not path or not math.isfinite(weight) or weight < 0:
        raise UserError(
            f"dataloader.mixture: {text!r} is not PATH=WEIGHT[:packed][:max_epochs=N] with a "
            "finite weight >= 0"
        )
    require_local(path, "dataloader.mixture:")
    return MixtureEntry(path=path, weight=weight, packed=packed, max_epochs=max_epochs)


def weight_shares(mixture: Sequence[MixtureEntry]) -> list[int]:
    """Round the weights to integer shares of one period (largest remainder) in lowest terms."""
    period = PERIOD_WINDOWS
    total = math.fsum(source.weight for source in mixture)
    exact = [source.weight / total * period for source in mixture]
    if small := [source for source, share in zip(mixture, exact, strict=True) if 0 < share < 1]:
        first = small[0]
        raise UserError(
            f"dataloader.mixture: {len(small)} of {len(mixture)} sources have less than 1/{period} "
            f"of the mixture, the first is {first.path}={first.weight:g}: raise their weights to "
            f"{total / period:g}, leave them out, or prepare small sources together as one"
        )
    # Rounding absorbs the last bits of weight/total, so that 0.3 of 10,000 is 3000 and not 2999.
    shares = [math.floor(round(share, 6)) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: shares[index] - exact[index])
    for index in by_remainder[: period - sum(shares)]:
        shares[index] += 1
    divisor = math.gcd(*shares)
    return [share // divisor for share in shares]


class MixtureOrder:
    """The order of sources: every prefix of it is as close to the weights as any order can be.

    With shares n_i, P = sum n_i and x_i(k) the windows of source i among the first k,

        |x_i(k) - k n_i / P| <= 1 - 1 / (2 S - 2)        for every i and k

    where S >= 2 sources have a positive share; a single one is met exactly. Step k serves, among
    the sources already due (k n_i / P - x_i >= 1 / (2 S - 2)), the one with the earliest deadline.
    All arithmetic is on integers, so ties fall the same way on every machine.

    Source: Tijdeman 1980, "The chairman assignment problem", theorem 1 (the bound is tight).
    """

    def __init__(self, shares: Sequence[int]) -> None:
        self.shares = np.asarray(shares, dtype=np.int64)
        self.period = int(self.shares.sum())
        assert self.period > 0, shares
        assert (self.shares >= 0).all(), shares
        self._source = _lay_out(self.shares, self.period)
        self._count_before = np.empty(self.period, dtype=np.int64)
        for index, share in enumerate(self.shares):
            self._count_before[self._source == index] = np.arange(share)

    def locate(self, window: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return each window's source index and its number among that source's windows (int64)."""
        periods, phase = np.divmod(np.asarray(window, dtype=np.int64), self.period)
        source = self._source[phase]
        return source, periods * self.shares[source] + self._count_before[phase]

    def counts(self, windows: int) -> np.ndarray:
        """Return the number of each source among the first `windows` windows (int64)."""
        periods, phase = divmod(windows, self.period)
        return periods * self.shares + np.bincount(self._source[:phase], minlength=len(self.shares))

    def window_of(self, source: int, counter: int) -> int:
        """Return the window at which `source`, whose share is positive, has its `counter`-th."""
        periods, rest = divmod(counter, int(self.shares[source]))
        return periods * self.period + int(np.flatnonzero(self._source == source)[rest])


def _lay_out(shares: np.ndarray, period: int) -> np.ndarray:
    active = np.flatnonzero(shares)
    slack = max(1, 2 * len(active) - 2)
    source = np.repeat(active, shares[active])
    number = np.concatenate([np.arange(count) for count in shares[active].tolist()])
    share = slack * shares[source]
    # The first step that may serve each window, and the last that does so within the bound.
    release = -(-(period * (slack * number + 1)) // share)
    deadline = -(-(period * (slack * (number + 1) - 1)) // share)
    order = np.argsort(release, kind="stable")
    jobs = np.stack((release, deadline, source), axis=1)[order].tolist()
    result = np.empty(period, dtype=np.int64)
    due: list[tuple[int, int]] = []
    arrived = 0
    for step in range(1, period + 1):
        while arrived < period and jobs[arrived][0] <= step:
            heapq.heappush(due, (jobs[arrived][1], jobs[arrived][2]))
            arrived += 1
        _, result[step - 1] = heapq.heappop(due)  # never empty: the largest lag is >= 1 / S
    return result


class Stretch(NamedTuple):
    """A part of the mixture with one set of weights; `counts_before` are windows by source."""

    first_window: int
    counts_before: np.ndarray
    order: MixtureOrder


class CappedMixture:
    """The order of sources when some may be read only a limited number of times.

    The first stretch has all weights. It ends before the first window that would exceed its
    source's cap: there the mixture ends ("stop"), or a stretch starts in which the sources still
    below their caps have the weights, renormalised. The bound of `MixtureOrder` holds within every
    stretch, whose starts follow from weights and caps alone.

    Args:
        caps: Windows each source may give; None for no cap.
        first_counts: Windows of each source read before `first_window`; zero by default.
        repeat_after: Number of windows after which the same ones come again; None for never.

    Attributes:
        end: First window after the mixture's last; None if it never ends.
    """

    def __init__(
        self,
        mixture: Sequence[MixtureEntry],
        caps: Sequence[int | None],
        when_exhausted: Exhausted = "stop",
        *,
        first_window: int = 0,
        first_counts: Sequence[int] | None = None,
        repeat_after: int | None = None,
    ) -> None:
        self._first_window = first_window
        self._repeat_after = repeat_after
        self.stretches: list[Stretch] = []
        self.end: int | None = None
        start = first_window
        self._first_counts = counts = np.asarray(first_counts or [0] * len(mixture), dtype=np.int64)
        renormalise = when_exhausted == "renormalise"
        capped = {index: cap for index, cap in enumerate(caps) if cap is not None}
        while True:
            used_up = {i for i, cap in capped.items() if renormalise and counts[i] >= cap}
            rest = [
                replace(entry, weight=0.0) if index in used_up else entry
                for index, entry in enumerate(mixture)
            ]
            if not any(entry.weight for entry in rest):
                self.end = start
                break
            order = MixtureOrder(weight_shares(rest))
            self.stretches.append(Stretch(start, counts, order))
            ends = [
                order.window_of(index, max(0, cap - int(counts[index])))
                for index, cap in capped.items()
                if rest[index].weight
            ]
            if not ends:
                break
            start, counts = start + min(ends), counts + order.counts(min(ends))
            if not renormalise:
                self.end = start
                break
        self._starts = np.array([stretch.first_window for stretch in self.stretches], np.int64)

    def locate(self, window: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `MixtureOrder`; windows lie below `end` and not before the first stretch."""
        window = np.asarray(window, dtype=np.int64)
        if self._repeat_after:
            window = self._first_window + (window - self._first_window) % self._repeat_after
        number = np.searchsorted(self._starts, window, side="right") - 1
        source, counter = np.empty_like(window), np.empty_like(window)
        for index in np.unique(number):
            first, before, order = self.stretches[index]
            chosen = number == index
            source[chosen], within = order.locate(window[chosen] - first)
            counter[chosen] = before[source[chosen]] + within
        return source, counter

    def counts(self, windows: int) -> np.ndarray:
        """Return the number of each source among the first `windows` windows (int64)."""
        if not self.stretches:  # nothing was left to read when it started
            return self._first_counts
        if self._repeat_after and windows - self._first_window > self._repeat_after:
            passes, rest = divmod(windows - self._first_window, self._repeat_after)
            once = self.repeated()
            assert once is not None
            return self.counts(self._first_window + rest) + passes * once
        number = int(np.searchsorted(self._starts, windows, side="right")) - 1
        first, before, order = self.stretches[max(0, number)]
        return before + order.counts(windows - first)

    def repeated(self) -> np.ndarray | None:
        """Return the number of each source's windows that come again; None if none do."""
        if not self._repeat_after:
            return None
        return self.counts(self._first_window + self._repeat_after) - self._first_counts
