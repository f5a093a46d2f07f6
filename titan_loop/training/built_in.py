"""The callbacks that a run's config switches on; a part that is off touches nothing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import titan_loop.compat as compat  # before any torchtitan module
import torch
import torch.distributed as dist

from titan_loop.runs.heartbeats import forget_heartbeats
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.callback import Callback, TrainingState
from titan_loop.training.depth_schedule import most_recurrent_steps
from titan_loop.training.resolved_run import ResolvedRun
from titan_loop.training.stability.heartbeat import Pulse
from titan_loop.training.stability.non_finite import NonFiniteSteps
from titan_loop.training.stability.norms import NormsLog
from titan_loop.training.stability.recovery import SpikeSkipping
from titan_loop.training.stability.spike_judge import SpikeJudge
from titan_loop.training.stability.states import StateNorms
from titan_loop.training.stability.stragglers import Stragglers
from titan_loop.training.verdict import StepVerdict


class WeightAverages(Callback):
    """Takes the weights into their average (`ema`), which the optimisers keep and save."""

    def on_update(self, trainer: TrainingState, verdict: StepVerdict) -> None:
        """Count a skipped step as a step, whose weights are the last one's."""
        trainer.optimizers.update_average(step=trainer.step, tokens=trainer.tokens)


class ModelState(Callback):
    """Moves and records the state of a model that no gradient moves, such as loads of experts."""

    def on_update(self, trainer: TrainingState, verdict: StepVerdict) -> None:
        """Tell the model that a step ended, with or without an update."""
        mesh = trainer.parallel_dims.get_optional_mesh("loss")
        trainer.model.after_update(mesh, verdict.skip == 0)

    def record(self, trainer: TrainingState) -> Mapping[str, Any]:
        """Return the model's entries."""
        return trainer.model.record()


class HangTraces(Callback):
    """Writes the flight recorder's trace of a rank that hangs."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_hang(self) -> None:
        """Write it."""
        compat.dump_flight_recorder(self._file)


def built_in_callbacks(run: ResolvedRun, device: torch.device) -> list[Callback]:
    """Return the callbacks of `max_skipped_steps`, `stability`, `ema` and `comm`."""
    config, asked = run.config, run.config.stability
    directory = RunDirectory(config.dump_folder)
    if dist.get_rank() == 0:
        forget_heartbeats(directory.path)  # of an earlier start, on more ranks perhaps
    callbacks: list[Callback] = [ModelState()]
    if asked.heartbeat_seconds:
        seconds = asked.heartbeat_seconds
        callbacks.append(Pulse(directory.path, rank=dist.get_rank(), seconds=seconds))
    if asked.straggler:
        callbacks.append(Stragglers(asked.straggler, device))
    depth, layers = most_recurrent_steps(config.recurrence), len(run.model.layers)
    states = StateNorms(
        layers=layers,
        recurrent_steps=depth,
        device=device,
        interval=1 if asked.skip_spikes else asked.norms_interval,
    )
    if asked.skip_spikes or asked.norms_interval:
        callbacks.append(states)  # before those that read its sums
    if asked.skip_spikes:
        judge = SpikeJudge(
            window=asked.window, threshold=asked.threshold, shape=(depth + 1, layers), device=device
        )
        callbacks.append(SpikeSkipping(asked, judge, states, run.model.looped, directory))
    else:
        callbacks.append(NonFiniteSteps(config.max_skipped_steps))
    if asked.norms_interval:
        elements = config.training.seq_len * run.model.dim
        callbacks.append(NormsLog(asked.norms_interval, states, elements, directory))
    if config.ema.decay:
        callbacks.append(WeightAverages())
    traces, prefix = config.comm.save_traces_folder, config.comm.save_traces_file_prefix
    # Last: the disk, or a lock that the dump needs, may hang.
    callbacks.append(HangTraces(directory.path / traces / f"{prefix}{dist.get_rank()}"))
    return callbacks
