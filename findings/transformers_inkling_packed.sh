#!/usr/bin/env bash
# transformers 5.24.0, Inkling-2's loops: documents that are packed into a row with positions that restart, which
# keeps them apart in Llama, leak through the short convolutions, without a warning. `seq_idx`, which tells them
# apart, is refused on a CPU.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install torch==2.13.0
"${pip[@]}" install transformers==5.24.0
cat >"$folder/try.py" <<'PYTHON'
import torch
from transformers import AutoConfig, AutoModelForCausalLM

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SHAPES = {
    "llama": {"vocab_size": 128, "intermediate_size": 96, "num_hidden_layers": 4, **HEADS},
    "inkling2_loop_text": {
        "vocab_size": 128, "unpadded_vocab_size": 128, "num_hidden_layers": 4, **HEADS,
        **{f"swa_{name}": size for name, size in HEADS.items()},
        "layer_types": ["hybrid_sliding", "hybrid"] * 2, "sliding_window_size": 64,
        "rel_extent": 64, "d_rel": 4, "moe_intermediate_size": 32, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1,
        "loop_layer_index_end": 3, "loop_num_passes": 2, "loop_gate_rank": 4,
    },
}
FIRST, SECOND = 13, 11
ids = torch.arange(FIRST + SECOND)[None] * 7 % 128
positions = torch.tensor([[*range(FIRST), *range(SECOND)]])
for kind, shape in SHAPES.items():
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, hidden_size=64, eos_token_id=None, **shape)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
        alone = model(ids[:, FIRST:], use_cache=False).logits
        packed = model(ids, position_ids=positions, use_cache=False).logits[:, FIRST:]
    error = float((packed - alone).abs().max() / alone.std())
    print(f"{kind}: the second document's logits differ by {error:.1e} of their spread")
    assert (error > 0.1) == (kind != "llama"), "it has changed"
documents = torch.tensor([[0] * FIRST + [1] * SECOND], dtype=torch.int32)
try:
    model(ids, position_ids=positions, seq_idx=documents, use_cache=False)
except ValueError as error:
    print(f"with seq_idx: {error}")
else:
    raise AssertionError("it has changed")
PYTHON
cd "$folder" && HF_HUB_OFFLINE=1 "$folder/venv/bin/python" try.py 2>log || { tail -n 20 log; exit 1; }
