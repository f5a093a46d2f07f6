"""The trainer's one partner for stability: it holds the parts that a run has switched on.

begin ─► forward, backward under `watch` ─► measured_update: clip, agree, update ─► log
skipped.read, a step later ─► SpikesError: the run starts again from an older checkpoint
"""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_loop.models.decoder import LoopDecoder
from titan_loop.ranks import warn_together
from titan_loop.runs.heartbeats import forget_heartbeats, read_heartbeats, silent_ranks
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.kept_records import append_or_keep
from titan_loop.training.stability.config import StabilityConfig
from titan_loop.training.stability.heartbeat import Pulse
from titan_loop.training.stability.norms import growth_warning, norms_line, norms_record
from titan_loop.training.stability.recovery import Recovery
from titan_loop.training.stability.spikes import SpikeJudge
from titan_loop.training.stability.states import StateNorms
from titan_loop.training.stability.stragglers import StepTimes
from titan_loop.training.stability.verdict import SkippedSteps, StepVerdict, agree_on_step
from titan_loop.training.stability.weights import WeightNorms, measured_update

logger = logging.getLogger(__name__)


class Guard:
    """Measures training steps as `config` says; with everything off it touches nothing.

    Args:
        config: The options.
        model: The architecture.
        recurrent_steps: Largest R of the run.
        device: Where the model computes.
        window_tokens: L, the length of a window.
        run: The run directory.
        writes: Whether this rank writes files and log lines.
        max_skipped_steps: Non-finite steps in a row that end a run which does not skip spikes.

    Attributes:
        skipped: Reads verdicts, and counts skipped steps.
        recovery: The same, where spikes are skipped.
    """

    def __init__(
        self,
        config: StabilityConfig,
        *,
        model: LoopDecoder.Config,
        recurrent_steps: int,
        device: torch.device,
        window_tokens: int,
        run: RunDirectory,
        writes: bool,
        max_skipped_steps: int,
    ) -> None:
        self._config = config
        self._run, self._writes = run, writes
        self.recovery: Recovery | None = None
        self._judge: SpikeJudge | None = None
        if config.skip_spikes:
            self.recovery = Recovery(config, looped=model.looped, run=run, writes=writes)
            self._judge = SpikeJudge(
                window=config.window,
                threshold=config.threshold,
                shape=(recurrent_steps + 1, len(model.layers)),
                device=device,
            )
        self.skipped = self.recovery or SkippedSteps(max_skipped_steps)
        self._times = StepTimes(config.straggler, device) if config.straggler else None
        self._pulse: Pulse | None = None
        if writes:
            forget_heartbeats(run.path)
        if config.heartbeat_seconds:
            rank = dist.get_rank() if dist.is_initialized() else 0
            self._pulse = Pulse(run.path, rank=rank, seconds=config.heartbeat_seconds)
        self._straggler = ""
        self._window_elements = window_tokens * model.dim
        self._states: StateNorms | None = None
        if config.watches_states:
            self._states = StateNorms(
                layers=len(model.layers), recurrent_steps=recurrent_steps, device=device
            )
        self._watching = self._measures = False
        self._sums: Tensor | None = None
        self._weights: WeightNorms | None = None
        self._warning: str | None = None

    def begin(self, step: int, regime: list[Any]) -> None:
        """Get ready for a training step; `regime` is as for `SpikeJudge.begin`."""
        if self._pulse is not None:
            self._pulse.beat(step)
        if self._times is not None:
            self._times.begin()
        interval = self._config.norms_interval
        self._measures = interval > 0 and step % interval == 0
        self._watching = self._measures or self._judge is not None
        if self._judge is not None:
            self._judge.begin(regime)
        if self._states is not None and self._watching:
            self._states.start()

    def enter(self, phase: str) -> None:
        """Say for the heartbeat that a part of the training step begins."""
        if self._pulse is not None:
            self._pulse.enter(phase)

    def watch(self, model: LoopDecoder) -> AbstractContextManager[None]:
        """Return the context of a forward pass."""
        if self._states is None or not self._watching:
            return nullcontext()
        return self._states.watch(model)

    @contextmanager
    def measured_update(self, model: LoopDecoder) -> Iterator[None]:
        """Measure the update inside, from gradients before clipping to new weights, where due."""
        self._weights = self._sums = None
        if self._states is not None and self._watching:
            self._sums = self._states.reduce()
        if not self._measures:
            yield
            return
        with measured_update(model) as self._weights:
            yield

    def agree(self, loss: Tensor, grad_norm: Tensor, *, loss_ranks: int, stop: bool) -> StepVerdict:
        """Return what all ranks do with a step; collective, and no wait for the device.

        Args:
            loss: This rank's share of the loss.
            grad_norm: Gradient norm before clipping.
            loss_ranks: Ranks whose shares add up; the others repeat them.
            stop: Whether this rank was asked to stop.
        """
        if self._judge is None:
            return agree_on_step(loss, grad_norm, stop=stop)
        assert self._sums is not None
        share = loss_ranks / (dist.get_world_size() if dist.is_initialized() else 1)
        return self._judge.agree(loss, grad_norm, self._sums, share=share, stop=stop)

    @property
    def held_back(self) -> bool:
        """Whether the newest step that was read is not to be saved."""
        return self.recovery is not None and self.recovery.held_back

    def read_before_save(self) -> None:
        """Read every verdict, so that the state that is saved knows of all skipped steps."""
        if self.recovery is not None:
            self.recovery.read(newest=True)

    def state_dict(self) -> dict[str, Any]:
        """Return what continues to decide alike, as JSON; empty if nothing is decided."""
        if self.recovery is None or self._judge is None:
            return {}
        history, skipped = self._judge.state_dict(), self.recovery.state_dict()
        return {"stability": {"history": history, "ladder": skipped}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a trainer's state that has such a one, or begin anew."""
        if self.recovery is not None and self._judge is not None and "stability" in state:
            self._judge.load_state_dict(state["stability"]["history"])
            self.recovery.load_state_dict(state["stability"]["ladder"])

    def rank_times(self, data_seconds: Sequence[float]) -> dict[str, Any]:
        """Return what a record says of all ranks' times, and name a straggler; collective.

        Args:
            data_seconds: Waits for data of this rank since the last record.
        """
        if self._times is None:
            return {}
        record = self._times.gather(sum(data_seconds))
        found = record.get("straggler", "")
        if found and found.split(" ")[:2] != self._straggler.split(" ")[:2]:
            warn_together(logger, "straggler: %s", found)
        self._straggler = found
        return record

    def name_silent_ranks(self) -> None:
        """Print on rank 0 which ranks the others wait for; may wait for the disk."""
        if self._pulse is not None and self._writes:
            for line in silent_ranks(read_heartbeats(self._run.path), hung=True):
                print(f"titan-loop: {line}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the heartbeat."""
        if self._pulse is not None:
            self._pulse.end()

    def log(self, *, step: int, tokens: int, recurrent_steps: int, windows: int) -> None:
        """Write what was measured of a step, if it was; waits for the device then.

        Args:
            step: The training step.
            tokens: Global tokens consumed after it.
            recurrent_steps: Its R.
            windows: Windows of its global batch.
        """
        if self._weights is None or self._sums is None:
            return
        record = norms_record(
            step=step,
            tokens=tokens,
            recurrent_steps=recurrent_steps,
            sums=self._sums,
            elements=windows * self._window_elements,
            of=self._weights,
        )
        self._weights = None
        warning = growth_warning(record["state_rms"])
        if self._writes:
            append_or_keep(self._run.norms_jsonl, record)
            logger.info("%s", norms_line(record))
        if warning is not None and self._warning is None:
            warn_together(logger, "step %d: %s", step, warning)
        self._warning = warning
