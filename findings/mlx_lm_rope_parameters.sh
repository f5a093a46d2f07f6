#!/usr/bin/env bash
# mlx-lm 0.32.2 (mlx for CPUs) beside transformers 5.24.0, which saves the base of rotations in
# `rope_parameters` alone: of a Llama, Mistral, Qwen 2, OLMo 2, Phi-3, SmolLM3 or Gemma 2 folder that it has
# saved, mlx-lm takes its own default base without a warning, and logits differ by more than their spread.
# Qwen 3 is read rightly. A top-level `rope_theta` beside it, which transformers still reads, cures it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install torch==2.13.0
"${pip[@]}" install 'mlx[cpu]==0.32.4' mlx-lm==0.32.2 transformers==5.24.0
cat >"$folder/try.py" <<'PYTHON'
import json
from pathlib import Path

import mlx.core as mx
import torch
from mlx_lm.utils import load_model
from transformers import AutoConfig, AutoModelForCausalLM

IDS = [number * 7 % 90 + 3 for number in range(24)]
BASE = 500_000.0  # Llama 3's
SHAPE = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "rope_theta": BASE,
}
OWN = {"gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16}}


def error(place, theirs):
    """Largest difference of logits, in their spread."""
    loaded = load_model(place)
    logits = (loaded[0] if isinstance(loaded, tuple) else loaded)(mx.array([IDS]))
    return float((torch.tensor(logits[0].tolist()) - theirs).abs().max() / theirs.std())


for kind in ("llama", "mistral", "qwen2", "olmo2", "phi3", "smollm3", "gemma2", "qwen3"):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SHAPE, **OWN.get(kind, {}))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
        theirs = model(torch.tensor([IDS])).logits[0]
    place = Path(kind)
    model.save_pretrained(place)
    saved = json.loads((place / "config.json").read_text())
    assert saved["rope_parameters"]["rope_theta"] == BASE and "rope_theta" not in saved
    as_saved = error(place, theirs)
    (place / "config.json").write_text(json.dumps({**saved, "rope_theta": BASE}))
    cured = error(place, theirs)
    print(f"{kind}: {as_saved:.1e} as saved, {cured:.1e} with a top-level rope_theta")
    assert (as_saved > 0.5) == (kind != "qwen3") and cured < 1e-3, "it has changed"
PYTHON
cd "$folder" && HF_HUB_OFFLINE=1 "$folder/venv/bin/python" try.py 2>log || { tail -n 20 log; exit 1; }
