"""The size of the global batch, in whole windows, as a function of the global tokens consumed.

    global_batch_tokens(tokens) ─► global_batch_windows ─► micro-batches on this many ranks

The batch size affects the optimisation, so it follows from the schedule alone; the number of ranks
only decides how many micro-batches each rank computes. Preflight refuses a batch that the ranks
cannot split evenly, or a knot that is not whole windows; values between two knots are rounded
down. The functions assume a config that passed `BatchConfig.refusals`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from annotated_types import Ge

from titan_loop.errors import Refusal
from titan_loop.training.schedule import Schedule


@dataclass(kw_only=True, slots=True)
class BatchConfig:
    """The size of the global batch."""

    global_batch_tokens: Schedule = field(default_factory=lambda: Schedule.constant(2**19))
    """Tokens in one global batch, against global tokens."""

    multiple_of_windows: Annotated[int | None, Ge(1)] = None
    """Round every batch down to a multiple of this many windows, such as ranks × local batch size,
    which all ranks can split evenly. None: the smallest batch if the schedule has ramps, else 1."""

    def multiple(self, seq_len: int) -> int:
        """Return the number of windows, at least 1, that every batch is a multiple of."""
        if self.multiple_of_windows is not None:
            return self.multiple_of_windows
        schedule = self.global_batch_tokens
        if all(knot.interpolation == "constant" for knot in schedule.knots):
            return 1
        return max(int(schedule.smallest) // seq_len, 1)

    def refusals(self, seq_len: int) -> Iterator[Refusal]:
        """Refuse schedules with a knot that is not a whole number of `multiple` windows."""
        given, schedule = self.multiple_of_windows, self.global_batch_tokens
        if given is not None and given < 1:
            return  # its bound refuses it
        refuse = partial(Refusal.of, "batch.global_batch_tokens", repr(str(schedule)))
        if schedule.smallest < seq_len:
            problem = f"holds less than one window of seq_len={seq_len}"
            yield refuse(problem, f"use at least {seq_len} tokens")
            return
        multiple = self.multiple(seq_len)
        unit = multiple * seq_len
        uneven = [knot.value for knot in schedule.knots if knot.value % unit]
        if uneven:
            below = int(uneven[0]) // unit * unit
            fix = f"use {below} or {below + unit}" if below else f"use {unit}"
            if given is None and multiple > 1:
                fix += ", or set batch.multiple_of_windows to a divisor of all values"
            windows = f"{multiple} windows" if multiple > 1 else "windows"
            problem = f"has the value {uneven[0]:.15g}, not a multiple of {windows} of "
            yield refuse(f"{problem}training.seq_len={seq_len}", fix)


def global_batch_windows(config: BatchConfig, tokens: int, seq_len: int) -> int:
    """Return the windows in the global batch that is read after `tokens` global tokens."""
    return _round_down(config.global_batch_tokens(tokens), seq_len, config.multiple(seq_len))


def batch_sizes(config: BatchConfig, seq_len: int, total_tokens: int) -> set[int]:
    """Return the sizes, in windows, of all global batches that may occur before `total_tokens`.

    For a ramp these are all multiples between its ends, although a steep ramp may skip some.
    """
    schedule, multiple = config.global_batch_tokens, config.multiple(seq_len)
    starts = [0, *(knot.tokens for knot in schedule.knots if 0 < knot.tokens < total_tokens)]
    sizes: set[int] = set()
    for start, end in zip(starts, [*starts[1:], total_tokens], strict=True):
        # Every interpolation is monotone, and the last step of a stretch starts before its end.
        first, last = (_round_down(schedule(t), seq_len, multiple) for t in (start, end - 1))
        sizes.update(range(min(first, last), max(first, last) + 1, multiple))
    return sizes


def planned(
    config: BatchConfig, total_tokens: int, seq_len: int, *, tokens: int = 0, steps: int = 0
) -> tuple[int, int]:
    """Return the tokens and training steps after the first step that reaches `total_tokens`.

    Counting starts after `steps` training steps, which have consumed `tokens` global tokens.
    """
    schedule, multiple = config.global_batch_tokens, config.multiple(seq_len)
    while tokens < total_tokens:
        batch_tokens = _round_down(schedule(tokens), seq_len, multiple) * seq_len
        # A constant stretch is one jump, so trillions of tokens take microseconds.
        stretch_end = schedule.constant_until(tokens)
        if stretch_end is None or stretch_end > total_tokens:
            stretch_end = total_tokens
        count = -(-(stretch_end - tokens) // batch_tokens)
        tokens += count * batch_tokens
        steps += count
    return tokens, steps


def _round_down(batch_tokens: float, seq_len: int, multiple: int) -> int:
    return int(batch_tokens) // (seq_len * multiple) * multiple
