"""The recipes of latent-space reasoning: stages can start, tables name what they report."""

import math

from titan_loop.families.latent.model import LatentOptions
from train_configs.latent.recipes import METHODS, latent, latent_small
from train_configs.latent.task import DagArithmetic, DagChainOfThought


def test_the_paper_s_recipe_trains_as_the_authors_code():
    stages = {stage.name: stage.config for stage in latent().stages}
    for name, config in stages.items():
        task = config.dataloader.generated_task()
        assert isinstance(task, DagArithmetic)
        assert task.most_depth == 7
        assert task.by_depth
        assert config.training.max_norm == math.inf
        mean = getattr(config.loss, "mean_over_steps", None)
        assert mean == {"discrete": True, "correction": True, "continuous": False}.get(name)
        assert config.dataloader.generated_task().most_steps == 7
    thought = stages["chain_of_thought"].dataloader.generated_task()
    assert isinstance(thought, DagChainOfThought)
    assert thought.thought == "bare_equations"


def test_methods_differ_as_the_paper_says():
    stages = {stage.name: stage for stage in latent_small().stages}
    configs = {name: stages[name].config for name in METHODS.values()}
    states = {name: getattr(config.model, "state", None) for name, config in configs.items()}
    assert states.pop("chain_of_thought") is None
    assert [name for name, state in states.items() if state == "discrete"] == [
        "discrete",
        "correction",
    ]
    supervised = [name for name, config in configs.items() if config.recurrence.from_data]
    assert supervised == ["discrete", "correction", "continuous"]
    correction = configs["correction"].model
    assert isinstance(correction, LatentOptions)
    assert correction.corruption == 0.05
    for name in METHODS.values():
        first = "discrete_first" if name == "correction" else f"{name}_first"
        assert stages[name].parent == first
        assert stages[first].parent is None
