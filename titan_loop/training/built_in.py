"""The callbacks that a run's config switches on; one that is off adds no work."""

import torch
import torch.distributed as dist

from titan_loop.runs.heartbeats import forget_heartbeats
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.callback import Callback
from titan_loop.training.depth_schedule import most_recurrent_steps
from titan_loop.training.resolved_run import ResolvedRun
from titan_loop.training.stability.heartbeat import Pulse
from titan_loop.training.stability.non_finite import NonFiniteSteps
from titan_loop.training.stability.norms import NormsLog
from titan_loop.training.stability.recovery import SpikeSkipping
from titan_loop.training.stability.spike_judge import SpikeJudge
from titan_loop.training.stability.states import StateNorms
from titan_loop.training.stability.stragglers import Stragglers


def built_in_callbacks(run: ResolvedRun, device: torch.device) -> list[Callback]:
    """Return the callbacks that `max_skipped_steps` and `stability` ask for, in calling order."""
    config, asked = run.config, run.config.stability
    directory = RunDirectory(config.dump_folder)
    if dist.get_rank() == 0:
        forget_heartbeats(directory.path)  # an earlier start may have had more ranks
    callbacks: list[Callback] = []
    if seconds := asked.heartbeat_seconds:
        callbacks.append(Pulse(directory.path, rank=dist.get_rank(), seconds=seconds))
    if asked.straggler:
        callbacks.append(Stragglers(asked.straggler, device))
    depth, layers = most_recurrent_steps(config.recurrence), len(run.model.layers)
    interval = 1 if asked.skip_spikes else asked.norms_interval
    states = StateNorms(layers, depth, device, interval)
    if interval:
        callbacks.append(states)  # first, since the callbacks below read its sums
    if asked.skip_spikes:
        judge = SpikeJudge(asked.window, asked.threshold, (depth + 1, layers), device)
        callbacks.append(SpikeSkipping(asked, judge, states, run.model.looped, directory))
    else:
        callbacks.append(NonFiniteSteps(config.max_skipped_steps))
    if asked.norms_interval:
        elements = config.training.seq_len * run.model.dim
        callbacks.append(NormsLog(asked.norms_interval, states, elements, directory))
    return callbacks
