"""The Nanbeige folder's own code in transformers: logits, caches, attention functions."""

import pytest
import torch

from tests.contracts.folders import opened
from tests.families.ouro.hugging_face.conftest import convert
from tests.support.llama_runs import CLOSE, TOKENS, VOCABULARY, ours


@pytest.mark.parametrize("kind", ["Llama", "Mistral"])
def test_a_folder_that_transformers_wrote_is_imported(transformers, tmp_path, kind):
    window = {"sliding_window": None} if kind == "Mistral" else {}
    config = getattr(transformers, f"{kind}Config")(
        **window,
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    theirs.save_pretrained(tmp_path / "llama")
    convert("import", tmp_path / "llama", "--output", tmp_path / "run")
    model = opened(tmp_path / "run")
    with torch.no_grad():
        want = theirs(TOKENS).logits
    torch.testing.assert_close(ours(model), want, atol=CLOSE, rtol=0)
    out = tmp_path / "out"
    convert("export", tmp_path / "run", "--to", "llama-unrolled", "--output", out, "--no-tokenizer")
    again = transformers.LlamaForCausalLM.from_pretrained(out).state_dict()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again[name], tensor), name
