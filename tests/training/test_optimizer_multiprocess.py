"""Muon on several ranks: the same weights as one process, and moments that any layout continues."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.testing.tiny import act_as_launched, tiny_config
from titan_loop.training.resolved_run import resolve
from titan_loop.training.trainer import LoopTrainer

pytestmark = pytest.mark.multiprocess

STEPS = 20
TOLERANCE = 1e-5
"""Largest difference of a weight after `STEPS` steps; the rounding of gradients gives 2e-6."""

LAYOUTS = {
    "one": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tensor_parallel_degree": 2}),
    "dp2-tp2": (4, {"tensor_parallel_degree": 2}),
    "hsdp2-tp2": (4, {"data_parallel_replicate_degree": 2, "tensor_parallel_degree": 2}),
}


def make_trainer(source: Path, run: Path, layout: str, **changes: Any) -> LoopTrainer:
    world, degrees = LAYOUTS[layout]
    act_as_launched(world)
    config = tiny_config(source, run, steps=STEPS)
    config.optimizer.name = "muon"
    config.checkpoint.interval = STEPS // 2
    config.held_out.interval = 0
    for name, degree in degrees.items():
        setattr(config.parallelism, name, degree)
    return LoopTrainer(resolve(config, world))


def train(source: Path, run: Path, layout: str) -> None:
    trainer = make_trainer(source, run, layout)
    trainer.train()
    trainer.close()


@pytest.fixture(scope="module")
def runs(source: Path, tmp_path_factory: pytest.TempPathFactory, gloo_pool) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("muon")
    for name, (world, _) in LAYOUTS.items():
        gloo_pool(world).run(train, source, folder / name, name)
    return {name: folder / name for name in LAYOUTS}


def tensors(run: Path, step: int) -> dict[str, Tensor]:
    reader = CheckpointReader(RunDirectory(run).checkpoint(step))
    return {key: reader.read(key) for key in reader.tensor_keys()}


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_every_layout_has_the_weights_and_moments_of_one_process(runs, layout):
    got, want = tensors(runs[layout], STEPS), tensors(runs["one"], STEPS)
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        assert float((got[key] - tensor).abs().max()) <= TOLERANCE, key
