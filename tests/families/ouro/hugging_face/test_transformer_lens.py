"""An exported folder in TransformerLens, which replaces embedding, norms, attention and MLPs."""

import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import titan_loop
from tests.families.ouro.hugging_face.conftest import VOCABULARY, Exported

pytestmark = pytest.mark.hf5  # its environment has TransformerLens beside transformers
# TransformerLens computes attention itself, in another order: 2e-6 on logits of size 10.
CLOSE = 5e-5
TOKENS = torch.arange(40).view(2, 20) * 7 % VOCABULARY


def booted(request: pytest.FixtureRequest, name: str) -> tuple[Any, Exported]:
    """Return a folder in TransformerLens, and the model in it."""
    bridges = pytest.importorskip("transformer_lens.model_bridge", reason="see tools/test_hf.sh")
    exported = request.getfixturevalue(name)
    folder = str(exported.folder)
    boot = bridges.TransformerBridge.boot_transformers
    return boot(folder, trust_remote_code=True, device="cpu"), exported


@pytest.mark.parametrize("name", ["plain", "grouped"])
@torch.no_grad()
def test_it_boots_and_its_hooks_see_every_visit(request, name):
    """Its adapter wants `rotary_emb`, and attention that is called as transformers calls it."""
    bridge, exported = booted(request, name)
    states_RBLD = torch.stack(exported.model(TOKENS).hidden_RBLD)
    want = exported.model.readout(states_RBLD[-1])
    torch.testing.assert_close(bridge(TOKENS), want, atol=CLOSE, rtol=0)

    seen, normed = Counter(), []
    points = [
        f"blocks.{layer}.{point}"
        for layer in range(2)
        for point in ("hook_out", "attn.hook_pattern", "attn.hook_rot_q", "mlp.hook_out")
    ]
    hooks = [(point, lambda _, hook: seen.update([hook.name])) for point in points]
    hooks.append(("ln_final.hook_out", lambda state, hook: normed.append(state)))
    bridge.run_with_hooks(TOKENS, fwd_hooks=hooks)
    steps = exported.model.recurrent_steps
    assert seen == dict.fromkeys(points, steps)
    torch.testing.assert_close(torch.stack(normed), states_RBLD, atol=CLOSE, rtol=0)

    # Every visit has its own slot in the cache.
    texts = [
        bridge.generate(
            TOKENS[:, :6],
            max_new_tokens=8, do_sample=False, stop_at_eos=False, use_past_kv_cache=cached,
            return_type="tokens", verbose=False,
        ).tolist()
        for cached in (True, False)
    ]  # fmt: skip
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["plain", "grouped"])
@torch.no_grad()
def test_its_names_are_ours_without_the_step_and_its_cache_holds_the_last(request, name):
    """They fire R times, in the order of the steps; only our names say which step it is."""
    bridge, exported = booted(request, name)
    steps = exported.model.recurrent_steps
    _, ours = titan_loop.load(exported.folder).run_with_cache(TOKENS)
    names = {re.sub(r"^loop\.\d+\.", "", each) for each in ours} - {"exit_gate.hook_out"}
    visits: dict[str, list[Tensor]] = {each: [] for each in names}
    hooks = [(each, lambda x, hook, to=to: to.append(x)) for each, to in visits.items()]
    bridge.run_with_hooks(TOKENS, fwd_hooks=hooks)
    _, cache = bridge.run_with_cache(TOKENS)
    assert len(visits.pop("hook_embed")) == 1
    for each, seen in visits.items():
        assert len(seen) == steps
        for step, theirs in enumerate(seen, start=1):
            own = ours[f"loop.{step}.{each}"]
            torch.testing.assert_close(theirs.reshape(own.shape), own, atol=CLOSE, rtol=0)
        assert torch.equal(cache[each], seen[-1])
        assert not torch.equal(seen[0], seen[-1])
