"""Attentions of each step's own: a loop of them is the unrolled model with copies of the rest."""

import re

import torch

from tests.families.moe.test_model import model_of

LAYERS, STEPS, ATTENTIONS, L = 2, 3, 2, 12
SPLIT = {"n_layers": LAYERS, "dense_layers": (2,), "experts": 4}
CLOSE = 2e-6  # fp32 sums of three contributions, near 0.1


def unrolled_names(name: str) -> list[str]:
    """Return the names that a parameter of the loop has in the unrolled model."""
    found = re.fullmatch(r"layers\.(\d)\.(attention\.)?(later\.0\.)?(.+)", name)
    if found is None:
        return [name]
    layer, attention, later, rest = found.groups()
    steps = [1, 2, 3]
    if attention:
        steps = [2, 3] if later else [1]  # the last one serves step 3, too
    return [f"layers.{(r - 1) * LAYERS + int(layer)}.{attention or ''}{rest}" for r in steps]


def test_a_loop_is_the_unrolled_model_with_tied_experts_and_untied_attention():
    looped = model_of(**SPLIT, attentions=ATTENTIONS)
    deep = model_of(n_layers=LAYERS * STEPS, experts=4, dense_layers=(2, 4, 6))
    state = looped.state_dict()
    copies = {copy: state[name] for name in state for copy in unrolled_names(name)}
    deep.load_state_dict(copies)
    tokens = torch.randint(128, (2, L), generator=torch.Generator().manual_seed(1))
    outputs = [
        model(tokens, recurrent_steps=steps, collect="last")
        for model, steps in ((looped, STEPS), (deep, 1))
    ]
    states = [output.hidden_RBLD[-1] for output in outputs]
    torch.testing.assert_close(*states, atol=0, rtol=0)
    cotangent = torch.randn_like(states[0])
    for hidden_BLD in states:
        (hidden_BLD * cotangent).mean().backward()
    wanted = dict(deep.named_parameters())
    for name, parameter in looped.named_parameters():
        if name == "lm_head.weight":
            continue
        grads = [wanted[copy].grad for copy in unrolled_names(name)]
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, sum(grads), atol=CLOSE, rtol=1e-4)
