"""One law each, for every family: hooks, records, rehearsal, refusals."""

from dataclasses import asdict

import pytest
import torch

from tests.contracts.families import as_json, cases, contracts, random_model
from tests.planning.test_rehearsal import (  # noqa: F401
    as_before,
    assert_every_weight_is_reduced_once,
    stage,
)
from titan_loop.checkpoint.model import check_architecture
from titan_loop.errors import UserError
from titan_loop.inference.hooks import Hooks, hook_names
from titan_loop.interactive import LoopModel
from titan_loop.models.family import decoder_config, get_family, read_options
from titan_loop.plugins import names

OPTIONS = {
    name: [*{repr(each): each for each in contract.options()}.values()]
    for name, contract in contracts().items()
}
WINDOW = 16
"""No longer than any case's learned positions."""


def test_every_family_has_a_contract():
    told = {options.family for found in OPTIONS.values() for options in found}
    told |= {options.family for each in contracts().values() for options, _ in each.refused}
    ours = [
        name
        for name in names("families")
        if get_family(name).options.__module__.startswith("titan_loop")
    ]
    assert told >= {*ours}


@torch.no_grad()
@pytest.mark.parametrize("name", contracts())
def test_hooks_reach_every_site_and_idle_ones_change_no_bit(name):
    tokens = torch.arange(20).view(2, 10)
    for options in OPTIONS[name]:
        model = random_model(options, WINDOW)
        steps, seen = min(2, model.config.most_steps or 2), {}

        def keep(value, hook, seen=seen):
            seen[hook.name] = value
            return value.clone()

        want = model(tokens, recurrent_steps=steps)
        with Hooks(model, [("*", keep)]):
            got = model(tokens, recurrent_steps=steps)
        assert all(map(torch.equal, want.hidden_RBLD, got.hidden_RBLD))
        assert {*seen} == {*hook_names(model, steps)}
        states = LoopModel(model, steps, read_text=lambda: pytest.fail("no text")).states(tokens)
        assert torch.equal(states.hidden_RBLD, torch.stack(want.hidden_RBLD))
        last = f"loop.{steps}.blocks.{model.config.looped[-1]}.hook_resid_post"
        assert torch.equal(states.resid_RNBLD[-1, -1], seen[last])
        for site in {name for name in seen if name.startswith("loop.1.")}:
            with Hooks(model, [(site, lambda value, hook: value + value.roll(1, -1) / 9 + 0.1)]):
                got = model(tokens, recurrent_steps=steps)
            outputs = zip(
                want.hidden_RBLD + want.exit_logit_RBL,
                got.hidden_RBLD + got.exit_logit_RBL,
                strict=True,
            )
            assert not all(torch.equal(*pair) for pair in outputs), (options, site)


@pytest.mark.parametrize("name", cases("rehearsed"))
def test_a_rehearsed_stage_reduces_every_weight_once(name):
    config = stage()
    cases("rehearsed")[name](config)
    config.model.attention = "sdpa"
    assert_every_weight_is_reduced_once(config)


@pytest.mark.parametrize("name", contracts())
def test_a_record_is_the_model_again(name):
    """Options and record as a checkpoint's files keep them."""
    for options in OPTIONS[name]:
        record = decoder_config(options, max_seq_len=WINDOW).architecture
        again = read_options(as_json(asdict(options)))
        same = decoder_config(again, max_seq_len=WINDOW).architecture
        assert as_json(same) == as_json(record)
        check_architecture(as_json(record), record)


@pytest.mark.parametrize(
    "options",
    [each for contract in contracts().values() for each in contract.refused],
    ids=lambda refused: refused[1],
)
def test_options_that_make_no_model_are_one_line(options):
    refused, message = options
    with pytest.raises(UserError) as found:
        decoder_config(refused, max_seq_len=64)
    assert message in str(found.value)
    assert "\n" not in str(found.value)
