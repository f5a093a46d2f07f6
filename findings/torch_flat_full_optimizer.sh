#!/usr/bin/env bash
# torch 2.13.0: an optimizer's state that `get_optimizer_state_dict` returns flat and gathered
# (`flatten_optimizer_state_dict`, the form of torchtitan's checkpoints, with `full_state_dict`) cannot
# be given back: `set_optimizer_state_dict` with the same options raises KeyError, even in one process.
# With either option alone the state comes back.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check install torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import itertools

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)


def trained(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


seen = {}
for flat, full in itertools.product((False, True), repeat=2):
    options = StateDictOptions(flatten_optimizer_state_dict=flat, full_state_dict=full)
    state = get_optimizer_state_dict(*trained(0), options=options)
    model, optimizer = trained(1)
    try:
        set_optimizer_state_dict(model, optimizer, state, options=options)
    except KeyError as error:
        seen[flat, full] = f"KeyError: {error}"
    else:
        moments = [each["exp_avg"] for each in optimizer.state.values()]
        wanted = [each["exp_avg"] for each in trained(0)[1].state.values()]
        seen[flat, full] = "same" if all(map(torch.equal, moments, wanted)) else "other"
    print(f"flat {flat}, full {full}: {seen[flat, full]}")
# Seen: same, same, same, KeyError: 'param_groups.0.params.0'.
assert [*seen.values()] == ["same"] * 3 + ["KeyError: 'param_groups.0.params.0'"]
PYTHON
