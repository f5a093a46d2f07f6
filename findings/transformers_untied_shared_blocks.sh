#!/usr/bin/env bash
# transformers 5.24.0, Zamba2: `tie_word_embeddings=False` is said to be about the head, but it also unties
# the transformer block that the model visits several times. A new model with a head of its own has a block
# for each visit, and a folder read with it has its block in the first visit and random weights in the
# later ones, so other states below the head (a report names them as newly initialised). Llama's states
# do not change.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check install \
    torch==2.13.0 transformers==5.24.0
"$folder/venv/bin/python" - "$folder" 2>/dev/null <<'PYTHON'
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Zamba2Config, Zamba2ForCausalLM

shape = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
shape |= {"intermediate_size": 64, "initializer_range": 0.2, "tie_word_embeddings": True}
zamba = Zamba2Config(
    **shape, num_hidden_layers=6, layers_block_type=["mamba", "hybrid"] * 3, mamba_d_state=8,
    mamba_headdim=8, mamba_ngroups=1, n_mamba_heads=8, chunk_size=16, num_mem_blocks=1, adapter_rank=4,
)
llama = LlamaConfig(**shape, num_hidden_layers=2)


def blocks(model):
    found = [each.shared_transformer for each in model.model.layers if hasattr(each, "shared_transformer")]
    return len(found), len({each.self_attn.q_proj.weight.data_ptr() for each in found})


@torch.no_grad()
def states(model):
    return model.eval().model(torch.arange(12)[None], use_cache=False).last_hidden_state


for kind, config in ((Zamba2ForCausalLM, zamba), (LlamaForCausalLM, llama)):
    torch.manual_seed(0)
    whole = kind(config)
    whole.save_pretrained(sys.argv[1] + "/model")
    read = kind.from_pretrained(sys.argv[1] + "/model", tie_word_embeddings=False)
    apart = float((states(read) - states(whole)).abs().max())
    print(f"{kind.__name__}: visits and different blocks {blocks(whole)}, with a head of its own ", end="")
    print(f"{blocks(read)}; states below the head {apart:.2g} apart")
    # Seen: (3, 1), (3, 3) and 2.1 apart for Zamba2, nothing apart for Llama.
    if kind is LlamaForCausalLM:
        assert apart == 0
    else:
        assert (blocks(whole), blocks(read)) == ((3, 1), (3, 3))
        assert apart > 0.1
PYTHON
