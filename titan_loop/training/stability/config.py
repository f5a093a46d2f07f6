"""The options of a run's stability, `--stability.…`, and their refusals."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from titan_loop.checkpoint.manager import LoopCheckpointManager
from titan_loop.errors import Refusal


@dataclass(kw_only=True, slots=True)
class StabilityConfig:
    """Spikes, norms, stragglers and heartbeats; see `titan_loop/training/stability/README.md`."""

    skip_spikes: bool = False
    """Leave out the update of a step whose loss or gradient norm is far above those of recent steps
    (or not finite), and go back to a checkpoint where that does not help. max_skipped_steps then
    has no effect."""

    window: int = 64
    """Steps in the rolling median; a step is judged once so many were accepted."""

    threshold: float = 8.0
    """Standard deviations above the median, both robust, at which loss or log gradient norm is a
    spike."""

    skips: int = 3
    """Spikes within `window` steps after which the run goes back to the last good checkpoint and
    jumps over their windows."""

    rewinds: int = 2
    """How often a run goes back at most; then it ends with exit code 4."""

    norms_interval: int = 0
    """Steps between two measurements of state, gradient and update norms, of every layer in every
    recurrent step, for norms.jsonl and the report; 0 measures none. Takes memory for one more copy
    of a rank's weights."""

    straggler: float = 0.0
    """How many times as long as the others' a rank's products or waits for data take for it to be
    named in the log and in `titan-loop status`, such as 1.5; 0 gathers no times. Times are taken on
    logging steps."""

    heartbeat_seconds: float = 0.0
    """Seconds between two writings of every rank's RUN/heartbeats/rank-N.json, from which the
    watchdog and `titan-loop status` name silent ranks, such as 30; 0 writes none."""

    @property
    def most_jumped_steps(self) -> int:
        """Training steps whose windows may be jumped over."""
        return self.skips * self.rewinds if self.skip_spikes else 0

    def unused(self) -> str:
        """Return the first field that was set and needs `skip_spikes`; empty if there is none."""
        if self.skip_spikes:
            return ""
        usual = StabilityConfig()
        names = ("window", "threshold", "skips", "rewinds")
        changed = (name for name in names if getattr(self, name) != getattr(usual, name))
        return next((f"stability.{name}={getattr(self, name)}" for name in changed), "")

    def refusals(self) -> Iterator[Refusal]:
        """Yield values out of range."""
        if not 1 <= self.threshold < math.inf:
            yield self._refusal("threshold", "must be at least 1", "8 is usual")
        for name, least in (("window", 4), ("skips", 1), ("rewinds", 0)):
            if getattr(self, name) < least:
                yield self._refusal(name, f"must be at least {least}", "")
        if self.skips > self.window:
            yield self._refusal(
                "skips", f"do not fit into stability.window={self.window}", "use fewer"
            )
        if self.straggler and not 1 < self.straggler < math.inf:
            yield self._refusal("straggler", "must be above 1, or 0 for none", "1.5 is usual")
        if not 0 <= self.heartbeat_seconds < math.inf:
            yield self._refusal("heartbeat_seconds", "must be 0 (none) or more", "30 is usual")
        if self.norms_interval < 0:
            yield self._refusal("norms_interval", "is negative", "0 measures nothing")

    def setting_refusals(self, *, checkpoint: LoopCheckpointManager.Config) -> Iterator[Refusal]:
        """Yield reasons why a run cannot rewind."""
        if not self.skip_spikes:
            return
        saves = checkpoint.enable and not checkpoint.load_only
        interval, kept = checkpoint.interval, checkpoint.keep_latest_k
        needed = 1 + math.ceil((self.window - 1) / interval)
        if self.rewinds and not saves:
            yield self._refusal(
                "rewinds",
                "needs checkpoints to go back to, and none are saved",
                "set checkpoint.enable=True (and load_only=False), or stability.rewinds=0",
            )
        elif self.rewinds and 0 < kept < needed and not checkpoint.keep_every:
            yield Refusal.of(
                "checkpoint.keep_latest_k",
                kept,
                f"of checkpoints {interval} steps apart may leave none from before the first of "
                f"the spikes within stability.window={self.window}",
                f"keep at least {needed}, or all (0)",
            )

    def _refusal(self, name: str, problem: str, fix: str) -> Refusal:
        return Refusal.of(f"stability.{name}", getattr(self, name), problem, fix)
