"""An exported folder in TransformerLens, which replaces embedding, norms, attention and MLPs."""

from collections import Counter

import pytest
import torch

from tests.families.ouro.hugging_face.conftest import VOCABULARY

pytestmark = pytest.mark.hf5  # its environment has TransformerLens beside transformers
# TransformerLens computes attention itself, in another order: 2e-6 on logits of size 10.
CLOSE = 5e-5
TOKENS = torch.arange(40).view(2, 20) * 7 % VOCABULARY


@pytest.mark.parametrize("name", ["plain", "grouped"])
@torch.no_grad()
def test_it_boots_and_its_hooks_see_every_visit(request, name):
    """Its adapter wants `rotary_emb`, and attention that is called as transformers calls it."""
    bridges = pytest.importorskip("transformer_lens.model_bridge", reason="see tools/test_hf.sh")
    exported = request.getfixturevalue(name)
    bridge = bridges.TransformerBridge.boot_transformers(
        str(exported.folder), trust_remote_code=True, device="cpu"
    )
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
            max_new_tokens=8,
            do_sample=False,
            stop_at_eos=False,
            use_past_kv_cache=cached,
            return_type="tokens",
            verbose=False,
        ).tolist()
        for cached in (True, False)
    ]
    assert texts[0] == texts[1]
