"""Loops of one layer learn in minutes what it cannot in one visit."""

from pathlib import Path

import pytest

from tests.effects.short_runs import shorter, trained

pytestmark = pytest.mark.effects


def test_loops_of_one_layer_add_to_arithmetic(tmp_path: Path):
    """A third of physics_small's; guessing is right in 20 % of cases."""
    flags = shorter(2_500_000, warmup=200_000)
    once = trained(tmp_path, "physics_small", "mano_1x1", *flags)["mano/acc,none/static:1"]
    looped = trained(tmp_path, "physics_small", "mano_1x4", *flags)["mano/acc,none/static:4"]
    assert looped > once + 0.1
