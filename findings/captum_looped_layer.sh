#!/usr/bin/env bash
# captum 0.9.0: for a block that the model visits several times, `LayerActivation`, `LayerGradientXActivation` and
# `LayerConductance` answer for the last visit. `LayerIntegratedGradients` and `LayerFeatureAblation` read the last visit's
# value as well, but then their hook puts it in place of the block's output at *every* visit, so that their numbers belong
# to a model that does not exist: neither to one visit nor to the sum of all. No warning; `LRP`, and `DeepLift` where the
# block has an activation, refuse such modules. Compared with the same model written out with three copies of the block.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install torch==2.13.0
"${pip[@]}" install numpy==2.4.6 captum==0.9.0
cat >"$folder/try.py" <<'PYTHON'
import copy

import captum
import torch
from captum.attr import (
    LayerActivation,
    LayerConductance,
    LayerFeatureAblation,
    LayerGradientXActivation,
    LayerIntegratedGradients,
)
from torch import nn


class Looped(nn.Module):
    """Three visits of a residual block: one block, or a copy for each visit."""

    def __init__(self, inward, blocks, outward):
        super().__init__()
        self.inward, self.blocks, self.outward = inward, nn.ModuleList(blocks), outward

    def forward(self, x):
        state = self.inward(x)
        for visit in range(3):
            state = state + self.blocks[visit % len(self.blocks)](state)
        return self.outward(state)


torch.manual_seed(0)
block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
ends = nn.Linear(4, 8), nn.Linear(8, 2)
looped = Looped(ends[0], [block], ends[1]).double().eval()
unrolled = Looped(ends[0], [copy.deepcopy(block) for _ in range(3)], ends[1]).double().eval()
x = torch.randn(2, 4, dtype=torch.float64)
torch.testing.assert_close(looped(x), unrolled(x))

print("captum", captum.__version__)
for method, options, last_visit in (
    (LayerActivation, {}, True),
    (LayerGradientXActivation, {"target": 0}, True),
    (LayerConductance, {"target": 0, "n_steps": 200}, True),
    (LayerIntegratedGradients, {"target": 0, "n_steps": 200}, False),
    (LayerFeatureAblation, {"target": 0}, False),
):
    found = method(looped, looped.blocks[0]).attribute(x, **options).detach()
    visits = [method(unrolled, one).attribute(x, **options).detach() for one in unrolled.blocks]
    off = [float((found - visit).norm() / visit.norm()) for visit in (*visits, sum(visits))]
    print(f"{method.__name__}: off visit 1, 2, 3 and their sum by", *(f"{100 * part:.0f} %" for part in off))
    assert (off[2] < 1e-9) == last_visit and min(off[:2] + off[3:]) > 0.05, "it has changed"
    assert last_visit or off[2] > 0.05, "it has changed"
PYTHON
"$folder/venv/bin/python" "$folder/try.py" 2>"$folder/log" || { tail -n 20 "$folder/log"; exit 1; }
# Output on 2026-12-01:
# captum 0.9.0
# LayerActivation: off visit 1, 2, 3 and their sum by 85 % 46 % 0 % 74 %
# LayerGradientXActivation: off visit 1, 2, 3 and their sum by 166 % 55 % 0 % 56 %
# LayerConductance: off visit 1, 2, 3 and their sum by 175 % 97 % 0 % 56 %
# LayerIntegratedGradients: off visit 1, 2, 3 and their sum by 541 % 424 % 200 % 78 %
# LayerFeatureAblation: off visit 1, 2, 3 and their sum by 529 % 320 % 200 % 59 %
