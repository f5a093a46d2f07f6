"""CUDA graphs on CPU: what is refused, and that a replay's reused tensors are read in time."""

from collections.abc import Callable
from typing import Any

import pytest
import titan_loop.compat as compat
from torch import Tensor

from titan_loop.distributed.loop_fsdp import FSDPConfig
from titan_loop.errors import UserError
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.testing.tiny import tiny_config
from titan_loop.training.cuda_graphs import check_cuda_graphs
from titan_loop.training.recurrence import RecurrenceConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer


def test_without_a_gpu_one_line_says_so(source, tmp_path):
    config = tiny_config(source, tmp_path)
    config.training.disable_cuda_graphs = False
    with pytest.raises(UserError, match=r"captures kernels of a GPU, and there is none; leave it"):
        config.resolve(1)


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
        ({"moves_to_host": True}, "full-offload or training.enable_cpu_offload"),
    ],
)
def test_what_a_replay_would_repeat_wrongly_is_refused(monkeypatch, changes, refusal):
    monkeypatch.setattr(compat, "device_type", lambda: "cuda")
    settings: dict[str, Any] = {
        "recurrence": RecurrenceConfig(),
        "entropy_weight": Schedule.constant(0.1),
        "fsdp": FSDPConfig(),
        "moves_to_host": False,
    }
    if refusal is None:
        check_cuda_graphs(**settings | changes)
    else:
        with pytest.raises(UserError, match=refusal):
            check_cuda_graphs(**settings | changes)


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
        config.resolve(1)
        config.training.disable_cuda_graphs = disabled
        trainer = LoopTrainer(config)
        trainer.train()
        trainer.close()
        assert (trainer.fwd_bwd_fn.__name__ == "replay") is not disabled
        records.append(RunDirectory(tmp_path / str(disabled)).read_metrics())
    for plain, replayed in zip(*records, strict=True):
        for key in ("loss", "grad_norm", "ce/step_1", "ce/step_2", "exit/entropy_nats"):
            assert plain[key] == replayed[key], key
