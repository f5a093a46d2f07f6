#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.checkpoint: when `HuggingFaceStorageWriter(…, save_distributed=True,
# enable_consolidation=True)` joins the ranks' shards into a Hugging Face folder, each parameter or buffer without
# dimensions (a temperature, a scale) becomes 0 without a word; the shards beside it hold the right value. Both
# functions for joining later, `consolidate_safetensors_files` and `…_on_every_rank`, which torchtitan 0.3.0 calls for
# its last checkpoint, do the same. A tensor with one dimension of length 1 is kept, and so is a scalar without joining.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install torch==2.13.0
"${pip[@]}" install safetensors==0.8.0 numpy==2.4.6
cat >"$folder/try.py" <<'PYTHON'
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files,
    consolidate_safetensors_files_on_every_rank,
)


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.temperature = nn.Parameter(torch.tensor(scale))  # no dimension
        self.gate = nn.Parameter(torch.tensor([scale]))  # one of length 1

    def forward(self, x):
        return self.linear(x) * self.temperature + self.gate


torch.manual_seed(0)
model, x = Scaled(1.5), torch.randn(3, 4)
state = model.state_dict()
where = dict.fromkeys(state, 1)  # all in file 1


def save(folder, **options):
    writer = HuggingFaceStorageWriter(path=folder, fqn_to_index_mapping=where, **options)
    dcp.save(dict(state), storage_writer=writer)


save("one_rank")
save("shards", save_distributed=True)
save("joined", save_distributed=True, enable_consolidation=True)
for name, join in (
    ("joined_later", consolidate_safetensors_files),
    ("joined_by_ranks", consolidate_safetensors_files_on_every_rank),
):
    Path(name).mkdir()
    join("shards", name, fqn_to_index_mapping=where)

print("torch", torch.__version__.partition("+")[0])
for folder in ("one_rank", "shards", "joined/sharded", "joined", "joined_later", "joined_by_ranks"):
    (file,) = Path(folder).glob("*.safetensors")
    found = load_file(file)
    temperature, gate = found["temperature"], found["gate"]
    print(f"{folder}: temperature {temperature.tolist()}, gate {gate.tolist()}")
    assert temperature.shape == () and torch.equal(gate, state["gate"])
    assert torch.equal(found["linear.weight"], state["linear.weight"])
    lost = folder.startswith("joined") and folder != "joined/sharded"
    assert float(temperature) == (0.0 if lost else 1.5), "it has changed"

loaded = Scaled(7.0)
target = loaded.state_dict()
dcp.load(target, storage_reader=HuggingFaceStorageReader(path="joined"))
loaded.load_state_dict(target)
with torch.no_grad():
    same = torch.allclose(loaded(x), model(x))
    constant = torch.equal(loaded(x), model.gate.expand(3, 4))
print(f"the joined model: the same outputs: {same}; nothing but the gate left of them: {constant}")
assert constant and not same, "it has changed"
PYTHON
cd "$folder" && "$folder/venv/bin/python" try.py 2>log || { tail -n 20 log; exit 1; }
# Output on 2026-11-30:
# torch 2.13.0
# one_rank: temperature 1.5, gate [1.5]
# shards: temperature 1.5, gate [1.5]
# joined/sharded: temperature 1.5, gate [1.5]
# joined: temperature 0.0, gate [1.5]
# joined_later: temperature 0.0, gate [1.5]
# joined_by_ranks: temperature 0.0, gate [1.5]
# the joined model: the same outputs: False; nothing but the gate left of them: True
