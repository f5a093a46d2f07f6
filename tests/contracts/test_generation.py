"""For every family: cached generation equals full passes, with hooks, too."""

import pytest

from tests.contracts.families import cases, random_model
from tests.inference.generation import check_generation
from tests.inference.reference import CONTEXT
from titan_loop.inference.hooks import Hooks


@pytest.mark.parametrize("name", cases("generated"))
def test_cached_generation_equals_full_passes(name):
    options, leaves, steps = cases("generated")[name]
    check_generation(random_model(options, CONTEXT), steps=steps, leaves=leaves)


# One case of every fourth folder.
@pytest.mark.parametrize(
    "name", [*{name.split("/")[0]: name for name in cases("generated")}.values()][::4]
)
def test_generation_with_hooks_equals_full_passes_with_them(name):
    """Rows at other steps of one call of the stack are left alone, drafts are changed, too."""
    options, leaves, steps = cases("generated")[name]
    model = random_model(options, CONTEXT)
    sites = [("loop.2.blocks.*.hook_resid_post", lambda state, hook: state + state.roll(1, -1) / 9)]
    with Hooks(model, sites):
        check_generation(model, steps=steps, leaves=leaves)
