"""The global batch against global tokens, in whole windows and independent of the world size.

    global_batch_tokens(tokens) ─► global_batch_windows ─► accumulation_steps on this many ranks

The batch decides the optimisation, so it is a function of the schedule alone; ranks only decide in
how many micro-batches it is computed. A world that cannot split the batch evenly is refused, and so
is a value that is not a whole number of windows: a batch is rounded only where it moves.
"""

import math
from dataclasses import dataclass, field

from titan_loop.errors import UserError
from titan_loop.training.schedule import Schedule


@dataclass(kw_only=True, slots=True)
class BatchConfig:
    """The size of the global batch."""

    global_batch_tokens: Schedule = field(default_factory=lambda: Schedule.constant(2**19))
    """Tokens in one global batch, against global tokens."""

    multiple_of_windows: int | None = None
    """Every batch is a multiple of this many windows, rounded down where the schedule moves,
    so that it divides by ranks × local batch; None: the smallest batch if it moves, else 1."""

    def __post_init__(self) -> None:
        self._check_multiple()

    def multiple(self, seq_len: int) -> int:
        """Return the number of windows, at least 1, that every batch is a multiple of.

        Args:
            seq_len: Trained tokens per window.
        """
        if self.multiple_of_windows is not None:
            return self.multiple_of_windows
        if _is_staircase(self.global_batch_tokens):
            return 1
        return max(int(self.global_batch_tokens.smallest) // seq_len, 1)

    def check(self, seq_len: int) -> None:
        """Refuse a schedule whose values could only be used after rounding.

        Args:
            seq_len: Trained tokens per window.

        Raises:
            UserError: If `multiple_of_windows` is below 1, the schedule ever holds less than one
                window, or a knot's value is not a whole number of windows or of their multiple.
        """
        self._check_multiple()
        schedule = self.global_batch_tokens
        if schedule.smallest < seq_len:
            raise UserError(
                f"batch.global_batch_tokens={str(schedule)!r} holds less than one window of "
                f"seq_len={seq_len}; use at least {seq_len} tokens"
            )
        values = sorted({knot.value for knot in schedule.knots})
        given = self.multiple_of_windows
        unit = (given or 1) * seq_len
        for value in values:
            if value % unit:
                what = f"training.seq_len={seq_len}"
                if given is not None:
                    what = f"batch.multiple_of_windows={given} × {what}"
                raise UserError(
                    f"batch.global_batch_tokens={str(schedule)!r} has the value {value:.15g}, "
                    f"not a multiple of {what}; use {_nearest_multiples(value, unit)}"
                )
        multiple = self.multiple(seq_len)
        if any(value % (multiple * seq_len) for value in values):
            windows = [int(value) // seq_len for value in values]
            raise UserError(
                f"batch.global_batch_tokens={str(schedule)!r} moves in multiples of its smallest "
                f"value, {multiple} windows, which do not reach all of its values, {windows} "
                f"windows; set batch.multiple_of_windows to {math.gcd(*windows)} or a divisor of it"
            )

    def _check_multiple(self) -> None:
        if self.multiple_of_windows is not None and self.multiple_of_windows < 1:
            raise UserError(
                f"batch.multiple_of_windows={self.multiple_of_windows} is below 1; use ranks × "
                "local batch size"
            )


def global_batch_windows(config: BatchConfig, tokens: int, seq_len: int) -> int:
    """Return the windows in the global batch that starts after `tokens` global tokens.

    Args:
        config: The batch schedule.
        tokens: Global tokens consumed before the step.
        seq_len: Trained tokens per window.

    Returns:
        A positive multiple of `config.multiple(seq_len)`; exactly the schedule's value wherever
        that does not move.

    Raises:
        UserError: As `BatchConfig.check`.
    """
    config.check(seq_len)
    return _round_down(config.global_batch_tokens(tokens), seq_len, config.multiple(seq_len))


def batch_sizes(config: BatchConfig, seq_len: int, total_tokens: int) -> set[int]:
    """Return the windows of every global batch that may occur before `total_tokens`.

    Between two ends of a stretch that moves these are all multiples, although a steep one may jump
    over some: which ones are met depends on where the steps fall.

    Args:
        config: The batch schedule.
        seq_len: Trained tokens per window.
        total_tokens: Global tokens of the run, ≥ 1.

    Raises:
        UserError: As `BatchConfig.check`.
    """
    config.check(seq_len)
    schedule, multiple = config.global_batch_tokens, config.multiple(seq_len)
    starts = [0, *(knot.tokens for knot in schedule.knots if 0 < knot.tokens < total_tokens)]
    sizes: set[int] = set()
    for start, end in zip(starts, [*starts[1:], total_tokens], strict=True):
        # Every interpolation is monotone, and no step starts at the end itself.
        first, last = (_round_down(schedule(t), seq_len, multiple) for t in (start, end - 1))
        sizes.update(range(min(first, last), max(first, last) + 1, multiple))
    return sizes


def accumulation_steps(windows: int, local_batch: int, dp: int) -> int:
    """Return the micro-batches each rank computes for one global batch.

    Args:
        windows: Windows in the global batch.
        local_batch: Windows in one micro-batch of one rank.
        dp: Data-parallel ranks.

    Raises:
        UserError: If the ranks cannot share the batch evenly.
    """
    per_pass = local_batch * dp
    if windows % per_pass:
        below, above = windows // per_pass * per_pass, -(-windows // per_pass) * per_pass
        fix = f"{below} or {above}" if below else f"{above}"
        raise UserError(
            f"a global batch of {windows} windows does not divide by local_batch_size="
            f"{local_batch} × {dp} data-parallel ranks; use {fix} windows, or another local batch"
        )
    return windows // per_pass


def plan_steps(
    config: BatchConfig, total_tokens: int, seq_len: int, *, tokens: int = 0, steps: int = 0
) -> int:
    """Return the training step at which `total_tokens` global tokens are consumed or passed.

    Constant stretches are jumped over, so that trillions of tokens take microseconds; ramps are
    walked step by step.

    Args:
        config: The batch schedule.
        total_tokens: Global tokens of the run.
        seq_len: Trained tokens per window.
        tokens: Global tokens consumed already.
        steps: Training steps done already; they are part of the result.

    Raises:
        UserError: As `BatchConfig.check`.
    """
    return _walk(config, total_tokens, seq_len, tokens, steps)[1]


def planned_tokens(config: BatchConfig, total_tokens: int, seq_len: int) -> int:
    """Return the global tokens of all steps until `total_tokens` are consumed or passed.

    Raises:
        UserError: As `BatchConfig.check`.
    """
    return _walk(config, total_tokens, seq_len, 0, 0)[0]


def _walk(
    config: BatchConfig, total_tokens: int, seq_len: int, tokens: int, steps: int
) -> tuple[int, int]:
    """Return tokens and steps at the end."""
    config.check(seq_len)
    schedule, multiple = config.global_batch_tokens, config.multiple(seq_len)
    while tokens < total_tokens:
        batch_tokens = _round_down(schedule(tokens), seq_len, multiple) * seq_len
        stretch_end = schedule.constant_until(tokens)
        if stretch_end is None or stretch_end > total_tokens:
            stretch_end = total_tokens
        count = -(-(stretch_end - tokens) // batch_tokens)
        tokens += count * batch_tokens
        steps += count
    return tokens, steps


def _is_staircase(schedule: Schedule) -> bool:
    """Return whether the value only ever jumps."""
    # The last knot's interpolation is "constant": nothing follows it.
    return all(knot.interpolation == "constant" for knot in schedule.knots)


def _round_down(batch_tokens: float, seq_len: int, multiple: int) -> int:
    """Return the windows in `batch_tokens`, rounded down to a multiple."""
    return int(batch_tokens) // (seq_len * multiple) * multiple


def _nearest_multiples(value: float, unit: int) -> str:
    """Return the positive multiples of `unit` around `value`, as text."""
    below = int(value) // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"
