"""Skipped steps and their consequences: records in `decisions.jsonl`, and rewinds.

README.md has the rules, and the keys of a record. `SpikesError` ends a start that must rewind;
`rewind` records where the next one begins.
"""

import logging
import math
from collections import deque
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_loop.checkpoint.choosing import newest_good
from titan_loop.checkpoint.remote import RemoteCheckpoints
from titan_loop.checkpoint.rewinds import read_rewinds, record_rewind
from titan_loop.data.load.jumps import joined
from titan_loop.errors import UserError
from titan_loop.ranks import warn_together
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.kept_records import append_or_keep
from titan_loop.training.callback import Callback, TrainingState
from titan_loop.training.stability.config import StabilityConfig
from titan_loop.training.stability.spike_judge import Evidence, SpikeJudge
from titan_loop.training.step_plan import StepPlan, regime
from titan_loop.training.verdict import StepVerdict, TrainedStep

logger = logging.getLogger(__name__)


class SkippedStep(NamedTuple):
    """A training step whose update was skipped, and its global windows [first, stop)."""

    step: int
    first_window: int
    stop_window: int


class SpikesError(Exception):
    """Too many steps were skipped: the run must rewind to before these `spikes`."""

    def __init__(self, spikes: list[SkippedStep]) -> None:
        super().__init__(f"{len(spikes)} spikes, the last at step {spikes[-1].step}")
        self.spikes = spikes


