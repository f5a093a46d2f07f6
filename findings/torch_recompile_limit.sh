#!/usr/bin/env bash
# torch 2.13.0: `torch.compile(…, recompile_limit=1000)` takes the number and stops at 256 all the same:
# `torch._dynamo.config.accumulated_recompile_limit` is smaller, counts for every function, and neither
# the argument nor a warning says so until the 257th shape comes, hours into a run. With
# `fullgraph=True` that shape raises FailOnRecompileLimitHit; without, the function runs uncompiled.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check install torch==2.13.0
"$folder/venv/bin/python" - 2>/dev/null <<'PYTHON'
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit


def reached(**options):
    """Return the number of shapes that are compiled, of 300, and how the next one fails."""
    torch.compiler.reset()
    compiled = []

    def backend(graph, inputs):
        compiled.append(inputs[0].shape)
        return graph.forward

    function = torch.compile(lambda x: x + 1, backend=backend, dynamic=False, **options)
    try:
        for length in range(1, 301):
            function(torch.zeros(length))
    except FailOnRecompileLimitHit as error:
        return len(compiled), type(error).__name__
    return len(compiled), None


found = {
    "recompile_limit=100": reached(recompile_limit=100),
    "recompile_limit=1000": reached(recompile_limit=1000),
    "recompile_limit=1000, fullgraph=True": reached(recompile_limit=1000, fullgraph=True),
}
torch._dynamo.config.accumulated_recompile_limit = 1000
found["the same, accumulated_recompile_limit=1000"] = reached(recompile_limit=1000, fullgraph=True)
print("torch", torch.__version__.partition("+")[0])
for name, (shapes, failure) in found.items():
    print(f"{name}: {shapes} of 300 shapes compiled, then {failure or 'nothing raised'}")
assert [*found.values()] == [
    (100, None),
    (256, None),
    (256, "FailOnRecompileLimitHit"),
    (300, None),
], found
PYTHON
# Output on 2026-11-29:
# torch 2.13.0
# recompile_limit=100: 100 of 300 shapes compiled, then nothing raised
# recompile_limit=1000: 256 of 300 shapes compiled, then nothing raised
# recompile_limit=1000, fullgraph=True: 256 of 300 shapes compiled, then FailOnRecompileLimitHit
# the same, accumulated_recompile_limit=1000: 300 of 300 shapes compiled, then nothing raised
