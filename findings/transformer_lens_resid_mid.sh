#!/usr/bin/env bash
# transformer-lens 4.3.0, TransformerBridge: `blocks.N.hook_resid_mid` is the input of the second norm.
# A value put there reaches the MLP alone: the state after the block is still built on the old one, so
# patching or ablating the middle of a block does half of what the name says, without a warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() {
    "$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check install "$@"
}
pip torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 datasets==4.7.0 einops==0.8.2 jaxtyping==0.3.11 rich==15.0.0
pip --no-deps transformer-lens==4.3.0 # it asks for a package that it does not import
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder/model" <<'PYTHON'
import sys

import torch
from tokenizers import Tokenizer, models
from transformer_lens.model_bridge import TransformerBridge
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, initializer_range=0.2,
)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(64)}, unk_token="w0"))
special = {"bos_token": "w1", "eos_token": "w2", "unk_token": "w0", "pad_token": "w3"}
PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(sys.argv[1])
bridge = TransformerBridge.boot_transformers(sys.argv[1], device="cpu")

SITES = ("hook_resid_pre", "hook_attn_out", "hook_resid_mid", "hook_mlp_out", "hook_resid_post")


@torch.no_grad()
def with_zeros_at(site):
    seen = {}
    hooks = [(f"blocks.0.{site}", lambda value, hook: torch.zeros_like(value))]
    for name in SITES:
        hooks.append((f"blocks.0.{name}", lambda value, hook, name=name: seen.update({name: value})))
    bridge.run_with_hooks(torch.arange(10)[None], fwd_hooks=hooks)
    return seen


for site in ("hook_resid_pre", "hook_attn_out", "hook_resid_mid"):
    pre, attended, middle, fed, post = with_zeros_at(site).values()
    from_middle, from_before = (float((post - fed - old).norm()) for old in (middle, pre + attended))
    print(f"zeros at {site}: post - mlp_out is {from_middle:.3f} from resid_mid, ", end="")
    print(f"{from_before:.3f} from resid_pre + attn_out")
# Seen: 0.000 and 0.000 for the first two; for hook_resid_mid 13.253 and 0.000.
assert from_middle > 1
assert from_before < 1e-4
PYTHON
