"""Named columns reach model and objective on every layout, and stand in the data's description."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.support.tiny import act_as_launched
from tests.training.toy_columns import (
    DEPTHS,
    SEQ_LEN,
    VOCABULARY,
    WINDOWS,
    ToyLoader,
    toy_run,
)
from titan_loop.errors import UserError
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.resolved_run import resolve
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

# fp32 sums in another order; measured 1e-6 relative to the largest entry of a tensor
RELATIVE_TOLERANCE = 1e-5
LAYOUTS = {"dp2": {}, "tp2": {"tensor": 2}, "cp2": {"context": 2}}


def toy_loader(config: ToyLoader.Config | None = None, ranks: int = 1, rank: int = 0) -> ToyLoader:
    return (config or ToyLoader.Config()).build(
        dp_world_size=ranks, dp_rank=rank, seq_len=SEQ_LEN, local_batch_size=2
    )


def test_columns_are_read_with_their_windows_on_any_number_of_ranks():
    (first, _), (second, _) = toy_loader().read_step(WINDOWS)
    assert first["shift"].shape == (2, SEQ_LEN, 2)
    assert (first["importance"].dtype, first["depth"].shape) == (torch.float32, (2,))
    for rank, whole in enumerate((first, second)):
        ((part, _),) = toy_loader(ranks=2, rank=rank).read_step(WINDOWS)
        assert part.keys() == {"input", "positions", "shift", "importance", "depth", "labelled"}
        assert part.pop("labelled").tolist() == [*range(4), *range(5, 20), *range(21, 32)]
        for name, values in part.items():
            assert torch.equal(values, whole[name]), name
    numbers = np.random.default_rng(3)  # the last window, drawn as the loader draws it
    numbers.integers(VOCABULARY, size=SEQ_LEN + 1)
    assert second["shift"][1].tolist() == numbers.integers(4, size=(SEQ_LEN, 2)).tolist()
    assert second["importance"][1].tolist() == pytest.approx(numbers.random(SEQ_LEN).tolist())
    assert [*first["depth"].tolist(), *second["depth"].tolist()] == [*DEPTHS[:WINDOWS]]


def test_declared_columns_are_part_of_the_hash_and_of_what_a_resume_checks(monkeypatch):
    loader = toy_loader()
    state = loader.state_dict()
    monkeypatch.setattr(ToyLoader.Config, "columns", lambda _: ())
    without = toy_loader()
    assert without.data_hash != loader.data_hash
    with pytest.raises(UserError, match="columns"):
        without.load_state_dict(state)


def test_an_objective_whose_columns_no_loader_declares_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(ToyLoader.Config, "columns", lambda _: ())
    with pytest.raises(UserError, match=r"the loss reads importance, depth, .* add them to"):
        resolve(toy_run(tmp_path), 1)


def test_an_objectives_own_schedule_is_checked(tmp_path):
    config = toy_run(tmp_path)
    config.loss.certainty_weight = Schedule.constant(-1)
    with pytest.raises(UserError, match=r"certainty_weight='-1' falls below 0"):
        resolve(config, 1)


def test_r_from_data_that_does_not_say_its_depth_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(ToyLoader.Config, "knows_depth", lambda _: False)
    with pytest.raises(UserError, match=r"recurrence.from_data=True needs data with a number"):
        resolve(toy_run(tmp_path), 1)


def train(run: Path, world: int, degrees: dict[str, int]) -> dict[str, Tensor]:
    """Train two steps; return the whole gradients of the first."""
    act_as_launched(world)
    config = toy_run(run)
    config.parallelism.tensor_parallel_degree = degrees.get("tensor", 1)
    config.parallelism.context_parallel_degree = degrees.get("context", 1)
    trainer = LoopTrainer(resolve(config, world))
    trainer.batch_generator(None)
    trainer.step = 1
    trainer.train_step(iter(()))
    gradients = {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone()
        for name, p in trainer.model.named_parameters()
    }
    trainer.step = 2
    trainer.train_step(iter(()))
    trainer.close()
    return gradients


def test_columns_train_alike_on_every_layout(gloo_pool, tmp_path):
    """Loss, metrics and all gradients, with a toy objective that reads columns and `aux`."""
    (gradients,) = gloo_pool(1).run(train, tmp_path / "one", 1, {})
    records = RunDirectory(tmp_path / "one").read_metrics()
    assert [record["certainty_weight"] for record in records] == [0.1, 0.2]
    assert [record["entropy_weight"] for record in records] == [0, 0]
    deepest = [max(DEPTHS[:WINDOWS]), max(DEPTHS[WINDOWS:])]
    assert [record["recurrent_steps"] for record in records] == deepest
    assert len(gradients) > 10
    for layout, degrees in LAYOUTS.items():
        for got in gloo_pool(2).run(train, tmp_path / layout, 2, degrees):
            for name, want in gradients.items():
                error = (got[name] - want).abs().max() / want.abs().max()
                assert error < RELATIVE_TOLERANCE, (layout, name)
        for record, want in zip(
            RunDirectory(tmp_path / layout).read_metrics(), records, strict=True
        ):
            for key in ("data_hash", "recurrent_steps"):
                assert record[key] == want[key], (layout, key)
            for key in ("loss", "ce", "certainty"):
                assert record[key] == pytest.approx(want[key], rel=RELATIVE_TOLERANCE), layout
