#!/usr/bin/env bash
# peft 0.21.2: `adapter_names=[…]` gives each row of a batch its own adapter, or "__base__" for none. Of the adapters
# below LoRA, RoAd and GLoRA do so. LoKr, LoHa, OFT, HRA, IA³, VeRA, MiSS and ShiRA accept the
# argument, too, and `PeftModel.forward` drops it without a word: every row gets the adapter that is active, even the rows
# that asked for the base model, and even a name that does not exist is taken. DoRA, by contrast, refuses the argument.
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
from peft import get_peft_model
from torch import nn


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)))


torch.manual_seed(0)
base, x = Base().eval(), torch.randn(3, 16)


def shake(model):
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.3 * torch.randn_like(parameter))


@torch.no_grad()
def check(name, **options):
    def config():
        return getattr(peft, f"{name}Config")(target_modules=["inner"], **options)

    model = get_peft_model(copy.deepcopy(base), config()).eval()
    shake(model)
    model.add_adapter("other", config())
    model.set_adapter("other")
    shake(model)
    others = model(x)
    model.set_adapter("default")
    defaults = model(x)
    wanted = torch.stack([base(x)[0], defaults[1], others[2]])
    assert min(float((a - b).abs().max()) for a, b in ((wanted[0], defaults[0]), (wanted[2], defaults[2]))) > 1e-3
    found = model(x, adapter_names=["__base__", "default", "other"])
    try:
        misspelt = "takes" if model(x, adapter_names=["unknown"] * 3).isfinite().all() else "?"
    except ValueError:
        misspelt = "refuses"
    heeded, dropped = (bool(torch.allclose(found, rows, atol=1e-5)) for rows in (wanted, defaults))
    print(f"{name}: {'heeds' if heeded else 'drops' if dropped else '?'} the names, {misspelt} one that does not exist")
    return heeded, dropped, misspelt


print("peft", peft.__version__)
for name, options in (("Lora", {"r": 4}), ("Road", {"group_size": 4}), ("Glora", {})):
    assert check(name, **options) == (True, False, "refuses"), "it has changed"
for name, options in (
    ("LoKr", {"r": 4}),
    ("LoHa", {"r": 4}),
    ("OFT", {"oft_block_size": 4}),
    ("HRA", {"r": 4}),
    ("IA3", {"feedforward_modules": []}),
    ("Vera", {"r": 4}),
    ("Miss", {"r": 4}),
    ("Shira", {"r": 4}),
):
    assert check(name, **options) == (False, True, "takes"), "it has changed"
PYTHON
cd "$folder"
"$folder/venv/bin/python" try.py 2>log || { tail -n 20 log; exit 1; }
# Output on 2026-12-01:
# peft 0.21.2
# Lora: heeds the names, refuses one that does not exist
# Road: heeds the names, refuses one that does not exist
# Glora: heeds the names, refuses one that does not exist
# LoKr: drops the names, takes one that does not exist
# LoHa: drops the names, takes one that does not exist
# OFT: drops the names, takes one that does not exist
# HRA: drops the names, takes one that does not exist
# IA3: drops the names, takes one that does not exist
# Vera: drops the names, takes one that does not exist
# Miss: drops the names, takes one that does not exist
# Shira: drops the names, takes one that does not exist
