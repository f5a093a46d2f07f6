"""All ranks train the same model, whatever each of them sees of the disk."""

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.tiny import act_as_launched, tiny_config, train_run
from titan_loop.checkpoint import manifest
from titan_loop.storage import json_files
from titan_loop.training.callback import Callback

pytestmark = pytest.mark.multiprocess

BASE = 500_000.0
STEPS = 2


@dataclass
class Trained(Callback):
    """Notes which model is trained."""

    rope_theta: list[float] = field(default_factory=list)

    def on_train_start(self, trainer: Any) -> None:
        """Note it."""
        self.rope_theta.append(trainer.model_config.architecture["rope_theta"])


def train_parent(source: Path, run: Path) -> None:
    act_as_launched(2)
    config = tiny_config(source, run, steps=STEPS)
    config.model.rope_theta = BASE
    train_run(config)


@pytest.fixture(scope="module")
def parent(source: Path, gloo_pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("parent")
    gloo_pool(2).run(train_parent, source, run)
    return run


def stale(path: Path, *, fix: str) -> Any:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))


def fork(source: Path, parent: Path, run: Path, blind: int) -> float:
    """Train from a parent whose manifest rank `blind` cannot read; return the RoPE base."""
    act_as_launched(2)
    config = tiny_config(source, run, steps=STEPS)
    config.checkpoint.carry.parent = str(parent)
    trained = Trained()
    config.callbacks = (trained,)
    if dist.get_rank() == blind:
        manifest.read_json_object = stale
    try:
        train_run(config)
    finally:
        manifest.read_json_object = json_files.read_json_object
    return trained.rope_theta[0]


def test_a_rank_with_a_stale_view_trains_the_model_that_rank_zero_found(
    source, parent, gloo_pool, tmp_path
):
    assert gloo_pool(2).run(fork, source, parent, tmp_path / "run", 1) == [BASE, BASE]
