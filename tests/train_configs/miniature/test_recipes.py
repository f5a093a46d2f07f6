"""The miniature has every stage of the big recipe, with the same changes from one to the next."""

from typing import Any

import pytest

from titan_loop.data.load.mixture import parse_mixture
from titan_loop.recipes.recipe import Stage
from titan_loop.recipes.registry import load_recipe


@pytest.mark.parametrize("branch", ["ouro_1_4b", "ouro_2_6b"])
def test_every_stage_changes_what_the_big_one_s_changes(branch):
    """R, β, RoPE base, what trains, and how window, batch and rate relate to the stage before."""

    def moments(stage: Stage) -> dict[str, Any]:
        config = stage.config
        ends = [
            config.plan_step(step=1, tokens=tokens, seed=0)
            for tokens in (0, config.total_tokens - 1)
        ]
        rates = [plan.learning_rate for plan in ends]
        return {
            "R": [plan.recurrent_steps for plan in ends],
            "β": [plan.schedules["entropy_weight"] for plan in ends],
            "RoPE base": config.model.rope_theta,
            "batch grows by": ends[1].windows / ends[0].windows,
            "rate": "falls" if rates[1] < rates[0] else "rises" if rates[1] > rates[0] else "stays",
            "trainable": config.trainable,
            "loss": type(config.loss),
            "moments": config.checkpoint.carry.optimizer,
            "packed": any(e.packed for e in parse_mixture(config.dataloader.mixture)),
        }

    big = {stage.name: moments(stage) for stage in load_recipe(branch).stages}
    for stage in load_recipe("miniature").stages:
        name = stage.name.removesuffix("_upcycled").replace("annealing", "ct_annealing")
        assert moments(stage) == big[name], stage.name
