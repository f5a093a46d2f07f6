#!/usr/bin/env bash
# transformers 5.24.0: `truncate: false` of YaRN keeps the bounds of its ramp fractional. In
# `rope_parameters` with one object for each kind of layers (OLMo 3, Gemma 3) it has no effect: the
# function reads it at the top of that object of objects, where it never stands, so the frequencies are
# those of `truncate: true`. Flat `rope_parameters` (Qwen 3) with the same numbers obey it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check install \
    torch==2.13.0 transformers==5.24.0
"$folder/venv/bin/python" - <<'PYTHON'
from transformers import Olmo3Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SHAPE = {"hidden_size": 64, "num_attention_heads": 1, "head_dim": 64, "num_hidden_layers": 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 5e5}
found = {}
for truncate in (True, False):
    own = {**YARN, "truncate": truncate}
    window = {"rope_type": "default", "rope_theta": 5e5}
    nested = {"full_attention": dict(own), "sliding_attention": window}
    flat = Qwen3Config(**SHAPE, max_position_embeddings=2048, rope_parameters=dict(own))
    by_kind = Olmo3Config(**SHAPE, max_position_embeddings=2048, rope_parameters=nested)
    found["flat", truncate] = ROPE_INIT_FUNCTIONS["yarn"](flat)[0]
    found["by kind", truncate] = ROPE_INIT_FUNCTIONS["yarn"](by_kind, layer_type="full_attention")[0]
for (spelling, truncate), frequencies in found.items():
    print(spelling, truncate, [round(value, 5) for value in frequencies[8:12].tolist()])
# Seen: flat True 0.0188 0.0104 0.00552 0.00275, flat False 0.01852 0.01007 0.00521 0.00275; by kind
# both as flat True.
assert not found["flat", True].equal(found["flat", False])
assert found["by kind", True].equal(found["by kind", False])
PYTHON
