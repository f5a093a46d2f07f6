#!/usr/bin/env bash
# mlx-lm 0.32.2 (mlx for CPUs) beside transformers 5.24.0: it has no sliding windows for Gemma 2, Mistral,
# Qwen 2 and Phi-3. A folder whose config.json has them loads without a warning, and from the first token behind
# the window on every layer sees all tokens: logits differ, up to the window they are equal.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install torch==2.13.0
"${pip[@]}" install 'mlx[cpu]==0.32.4' mlx-lm==0.32.2 transformers==5.24.0
cat >"$folder/try.py" <<'PYTHON'
from pathlib import Path

import mlx.core as mx
import torch
from mlx_lm.utils import load_model
from transformers import AutoConfig, AutoModelForCausalLM

WINDOW = 8
IDS = [number * 7 % 90 + 3 for number in range(24)]
SHAPE = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": WINDOW,
}
OWN = {
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "mistral": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 0, "rope_theta": 1e6},
    "phi3": {},
}
for kind, own in OWN.items():
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SHAPE, **own)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
        theirs = model(torch.tensor([IDS])).logits[0]
    place = Path(kind)
    model.save_pretrained(place)
    loaded = load_model(place)
    logits = (loaded[0] if isinstance(loaded, tuple) else loaded)(mx.array([IDS]))
    found = torch.tensor(logits[0].tolist())
    error = (found - theirs).abs().amax(-1)
    behind = float(error[WINDOW:].max())
    print(f"{kind}: {float(error[:WINDOW].max()):.1e} within the window, {behind:.1e} behind it")
    assert float(error[:WINDOW].max()) < 1e-3 and behind > 0.05, "it has changed"
PYTHON
cd "$folder" && HF_HUB_OFFLINE=1 "$folder/venv/bin/python" try.py 2>log || { tail -n 20 log; exit 1; }
