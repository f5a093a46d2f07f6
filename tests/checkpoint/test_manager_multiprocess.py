"""Several ranks: a fault on one of them is everybody's, and all choose the same checkpoint."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.checkpointer.base import TRAIN_STATE

from titan_loop.checkpoint import saving
from titan_loop.checkpoint.folders import committed_steps
from titan_loop.checkpoint.manager import LoopCheckpointManager
from titan_loop.errors import UserError

pytestmark = pytest.mark.multiprocess


class Run:
    """The smallest thing a manager can save: it is trainer, loader and optimiser at once."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.model = nn.Linear(64, 64)
        self.state: dict[str, Any] = {"step": 0, "tokens": 0, "recurrent_steps": 1}
        self.state["architecture"] = {}
        config = LoopCheckpointManager.Config(interval=1, retry_seconds=0.01, **settings)
        self.manager = LoopCheckpointManager(
            config,
            dataloader=self,
            model_parts=[self.model],
            optimizers=Moments(),
            states={TRAIN_STATE: self},
            base_folder=str(folder),
        )

    at_stage_end = False

    def may_save(self) -> bool:
        return True

    def lineage(self) -> dict[str, Any]:
        return {}

    def rank_files(self) -> dict[str, bytes]:
        return {}

    def load_rank_files(self, folder: Path) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state.update(state_dict)

    def step_to(self, step: int) -> None:
        """Make the weights a function of the step, and save."""
        self.manager.maybe_wait_for_staging()
        self.state["step"] = step
        with torch.no_grad():
            self.model.weight.fill_(step)
        self.manager.save(step)


class Moments:
    """Stands in for the optimiser: one tensor and one object."""

    def __init__(self) -> None:
        self.moments = {"state.weight.exp_avg": torch.ones(8), "param_groups.weight.lr": 0.5}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.moments)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.moments.update(state_dict)


def fail_on_rank_one(folder: Path, mode: str) -> tuple[list[bool], int]:
    real, threads = saving.file_records, []

    def broken(checkpoint: Path, *which: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        if dist.get_rank() == 1 and checkpoint.name == "step-2":
            raise OSError(5, "Input/output error")
        return real(checkpoint, *which)

    saving.file_records = broken
    try:
        run = Run(folder, async_mode=mode)
        for step in (1, 2, 3):
            run.step_to(step)
        run.manager.maybe_wait_for_saving()
        steps = committed_steps(run.manager.path)
        run.manager.close()
    finally:
        saving.file_records = real
    return threads, steps


@pytest.mark.parametrize("mode", ["disabled", "async_with_pinned_mem"])
def test_one_rank_failing_costs_that_checkpoint_only(gloo_pool, tmp_path, mode):
    for threads, steps in gloo_pool(2).run(fail_on_rank_one, tmp_path, mode):
        assert steps == [1, 3]
        assert threads == [mode == "disabled"] * 5  # once, three attempts, once
    assert not (tmp_path / "checkpoints" / "step-2").exists()


def fail_to_stage_on_rank_one(folder: Path) -> list[int]:
    run = Run(folder, async_mode="async")
    stager = run.manager._stager
    assert stager is not None
    real = stager._stage

    def broken(state_dict: Any, **keywords: Any) -> Any:
        if dist.get_rank() == 1 and run.state["step"] == 2:
            raise MemoryError("no pinned memory left")
        return real(state_dict, **keywords)

    stager._stage = broken
    for step in (1, 2, 3):
        run.step_to(step)
    run.manager.maybe_wait_for_saving()
    steps = committed_steps(run.manager.path)
    run.manager.close()
    return steps


def test_one_rank_that_cannot_copy_its_state_costs_that_checkpoint_only(gloo_pool, tmp_path):
    results = gloo_pool(2).run(fail_to_stage_on_rank_one, tmp_path)
    assert results == [[1, 3], [1, 3]]


def resume(folder: Path, damage: str) -> tuple[Any, ...]:
    run = Run(folder)
    for step in (1, 2, 3):
        run.step_to(step)
    dist.barrier()
    if dist.get_rank() == 0:
        path = run.manager.path / "step-3" / damage
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    dist.barrier()
    again = Run(folder)
    with torch.no_grad():
        again.model.weight.zero_()
    loaded = again.manager.load()
    result = loaded, again.state["step"], float(again.model.weight.mean())
    run.manager.close()
    again.manager.close()
    return result


@pytest.mark.parametrize("damage", ["__0_0.distcp", "tensors.json", "manifest.json"])
def test_all_ranks_fall_back_to_the_same_checkpoint(gloo_pool, tmp_path, damage):
    for result in gloo_pool(2).run(resume, tmp_path, damage):
        assert result == (True, 2, 2.0)
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step-1", "step-2", "damaged-step-3"}


def refuse_everywhere(folder: Path) -> str:
    run = Run(folder)
    run.step_to(1)
    dist.barrier()
    if dist.get_rank() == 0:
        (run.manager.path / "step-1" / "__0_0.distcp").unlink()
    dist.barrier()
    try:
        run.manager.load()
    except UserError as error:
        return str(error)
    finally:
        run.manager.close()
    return "loaded"


def test_if_none_is_whole_every_rank_says_so(gloo_pool, tmp_path):
    for message in gloo_pool(2).run(refuse_everywhere, tmp_path):
        assert "is usable" in message
        assert "__0_0.distcp is missing" in message
