"""Two ranks train a chain whose stages are laid out differently, over one process group."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.tiny import act_as_launched, tiny_config
from titan_loop.recipes import start as runner
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.schedule import Schedule

STEPS = 2
STAGES = ("1a", "1b", "1c")
# Ranks sum their shares of a loss in another order than one process does.
RELATIVE_TOLERANCE = 1e-5


def train_chain(
    source: Path, folder: Path, world: int, tensor_parallel: tuple[int, ...]
) -> tuple[int, int]:
    """Train as a launcher's rank.

    Returns:
        Number of process groups the stages were trained in, and how often this rank looked at the
        data and checkpoints of the whole recipe.
    """
    act_as_launched(world)
    stages: list[Stage] = []
    for name, degree in zip(STAGES, tensor_parallel, strict=True):
        config = tiny_config(source, folder, steps=STEPS)
        config.parallelism.tensor_parallel_degree = degree
        config.training.local_batch_size = 4
        config.recurrence.steps = Schedule.constant(1)
        config.model.n_layers = 2 if stages else 1
        stages.append(Stage(name=name, parent=stages[-1].name if stages else None, config=config))
    stages[1].config.checkpoint.carry.upcycle = "stacked"
    groups: set[Any] = set()

    def watched(*arguments: Any, **how: Any) -> None:
        train(*arguments, **how)
        groups.add(dist.group.WORLD)

    looks: list[int] = []
    look = runner.check_placed

    def counted(*arguments: Any, **how: Any) -> Any:
        looks.append(1)
        return look(*arguments, **how)

    runner.check_placed = counted
    train, leave = runner.run_training, runner.shutdown
    runner.run_training, runner.shutdown = watched, lambda: None  # the pool's group is not ours
    try:
        runner.run_recipe(Recipe(name="chain", folder=str(folder), stages=stages))
    finally:
        runner.run_training, runner.shutdown, runner.check_placed = train, leave, look
    return len(groups), len(looks)


@pytest.mark.usefixtures("alone")
def test_stages_of_other_layouts_follow_each_other_in_one_launch(gloo_pool, source, tmp_path):
    ranks = gloo_pool(2).run(train_chain, source, tmp_path / "two", 2, (1, 2, 1))
    assert ranks == [(1, 1), (1, 0)]  # hundreds of ranks would read every card of every stage
    train_chain(source, tmp_path / "one", 1, (1, 1, 1))
    for stage in STAGES:
        two, one = (RunDirectory(tmp_path / name / stage).read_metrics() for name in ("two", "one"))
        assert len(one) == STEPS
        for got, want in zip(two, one, strict=True):
            assert got["data_hash"] == want["data_hash"]
            assert got["loss"] == pytest.approx(want["loss"], rel=RELATIVE_TOLERANCE)
