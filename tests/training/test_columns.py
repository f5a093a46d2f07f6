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


@pytest.mark.parametrize(
    ("method", "found", "message"),
    [
        ("columns", (), r"the loss reads importance, depth, .* add them to"),
        ("knows_depth", False, r"recurrence.from_data=True needs data with a number"),
    ],
)
def test_a_loader_without_what_is_read_is_refused(tmp_path, monkeypatch, method, found, message):
    monkeypatch.setattr(ToyLoader.Config, method, lambda _: found)
    with pytest.raises(UserError, match=message):
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
