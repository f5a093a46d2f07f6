#!/usr/bin/env bash
# torch 2.13.0: `torch.distributed.pipelining.pipeline` unties a block that is visited several times if a split falls between
# its visits, without a warning: the first visit of each stage gets parameters of its own, also where a stage has two
# visits, so that they get different gradients and part at the first update. `replicated_params` of the result lists the
# first visit of the second stage as a copy of the first stage's, says nothing of the visits within a stage, and nothing
# adds their gradients up. With four visits and a split after the second, the second step's loss is another one than the
# model's; with a split after the last visit all losses are equal.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install torch==2.13.0
"${pip[@]}" install numpy==2.4.6
cat >"$folder/try.py" <<'PYTHON'
import copy

import torch
from torch.distributed.pipelining import pipe_split, pipeline
from torch.nn import Linear, Module


class Looped(Module):
    """Four visits of one block; the pipeline is split before visit `split`, counted from 0."""

    def __init__(self, split=None):
        super().__init__()
        self.block, self.head, self.split = Linear(16, 16), Linear(16, 16), split

    def forward(self, state):
        for visit in range(5):
            if visit == self.split:
                pipe_split()
            if visit < 4:
                state = state + torch.tanh(self.block(state))
        return self.head(state)


def losses(parameters, forward):
    """Return the losses of three steps of gradient descent."""
    optimizer, found = torch.optim.SGD(parameters, lr=0.1), []
    for _ in range(3):
        loss = (forward(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


print("torch", torch.__version__.partition("+")[0])
torch.manual_seed(0)
inputs, targets = torch.randn(4, 16), torch.randn(4, 16)
model = Looped()
starts = copy.deepcopy(model.state_dict())
expected = losses(model.parameters(), model)
print("the model:", [f"{loss:.4f}" for loss in expected])
for split in (4, 2):
    whole = Looped(split)
    whole.load_state_dict(starts)
    stages = [pipe.get_stage_module(stage) for pipe in [pipeline(whole, mb_args=(inputs,))] for stage in range(2)]
    found = losses({id(p): p for stage in stages for p in stage.parameters()}.values(), lambda x: stages[1](stages[0](x)))
    weights = [[n for n, _ in stage.named_parameters() if n.startswith("block") and n.endswith("weight")] for stage in stages]
    print(f"split before visit {split}: {[f'{loss:.4f}' for loss in found]}, weights of the block by stage: {weights}")
    assert found[0] == expected[0] and (found == expected) == (split == 4), "it has changed"
    assert len(weights[0]) == (1 if split == 4 else 2), "it has changed"
first, second = (dict(stages[0].named_parameters())[name] for name in weights[0])
apart = (first - second).abs().max().item()
print(f"after three steps the first stage's two weights are {apart:.4f} apart")
assert apart > 0.01, "it has changed"
PYTHON
cd "$folder"
HOME="$folder" "$folder/venv/bin/python" try.py 2>log || { tail -n 20 log; exit 1; }
# Output on 2026-12-01:
# torch 2.13.0
# the model: ['3.3728', '1.0602', '0.6016']
# split before visit 4: ['3.3728', '1.0602', '0.6016'], weights of the block by stage: [['block.weight'], []]
# split before visit 2: ['3.3728', '0.9414', '0.6602'], weights of the block by stage: [['block.weight', 'block@1.weight'], ['block@2.weight', 'block@3.weight']]
# after three steps the first stage's two weights are 0.0697 apart
