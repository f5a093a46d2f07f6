"""Loops of one layer learn in minutes what it cannot in one visit; tables are in LOG.md."""

from pathlib import Path

import pytest

from tests.effects.short_runs import shorter, trained

pytestmark = pytest.mark.effects


def test_two_hops_take_one_layer_two_recurrent_steps(tmp_path: Path):
    """Guessing is right in 10 % of cases; the questions are not in training."""
    right = trained(tmp_path, "recurrent_depth_effect")
    assert right["permutation_hops/1_hops/acc,none/static:4"] > 0.9
    assert right["permutation_hops/2_hops/acc,none/static:4"] > 0.5
    assert right["permutation_hops/2_hops/acc,none/static:1"] < 0.2


def test_loops_of_one_layer_add_to_arithmetic(tmp_path: Path):
    """A third of physics_small's; guessing is right in 20 % of cases."""
    flags = shorter(2_500_000, warmup=200_000)
    once = trained(tmp_path, "physics_small", "mano_1x1", *flags)["mano/acc,none/static:1"]
    looped = trained(tmp_path, "physics_small", "mano_1x4", *flags)["mano/acc,none/static:4"]
    assert looped > once + 0.1


def test_a_layer_that_loops_as_often_as_it_decides_adds_to_arithmetic_and_loses_no_facts(
    tmp_path: Path,
):
    """Three quarters of adaptive_small, whose exam is larger here."""
    flags = [*shorter(3_072_000, warmup=204_800), "--suite.questions", "1000"]
    plain = trained(tmp_path, "adaptive_small", "plain", *flags)
    loops = trained(tmp_path, "adaptive_small", "loop3", *flags)
    right, bits = (f"mano_capo/{key}/static:1" for key in ("mano/acc,none", "knowledge/bits"))
    assert loops[right] > plain[right] + 0.05
    assert loops[bits] > 0.95 * plain[bits]
