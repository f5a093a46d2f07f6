"""Two hops take one layer two recurrent steps; tables are in README.md."""

from pathlib import Path

import pytest

from tests.effects.short_runs import trained

pytestmark = pytest.mark.effects


def test_two_hops_take_one_layer_two_recurrent_steps(tmp_path: Path):
    """Guessing is right in 10 % of cases; the questions are not in training."""
    right = trained(tmp_path, "recurrent_depth_effect")
    assert right["permutation_hops/1_hops/acc,none/static:4"] > 0.9
    assert right["permutation_hops/2_hops/acc,none/static:4"] > 0.5
    assert right["permutation_hops/2_hops/acc,none/static:1"] < 0.2
