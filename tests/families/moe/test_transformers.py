"""Exported mixtures in transformers: logits of every format, and tokens through its cache."""

from typing import Any

import pytest
import torch

from tests.families.moe.conftest import MakeMoE
from tests.families.ouro.hugging_face.conftest import convert
from tests.support.llama_runs import CLOSE, TOKENS, ours

SPLIT = {"n_layers": 4, "prelude_layers": 1, "coda_layers": 1, "recurrent_steps": 3}
SOFTMAX = {"router": "softmax", "rope_theta": 500.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral-unrolled", {**SPLIT, **SOFTMAX, "routers": 2, "bias": 0.0}),
    "glm": ("glm4_moe-unrolled", {**SPLIT, "routers": 2, "dense_layers": (1,), "score_scale": 2.5}),
    "glm-raw": (
        "glm4_moe-unrolled",
        {"attentions": 2, "normalise_scores": False, "shared_experts": 2, "top_k": 1},
    ),
    "glm-deep": ("glm4_moe-unrolled", {"n_layers": 1, "recurrent_steps": 48}),
    "ernie": (
        "ernie4_5_moe-unrolled",
        {**SPLIT, **SOFTMAX, "dense_layers": (1, 4), "routers": 3, "shared_experts": 1, "top_k": 3},
    ),
}


@pytest.fixture(scope="module", params=CASES)
def exported(request, make_moe: MakeMoE, tmp_path_factory, ascii_tokenizer):
    """Return a model and the folder that it was exported to."""
    to, options = CASES[request.param]
    made = make_moe(**options)
    folder = tmp_path_factory.mktemp("exported") / "model"
    convert("export", made.run, "--to", to, "--output", folder, "--tokenizer", ascii_tokenizer)
    return made.model, folder


def load(transformers, folder):
    """Return the model, every tensor of which must come from the folder."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def test_logits_and_greedy_tokens(transformers, exported):
    model, folder = exported
    theirs = load(transformers, folder)
    with torch.no_grad():
        logits = theirs(TOKENS).logits
    torch.testing.assert_close(logits, ours(model), atol=CLOSE, rtol=0)
    ids = TOKENS[:, 1:7]  # token 0 is padding there
    found = theirs.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
    for _ in range(8):
        ids = torch.cat([ids, ours(model, ids)[:, -1:].argmax(-1)], dim=1)
    assert found.tolist() == ids.tolist()
