"""Layers that decide how often they loop learn arithmetic; tables are in README.md."""

import pytest

from tests.effects.short_runs import shorter, trained

pytestmark = pytest.mark.effects


def test_a_layer_that_loops_as_often_as_it_decides_adds_to_arithmetic_and_loses_no_facts(tmp_path):
    """Three quarters of adaptive_small, whose exam is larger here."""
    flags = [*shorter(3_072_000, warmup=204_800), "--suite.questions", "1000"]
    plain = trained(tmp_path, "adaptive_small", "plain", *flags)
    loops = trained(tmp_path, "adaptive_small", "loop3", *flags)
    right, bits = (f"mano_capo/{key}/static:1" for key in ("mano/acc,none", "knowledge/bits"))
    assert loops[right] > plain[right] + 0.05
    assert loops[bits] > 0.95 * plain[bits]
