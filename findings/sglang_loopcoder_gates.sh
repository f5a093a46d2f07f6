#!/usr/bin/env bash
# SGLang 0.5.23, IQuest-LoopCoder: its loader takes none of the gates that mix the two loops, under the names that
# released folders and vLLM have (model.gate_projections.N.weight) or without their prefix, and says nothing: every
# gate keeps its initial values. Its own code loads here; the kernels that it imports are stood in for.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install torch==2.13.0 numpy==2.4.6
"${pip[@]}" install transformers==5.24.0
"${pip[@]}" install --no-deps sglang==0.5.23
cat >"$folder/try.py" <<'PYTHON'
import importlib.machinery
import importlib.util
import site
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import torch
from torch import nn


class Stand(ModuleType):
    """A module of kernels that is never called while weights are loaded."""

    __path__: list[str] = []

    def __getattr__(self, name):
        return type(name, (nn.Module,), {}) if name[0].isupper() else MagicMock()


class Finder:
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name.startswith("sglang.") else None

    def create_module(self, spec):
        return Stand(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Finder())
sys.modules["sglang"] = Stand("sglang")
file = Path(site.getsitepackages()[0], "sglang/srt/models/iquest_loopcoder.py")
spec = importlib.util.spec_from_file_location("loopcoder", file)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)


def default(parameter, loaded):
    parameter.data.copy_(loaded)


module.default_weight_loader = default
HEADS, WIDTH = 2, 8
model = nn.Module()  # the parameters that its own classes name so
model.model = nn.Module()
gate = nn.Module()
gate.gate_proj = nn.Linear(WIDTH, HEADS)
model.model.gate_projections = nn.ModuleList([gate])
model.model.norm = nn.Linear(WIDTH, 1)
for prefix in ("model.", ""):
    nn.init.zeros_(gate.gate_proj.weight)
    nn.init.zeros_(gate.gate_proj.bias)
    stored = [
        (f"{prefix}gate_projections.0.weight", torch.ones(HEADS, WIDTH)),
        (f"{prefix}gate_projections.0.bias", torch.ones(HEADS)),
        ("model.norm.weight", torch.ones(1, WIDTH)),
    ]
    module.IQuestLoopCoderForCausalLM.load_weights(model, stored)
    assert float(model.model.norm.weight.sum()) == WIDTH, "it has changed"
    kept = float(gate.gate_proj.weight.abs().sum() + gate.gate_proj.bias.abs().sum())
    print(f"{stored[0][0]}: the norm beside it is loaded, the gate's weights add up to {kept:.0f}")
    assert kept == 0, "it has changed"
PYTHON
cd "$folder" && "$folder/venv/bin/python" try.py 2>log || { tail -n 20 log; exit 1; }
