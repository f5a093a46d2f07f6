"""The recipes of latent-space reasoning: stages can start, tables name what they report."""

from titan_loop.families.latent.model import LatentOptions
from train_configs.latent.recipes import METHODS, latent_small


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
