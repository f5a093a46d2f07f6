"""Steps on discrete values solve graphs in minutes; tables are in README.md."""

from pathlib import Path

import pytest

from tests.effects.short_runs import shorter, trained

pytestmark = pytest.mark.effects


def test_steps_on_discrete_values_solve_graphs_of_four_to_eight_nodes(tmp_path: Path):
    """The first stage of latent_small on smaller graphs modulo 3; one step solves leaves alone."""
    graphs = {"modulus": 3, "nodes": 8, "fewest-nodes": 4, "leaves": 3, "names": 16}
    flags = [f"--dataloader.{name}={value}" for name, value in graphs.items()]
    flags += ["--dataloader.test-nodes", "4", "8", "--dataloader.most-depth", "3"]
    flags += ["--recurrence.steps", "3", "--recurrence.max-steps", "3"]
    flags += ["--suite.interval", "1000", "--suite.depths", "1", "8"]
    right = trained(
        tmp_path, "latent_small", "discrete_first", *shorter(600_000, warmup=24_000), *flags
    )
    assert right["dag_arithmetic/4_nodes/acc,none/static:8"] > 0.8
    assert right["dag_arithmetic/8_nodes/acc,none/static:8"] > 0.3
    assert right["dag_arithmetic/8_nodes/acc,none/static:1"] < 0.05