class SpikeSkipping(Callback):
    """Skips the updates of spikes and of non-finite steps."""

    def __init__(self, config: StabilityConfig, device: torch.device, run: RunDirectory) -> None:
        self.skipped: list[SkippedStep] = []
        self._config, self._run = config, run
        self._judge = SpikeJudge(config.window, config.threshold, device)
        self._newest_was_skipped = False
        self._evidence: deque[Evidence] = deque()  # of steps whose verdict is not read yet

    def plan(self, trainer: TrainingState, plan: StepPlan) -> StepPlan:
        """Give the judge the plan of the step that begins."""
        level, recurrence = trainer.dataloader.level, trainer.config.recurrence
        self._judge.begin(regime(recurrence, plan, level=level))
        return plan

    def judge(self, trainer: TrainingState, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Return True unless the step is a spike."""
        mesh = trainer.parallel_dims.get_optional_mesh("loss")
        share = (1 if mesh is None else mesh.size()) / dist.get_world_size()
        self._evidence.append(self._judge.look(loss, grad_norm, share=share))
        return self._evidence[-1].calm()

    def on_update(self, trainer: TrainingState, verdict: StepVerdict) -> None:
        """Let the judge remember the step if all ranks accepted it."""
        self._judge.take(self._evidence[-1], verdict.skip == 0)

    def on_verdict(self, trainer: TrainingState, trained: TrainedStep, *, updated: bool) -> None:
        """Record a skipped step; raise `SpikesError` if there were too many."""
        evidence = self._evidence.popleft()
        self._newest_was_skipped = not updated
        if updated:
            return
        window, windows = self._config.window, trained.windows
        recent = [skipped for skipped in self.skipped if skipped.step > trained.step - window]
        self.skipped = [*recent, SkippedStep(trained.step, windows.start, windows.stop)]
        found = _findings(evidence)
        numbers = "loss {loss:.4g}, at most {loss_bound:.4g}; "
        numbers += "gradient norm {grad_norm:.4g}, at most {grad_norm_bound:.4g}"
        counted = f"{len(self.skipped)} of {self._config.skips} within {window} steps"
        where = f"step {trained.step} (windows {windows.start} to {windows.stop - 1})"
        message = "%s is a spike: %s; update skipped (%s)"
        warn_together(logger, message, where, numbers.format(**found), counted)
        if dist.get_rank() == 0:
            _record(self._run, "skip", self.skipped[-1:], **found)
        if len(self.skipped) >= self._config.skips:
            raise SpikesError(self.skipped)

    def may_save(self) -> bool:
        """Return False right after a skipped step: bad weights may have caused the spike."""
        return not self._newest_was_skipped

    def state_dict(self) -> dict[str, Any]:
        """Return the judge's window and the recent skipped steps."""
        skipped = [skipped._asdict() for skipped in self.skipped]
        return {"stability": {"history": self._judge.state_dict(), "ladder": {"skipped": skipped}}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore both, so that a resumed run decides as an uninterrupted one would."""
        if "stability" in state:
            self._judge.load_state_dict(state["stability"]["history"])
            self.skipped = [SkippedStep(**s) for s in state["stability"]["ladder"]["skipped"]]


def _findings(evidence: Evidence) -> dict[str, float]:
    (loss, log_norm), (bound, log_bound) = evidence.values.tolist(), evidence.bounds.tolist()
    return {
        "loss": loss,
        "loss_bound": bound,
        "grad_norm": math.exp(min(log_norm, 700.0)) if log_norm == log_norm else math.nan,
        "grad_norm_bound": math.exp(min(log_bound, 700.0)),
    }


def rewind(
    run: RunDirectory,
    remote: RemoteCheckpoints | None,
    spikes: list[SkippedStep],
    config: StabilityConfig,
) -> str:
    """Record on rank 0 that the next start continues from before the spikes, without their windows.

    No save or copy of a checkpoint may be under way. `remote` has the run's copies in an object
    store. Returns the reason why the run cannot go on, or an empty string if it can.
    """
    first, last = spikes[0].step, spikes[-1].step
    before = read_rewinds(run.path)
    windows, number = _windows(spikes), len(before)
    said = f"{len(spikes)} spikes within {config.window} steps, the last at step {last} "
    said += f"(windows {windows})"
    if number >= config.rewinds:
        _record(run, "stop", spikes)
        problem = f"no rewind is left (stability.rewinds={config.rewinds}); look at "
        fix = f"{run.decisions_jsonl}, then change the data, the learning rate or recurrent steps"
        return f"stopped after {said}: {problem}{fix}"
    went_to = {rewound["to_step"] for rewound in before}
    step = _last_before(first, run.checkpoints, remote, avoid=went_to)
    if step is None:
        _record(run, "stop", spikes)
        problem = f"there is no good checkpoint from before step {first} to go back to"
        fix = "save or keep more (checkpoint.interval, checkpoint.keep_latest_k)"
        return f"stopped after {said}: {problem}; {fix}"
    # Before `record_rewind`: if only this is written, a later start decides and writes again.
    _record(run, "rewind", spikes, to_step=step)
    record_rewind(run.path, remote, {"step": last, "windows": windows, "to_step": step})
    counted = f"rewind {number + 1} of {config.rewinds}"
    text = "%s: starting again from step %d (%s), without these windows"
    logger.warning(text, said, step, counted)
    return ""


def _last_before(
    first: int, checkpoints: Path, remote: RemoteCheckpoints | None, *, avoid: Collection[int]
) -> int | None:
    """Return the step of the newest checkpoint before `first`; one of `avoid` as a last resort."""
    for shunned in ({*avoid}, set[int]()):

        def wanted(step: int, shunned: set[int] = shunned) -> bool:
            return step < first and step not in shunned

        try:
            found = newest_good(checkpoints, wanted=wanted)
        except UserError as error:
            logger.warning("%s", error)  # none of them is usable
            found = None
        if found is not None:
            return found[0]
        if there := [] if remote is None else [*filter(wanted, remote.steps())]:
            return there[-1]
    return None


def _windows(spikes: list[SkippedStep]) -> list[list[int]]:
    return [[*pair] for pair in joined((s.first_window, s.stop_window) for s in spikes)]


def _record(run: RunDirectory, decision: str, spikes: list[SkippedStep], **more: Any) -> None:
    record = {
        "decision": decision,
        "step": spikes[-1].step,
        "rewound": len(read_rewinds(run.path)),
        "windows": _windows(spikes),
    }
    append_or_keep(run.decisions_jsonl, {**record, **more})
