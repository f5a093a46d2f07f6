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
    """Skip the update of a step whose loss or gradient norm is not finite or far above recent ones,
    and rewind to a checkpoint if too many are skipped. max_skipped_steps then has no effect."""

    window: int = 64
    """Steps in the rolling median; judging starts once this many steps were accepted."""

    threshold: float = 8.0
    """Robust standard deviations above the median at which loss or log gradient norm is a spike."""

    skips: int = 3
    """Spikes within `window` steps after which the run rewinds to a checkpoint from before them and
    jumps over their data."""

    rewinds: int = 2
    """Most rewinds of a run; where it would need one more, it ends with exit code 4."""

    norms_interval: int = 0
    """Steps between two measurements of state, gradient and update norms, by layer and recurrent
    step, for norms.jsonl and the report; 0 measures none. Needs memory for one more copy of a
    rank's weights."""

    straggler: float = 0.0
    """Name a rank in the log and in `titan-loop status` if its matrix products, or its waits for
    data, take at least this many times the ranks' median, such as 1.5; 0 gathers no times. Measured
    on logging steps."""

    heartbeat_seconds: float = 0.0
    """Seconds between two writes of each rank's RUN/heartbeats/rank-N.json, from which the
    watchdog and `titan-loop status` name silent ranks, such as 30; 0 writes none."""

    @property
    def most_jumped_steps(self) -> int:
        """Most training steps whose data rewinds can jump over."""
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
        """Refuse values out of range."""
        least, factor = "must be at least", self.straggler
        beats = 0 <= self.heartbeat_seconds < math.inf
        yield from Refusal.unless(
            "stability",
            self,
            ("threshold", 1 <= self.threshold < math.inf, f"{least} 1; 8 is usual"),
            ("window", self.window >= 4, f"{least} 4"),
            ("skips", self.skips >= 1, f"{least} 1"),
            ("rewinds", self.rewinds >= 0, f"{least} 0"),
            ("skips", self.skips <= self.window, f"do not fit into stability.window={self.window}"),
            ("straggler", not factor or 1 < factor < math.inf, "must be above 1, or 0 for none"),
            ("heartbeat_seconds", beats, "must be 0 (none) or more; 30 is usual"),
            ("norms_interval", self.norms_interval >= 0, "is negative; 0 measures nothing"),
        )

    def setting_refusals(self, *, checkpoint: LoopCheckpointManager.Config) -> Iterator[Refusal]:
        """Refuse checkpoint settings under which a run could not rewind."""
        if not self.skip_spikes:
            return
        saves = checkpoint.enable and not checkpoint.load_only
        interval, kept = checkpoint.interval, checkpoint.keep_latest_k
        needed = 1 + math.ceil((self.window - 1) / interval)
        if self.rewinds and not saves:
            problem = "needs checkpoints to go back to, and none are saved"
            fix = "set checkpoint.enable=True (and load_only=False), or stability.rewinds=0"
            yield Refusal.of("stability.rewinds", self.rewinds, problem, fix)
        elif self.rewinds and 0 < kept < needed and not checkpoint.keep_every:
            problem = f"of checkpoints {interval} steps apart may leave none from before the first "
            problem += f"of the spikes within stability.window={self.window}"
            fix = f"keep at least {needed}, or all (0)"
            yield Refusal.of("checkpoint.keep_latest_k", kept, problem, fix)
