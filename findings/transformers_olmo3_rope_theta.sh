#!/usr/bin/env bash
# transformers 5.24.0 beside 4.57.6: an OLMo 3 folder that version 4 saved names one base of its
# rotations, `rope_theta`, for layers of both kinds. Version 5 gives it to the layers with full
# attention alone; layers with a window rotate with the class' default, 500,000, without a warning. With
# any other base the same folder has other logits in the two versions.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 4.57.6 5.24.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/python" -m pip --quiet --disable-pip-version-check install \
        torch==2.13.0 "transformers==$version"
done
cat >"$folder/save.py" <<'PYTHON'
import sys

import torch
from transformers import Olmo3Config, Olmo3ForCausalLM

folder, base = sys.argv[1], float(sys.argv[2])
torch.manual_seed(0)
config = Olmo3Config(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    sliding_window=8, max_position_embeddings=512, rope_theta=base, initializer_range=0.2,
    pad_token_id=None, eos_token_id=1,
)
Olmo3ForCausalLM(config).save_pretrained(folder)
PYTHON
cat >"$folder/logits.py" <<'PYTHON'
import sys

import torch
import transformers

folder, output = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
with torch.no_grad():
    torch.save(model(torch.arange(100)[None] % 120).logits, output)
print(transformers.__version__, getattr(model.config, "rope_parameters", None) or model.config.rope_theta)
PYTHON
for base in 500000 1000000; do
    "$folder/4.57.6/bin/python" "$folder/save.py" "$folder/model-$base" $base
    for version in 4.57.6 5.24.0; do
        "$folder/$version/bin/python" "$folder/logits.py" "$folder/model-$base" "$folder/$version-$base.pt"
    done
done
"$folder/5.24.0/bin/python" - "$folder" <<'PYTHON'
import sys

import torch

differences = {}
for base in (500_000, 1_000_000):
    old, new = (torch.load(f"{sys.argv[1]}/{version}-{base}.pt") for version in ("4.57.6", "5.24.0"))
    differences[base] = float((old - new).abs().max())
    print(f"rope_theta {base}: logits differ by {differences[base]:.2e} (spread {float(old.std()):.2f})")
# Seen: 0.00e+00 for 500,000; 5.17e-01 (spread 1.58) for 1,000,000.
assert differences[500_000] < 1e-5
assert differences[1_000_000] > 1e-3
PYTHON
