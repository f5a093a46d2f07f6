#!/usr/bin/env bash
# transformers 5.24.0, Llama with SDPA and no attention mask: `position_ids` that restart keep packed documents apart only
# where no cache is made. A training step makes one by default (`config.use_cache`), so a token of the first document moves
# the logits of the second; with gradient checkpointing, which turns the cache off, it does not. The same batch then has
# two losses and two gradients, depending on a switch that should save memory alone. Positions that skip ahead within one
# document (as in PoSE) are read the same way: with checkpointing, what stands behind the skip no longer sees what stands
# before it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install torch==2.13.0
"${pip[@]}" install numpy==2.4.6 transformers==5.24.0
cat >"$folder/try.py" <<'PYTHON'
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=512,
)
model = LlamaForCausalLM(config).train()
assert config._attn_implementation == "sdpa"
ids, labels = torch.randint(1, 64, (2, 1, 16))
changed = ids.clone()
changed[0, 0] = (ids[0, 0] + 1) % 64
half = torch.arange(8)


def reach(position_ids):
    """How far a change of the first token moves the logits of the last eight."""
    a, b = (model(each, position_ids=position_ids).logits[:, 8:] for each in (ids, changed))
    return (a - b).abs().max().item()


print("transformers", transformers.__version__)
restarts, skips = torch.cat([half, half])[None], torch.cat([half, 200 + half])[None]
rows = {}
for checkpointing in (False, True):
    if checkpointing:
        model.gradient_checkpointing_enable()
    loss = model(ids, position_ids=restarts, labels=labels).loss.item()
    row = rows[checkpointing] = loss, reach(restarts), reach(skips)
    print(f"gradient checkpointing {checkpointing}: loss {row[0]:.6f},", end=" ")
    print(f"reach over a restart {row[1]:.4f}, over a skip {row[2]:.4f}")
assert rows[True][1:] == (0.0, 0.0) and min(rows[False][1:]) > 1e-3, "it has changed"
assert abs(rows[True][0] - rows[False][0]) > 1e-3, "it has changed"
PYTHON
cd "$folder" && "$folder/venv/bin/python" try.py 2>log || { tail -n 20 log; exit 1; }
# Output on 2026-11-30:
# transformers 5.24.0
# gradient checkpointing False: loss 4.186075, reach over a restart 0.0272, over a skip 0.0272
# gradient checkpointing True: loss 4.183516, reach over a restart 0.0000, over a skip 0.0000
