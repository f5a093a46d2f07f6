"""CUDA graphs on CPU: what is refused, and that a replay's reused tensors are read in time."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import titan_loop.compat as compat
from torch import Tensor

from titan_loop.distributed.activation_checkpointing import FullOffloadAC
from titan_loop.distributed.loop_fsdp import FSDPConfig
from titan_loop.errors import UserError
from titan_loop.objectives.gate_loss import AdaptiveGateLoss
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.testing.tiny import tiny_config
from titan_loop.training.preflight import replay_refusals
from titan_loop.training.recurrence import RecurrenceConfig
from titan_loop.training.resolved_run import resolve
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer


def test_without_a_gpu_one_line_says_so(source, tmp_path):
    config = tiny_config(source, tmp_path)
    config.training.disable_cuda_graphs = False
    with pytest.raises(UserError, match=r"captures kernels of a GPU, and there is none; leave it"):
        resolve(config, 1)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({}, None),
        ({"recurrence": RecurrenceConfig(poisson=True, min_steps=3, max_steps=3)}, None),
        ({"recurrence": RecurrenceConfig(poisson=True)}, r"recurrence\.steps='4' gives 1 to 12"),
        (
            {"recurrence": RecurrenceConfig(steps=Schedule.steps([(0, 4), (9, 2)]))},
            r"recurrence\.steps='0:4 constant 9:2' gives 2 to 4; leave it True, or fix R",
        ),
        ({"entropy_weight": Schedule.steps([(0, 0.1), (9, 0.05)])}, "entropy_weight='.*' changes"),
        ({"fsdp": FSDPConfig(policy="per_visit")}, None),
        ({"fsdp": FSDPConfig(policy="per_step")}, r"use fsdp\.policy=per_visit"),
        ({"training.enable_cpu_offload": True}, "full-offload or training.enable_cpu_offload"),
        ({"activation_checkpoint": FullOffloadAC.Config()}, "full-offload or training.enable_cpu"),
        (
            {
                "loss": AdaptiveGateLoss.Config(),
                "entropy_weight": Schedule.steps([(0, 0.1), (9, 0)]),
            },
            None,  # this objective has no use for the schedule
        ),
    ],
)
def test_what_a_replay_would_repeat_wrongly_is_refused(changes, refusal):
    config = LoopTrainer.Config()
    for path, value in changes.items():
        *sections, name = path.split(".")
        section = getattr(config, sections[0]) if sections else config
        setattr(section, name, value)
    found = [str(each) for each in replay_refusals(config)]
    if refusal is None:
        assert found == []
    else:
        (line,) = found
        assert re.search(refusal, line)


def replaying(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Write every result into the tensors of the first, as a captured graph does."""
    trainer: Any = step.__self__  # pyright: ignore[reportFunctionMemberAccess]
    kept: list[Tensor] = []
    names: list[str] = []

    def replay(*args: Any) -> Tensor:
        results = [step(*args).detach(), *trainer._objective.values()]
        if not kept:
            kept.extend(results)
            names.extend(trainer._objective)
        for tensor, result in zip(kept, results, strict=True):
            tensor.copy_(result)
        trainer._objective = dict(zip(names, kept[1:], strict=True))
        return kept[0]

    return replay


def test_tensors_that_every_replay_writes_are_read_in_time(source, tmp_path, alone, monkeypatch):
    monkeypatch.setattr("torchtitan.trainer.wrap_with_cuda_graph", replaying)
    records = []
    for disabled in (True, False):
        config = tiny_config(source, tmp_path / str(disabled), steps=3)
        config.recurrence.steps = Schedule.constant(2)
        compat.start_runtime()
        run = resolve(config, 1)  # refuses a graph without a GPU
        run.config.training.disable_cuda_graphs = disabled
        trainer = LoopTrainer(run)
        trainer.train()
        trainer.close()
        assert (trainer.fwd_bwd_fn.__name__ == "replay") is not disabled
        records.append(RunDirectory(tmp_path / str(disabled)).read_metrics())
    for plain, replayed in zip(*records, strict=True):
        for key in ("loss", "grad_norm", "ce/step_1", "ce/step_2", "exit/entropy_nats"):
            assert plain[key] == replayed[key], key
