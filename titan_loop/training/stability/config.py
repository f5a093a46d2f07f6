"""The options of a run's stability, `--stability.…`, and their refusals."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from titan_loop.bounds import FINITE, Hint
from titan_loop.checkpoint.manager import LoopCheckpointManager
from titan_loop.errors import Refusal


@dataclass(kw_only=True, slots=True)
class StabilityConfig:
    """Spikes and rewinds; see `titan_loop/training/stability/README.md`."""

    skip_spikes: bool = False
    """Skip the update of a step whose loss or gradient norm is not finite or far above recent ones,
    and rewind to a checkpoint if too many are skipped. max_skipped_steps then has no effect."""

    window: Annotated[int, Ge(4)] = 64
    """Steps in the rolling median; judging starts once this many steps were accepted."""

    threshold: Annotated[float, Ge(1), FINITE, Hint("8 is usual")] = 8.0
    """Robust standard deviations above the median at which loss or log gradient norm is a spike."""

    skips: Annotated[int, Ge(1)] = 3
    """Spikes within `window` steps after which the run rewinds to a checkpoint from before them and
    jumps over their data."""

    rewinds: Annotated[int, Ge(0)] = 2
    """Most rewinds of a run; where it would need one more, it ends with exit code 4."""

    def refusals(
        self, *, checkpoint: LoopCheckpointManager.Config, best_interval: int | None = None
    ) -> Iterator[Refusal]:
        """Refuse settings under which a run could not rewind.

        A new best may be saved every `best_interval` steps, beside checkpoints at an interval.
        """
        if not self.skip_spikes:
            return
        if self.skips > self.window:
            problem = f"do not fit into stability.window={self.window}"
            yield Refusal.of("stability.skips", self.skips, problem)
        saves = checkpoint.enable and not checkpoint.load_only
        interval, kept = checkpoint.interval, checkpoint.keep_latest_k
        saved = sorted({interval, best_interval or interval})
        saved = [each for each in saved if each == saved[0] or each % saved[0]]
        needed = 1 + sum(math.ceil((self.window - 1) / each) for each in saved)
        # Judging starts after a window, so a step kept for ever within it is before every spike.
        forever = checkpoint.keep_every and math.lcm(checkpoint.keep_every, interval)
        apart = f"{' or '.join(map(str, saved))} steps apart"
        apart += " (with best=True)" if best_interval else ""
        if self.rewinds and not saves:
            problem = "needs checkpoints to go back to, and none are saved"
            fix = "set checkpoint.enable=True (and load_only=False), or stability.rewinds=0"
            yield Refusal.of("stability.rewinds", self.rewinds, problem, fix)
        elif self.rewinds and 0 < kept < needed and not 0 < forever <= self.window:
            problem = f"of checkpoints {apart} may leave none from before the first of the "
            problem += f"spikes within stability.window={self.window}"
            fix = f"keep at least {needed}, or all (0)"
            yield Refusal.of("checkpoint.keep_latest_k", kept, problem, fix)
