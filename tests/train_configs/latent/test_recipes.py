"""The recipes of latent-space reasoning: stages can start, tables name what they report."""

import math

import pytest

from titan_loop.families.latent.model import SIZES, LatentOptions
from titan_loop.training.preflight import refusals
from train_configs.latent.recipes import METHODS, TABLES, latent, latent_small
from train_configs.latent.task import DagArithmetic, DagChainOfThought


@pytest.mark.parametrize("recipe", [latent, latent_small])
def test_every_stage_can_start_and_is_reported(recipe):
    stages = {stage.name: stage.config for stage in recipe().stages}
    assert {name for name in stages if not name.endswith("_first")} == {*METHODS.values()}
    for config in stages.values():
        assert list(refusals(config, 1)) == []
    whole, values, *_ = TABLES[recipe.__name__]
    for table in (whole, values):
        for row, where in table.rows.items():
            task = stages[where["stage"]].dataloader.generated_task()
            assert task is not None
            assert {column["stratum"] for column in table.columns.values()} == set(task.strata)
            assert table.paper.get(row, {}).keys() <= table.columns.keys()
    for where in values.rows.values():
        task = stages[where["stage"]].dataloader.generated_task()
        assert task is not None
        assert where["task"] == task.name
    assert whole.paper.keys() | values.paper.keys() == values.rows.keys()


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


def test_the_papers_models_have_its_shapes():
    models = {stage.name: stage.config.model for stage in latent().stages}
    plain = models.pop("chain_of_thought")
    sizes = {name: SIZES[str(model.size)] for name, model in models.items()}
    shapes = {name: (size.dim, size.n_layers, size.n_heads) for name, size in sizes.items()}
    assert shapes.pop("discrete") == (256, 2, 16)  # width, layers, heads
    assert shapes.pop("correction") == (384, 4, 16)
    assert shapes.pop("feed_forward") == (256, 8, 16)
    assert set(shapes.values()) == {(256, 2, 16)}
    assert (plain.dim, plain.n_layers, plain.n_heads, plain.positions) == (512, 8, 16, "none")


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


def test_all_methods_first_learn_sums_of_leaves():
    for stage in latent_small().stages:
        task = stage.config.dataloader.generated_task()
        assert isinstance(task, DagArithmetic)
        assert task.most_depth == (2 if stage.name.endswith("_first") else 5)
        assert task.most_parents == 2
        windows = stage.config.total_tokens / stage.config.training.seq_len
        assert windows == pytest.approx((3e6 if task.most_depth == 2 else 1e6) / 112, rel=1e-3)
