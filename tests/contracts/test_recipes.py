"""For every recipe: its stages are built and can start, and its tables name what there is."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from titan_loop.analysis.results import ResultTable
from titan_loop.models.family import build_decoder
from titan_loop.recipes.registry import load_recipe, recipe_module, recipe_summaries
from titan_loop.training.preflight import setting_refusals, value_refusals

BUILT: set[str] = set()


def tables() -> Iterator[tuple[str, ResultTable]]:
    """Yield every recipe's tables."""
    for recipe in recipe_summaries():
        for table in getattr(recipe_module(recipe), "TABLES", {}).get(recipe, ()):
            yield recipe, table


@pytest.mark.parametrize("name", recipe_summaries())
def test_stages_are_built_and_nothing_of_them_is_refused(name):
    recipe = load_recipe(name)
    names = {stage.name for stage in recipe.stages}
    for stage in recipe.stages:
        config = stage.config
        assert stage.parent is None or stage.parent in names
        found = [*value_refusals(config)]
        found += setting_refusals(config, starts_trained=stage.parent is not None)
        found = [refusal for refusal in found if refusal.field != "loss.teacher"]  # a user's run
        assert not found, (stage.name, [str(refusal) for refusal in found])
        # Neither R nor the vocabulary is a part of a layer, and many recipes share their layers.
        options = replace(config.model, attention="sdpa", vocab_size=128, recurrent_steps=None)
        if str(options) not in BUILT:
            window = config.training.seq_len
            assert build_decoder(options, max_seq_len=window, device="meta").layers
            BUILT.add(str(options))


@pytest.mark.parametrize(
    ("recipe", "table"), [*tables()], ids=lambda value: getattr(value, "name", value)
)
def test_a_table_asks_for_stages_and_strata_that_there_are(recipe, table):
    stages = {stage.name: stage.config for stage in load_recipe(recipe).stages}
    assert {*table.paper} <= {*table.rows}
    assert all({*told} <= {*table.columns} for told in table.paper.values())
    assert table.less in {"", *table.rows}
    for row in table.rows:
        for column in table.columns:
            where, _ = table.address(row, column)
            config = stages[where["stage"]]
            task = config.dataloader.generated_task()
            if task is not None and where.get("stratum"):
                assert where["stratum"] in {*task.strata, "knowledge", "depth"}, where
