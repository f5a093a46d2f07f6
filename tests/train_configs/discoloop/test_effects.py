"""A loop that reads what it decoded composes facts anew; tables are in README.md."""

import pytest

from tests.effects.short_runs import SEEDS, trained

pytestmark = pytest.mark.effects


@pytest.mark.parametrize(("arm", "least", "most"), [("discoloop", 0.15, 1.0), ("plain", 0.0, 0.1)])
def test_a_decoded_channel_composes_facts_that_training_never_combined(tmp_path, arm, least, most):
    """A third of two_hop_small; guessing is right in 2.5 % of cases."""
    tokens = str(1_500 * 256 * 3)
    flags = [*SEEDS, "--total-tokens", tokens, "--suite.interval", "1500"]
    right = trained(tmp_path, "two_hop_small", arm, *flags)
    assert right["two_graph/id_2/acc,none/static:2"] > 0.9
    assert least < right["two_graph/ood_2/acc,none/static:2"] < most
