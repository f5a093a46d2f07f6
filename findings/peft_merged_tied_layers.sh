#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.24.0: Zamba2 visits one block of shared weights at several depths, each a module of its
# own whose parameters are tied. LoRA gives every visit its own matrices, and `merge_and_unload` (with `safe_merge` or
# without) adds each visit's product to the one tensor that they share: with three visits the merged model has the sum of
# three adapters at every visit. No warning. The base model's logits are closer
# to the adapted model's than the merged model's are.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install torch==2.13.0
"${pip[@]}" install numpy==2.4.6 transformers==5.24.0 peft==0.21.2
cat >"$folder/try.py" <<'PYTHON'
import copy

import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import Zamba2Config, Zamba2ForCausalLM

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
config = Zamba2Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=6,
    layers_block_type=["mamba", "hybrid"] * 3,
    num_mem_blocks=1,  # one block, visited three times
    num_attention_heads=4,
    attention_hidden_size=64,
    mamba_ngroups=1,
    n_mamba_heads=4,
    mamba_d_state=8,
    adapter_rank=4,
    chunk_size=8,
    use_cache=False,
)
base = Zamba2ForCausalLM(config).eval()
visits = [base.model.layers[i].shared_transformer.self_attn.v_proj for i in (1, 3, 5)]
assert len({visit.weight.data_ptr() for visit in visits}) == 1
ids = torch.randint(1, 64, (2, 12))


def logits(model):
    with torch.no_grad():
        return model(ids).logits


def far(a, b):
    return (a - b).abs().max().item()


print("peft", peft.__version__, "transformers", transformers.__version__)
plain, shared = logits(base), visits[0].weight.detach().clone()
lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
adapted = get_peft_model(copy.deepcopy(base), lora)
deltas = [
    adapted.base_model.model.model.layers[i].shared_transformer.self_attn.v_proj.get_delta_weight("default")
    for i in (1, 3, 5)
]
right = logits(adapted)
merged = adapted.merge_and_unload(safe_merge=True)
weight = merged.model.layers[1].shared_transformer.self_attn.v_proj.weight
print("largest change of a logit by the adapter:", round(far(plain, right), 4))
print("largest change of a logit by merging it:", round(far(right, logits(merged)), 4))
sums = far(weight, shared + sum(deltas)) < 1e-6
print("the shared matrix grew by the sum of the three products:", sums)
assert sums and far(right, logits(merged)) > far(plain, right), "it has changed"
PYTHON
cd "$folder"
"$folder/venv/bin/python" try.py 2>log || { tail -n 20 log; exit 1; }
# Output on 2026-11-30:
# peft 0.21.2 transformers 5.24.0
# largest change of a logit by the adapter: 0.0075
# largest change of a logit by merging it: 0.0247
# the shared matrix grew by the sum of the three products: True
