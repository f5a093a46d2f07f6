"""Muon and the average of the weights on several ranks: as on one, and resumed on any number."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.tiny import BATCH_WINDOWS, act_as_launched, tiny_config
from titan_loop.checkpoint.loading import AVERAGE_PREFIX
from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.resolved_run import resolve
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

pytestmark = pytest.mark.multiprocess

STEPS = 4
TOLERANCE = 1e-5
"""Largest difference of a weight after `STEPS` steps; the rounding of gradients gives 2e-6."""

LAYOUTS = {
    "one": (1, {}),
    "dp2": (2, {}),
    "hsdp2-tp2": (4, {"data_parallel_replicate_degree": 2, "tensor_parallel_degree": 2}),
}


def make_trainer(source: Path, run: Path, layout: str) -> LoopTrainer:
    world, degrees = LAYOUTS[layout]
    act_as_launched(world)
    config = tiny_config(source, run, steps=STEPS)
    config.optimizer.name, config.recurrence.steps = "muon", Schedule.constant(1)
    config.ema.decay = 0.9
    config.model.n_layers = 1
    config.checkpoint.interval = STEPS // 2
    config.held_out.interval = 0
    config.metrics.log_freq = STEPS
    config.training.local_batch_size = (
        BATCH_WINDOWS * degrees.get("tensor_parallel_degree", 1) // world
    )
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
def test_every_layout_has_the_weights_moments_and_average_of_one_process(runs, layout):
    got, want = tensors(runs[layout], STEPS), tensors(runs["one"], STEPS)
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        assert float((got[key] - tensor).abs().max()) <= TOLERANCE, key


def load_and_save(source: Path, origin: Path, run: Path, layout: str) -> None:
    """Load a run's checkpoint in the middle, and save it again as another run's."""
    trainer = make_trainer(source, run, layout)
    own, trainer.checkpointer.path = trainer.checkpointer.path, origin / "checkpoints"
    assert trainer.checkpointer.load()
    trainer.checkpointer.path = own
    trainer.checkpointer._last_saved = -1  # a run does not save the step that it has loaded
    trainer.checkpointer.save(trainer.step, last_step=True)
    trainer.close()


def middle_of(run: Path, copy: Path) -> Path:
    """Return a run whose newest checkpoint is another's in the middle."""
    folders = [RunDirectory(folder).checkpoint(STEPS // 2) for folder in (run, copy)]
    shutil.copytree(*folders)
    return copy


def test_moments_and_average_survive_other_layouts_bit_for_bit(gloo_pool, source, runs, tmp_path):
    origin = middle_of(runs["dp2"], tmp_path / "origin")
    for layout in ("one", "hsdp2-tp2", "dp2"):
        run, world = tmp_path / layout, LAYOUTS[layout][0]
        gloo_pool(world).run(load_and_save, source, origin, run, layout)
        origin = run
    want, got = (tensors(run, STEPS // 2) for run in (runs["dp2"], origin))
    assert want.keys() == got.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)
    kinds = {key.rpartition(".")[2] for key in want if key.startswith("optimizer.state.")}
    assert kinds == {"step", "exp_avg", "exp_avg_sq", "momentum_buffer"}
    assert AVERAGE_PREFIX + "layers.0.attention.wo.weight" in want
    muon = {key for key in want if key.endswith(".momentum_buffer")}
    assert len(muon) == 7
    assert all(key.startswith("optimizer.state.layers.") for key in muon)
