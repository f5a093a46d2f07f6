#!/usr/bin/env bash
# torch 2.13.0: a kernel that `torch.library.Library` gave to an operation of aten outlives the library in
# compiled code. Registered for `_fused_rms_norm` on the CPU, used by one compiled function and taken back
# by deleting the library, it leaves eager `rms_norm` as before; but every `rms_norm` that is compiled
# afterwards in this process still dispatches as if the kernel were there: the forward pass runs, and the
# backward pass raises NotImplementedError, because its graph calls `_fused_rms_norm_backward`, which has
# no kernel on a CPU. What Python remembers of the operation (`_dispatch_cache`) is never cleared.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check install torch==2.13.0
"$folder/venv/bin/python" - 2>/dev/null <<'PYTHON'
import gc

import torch
import torch.nn.functional as F
from torch import Tensor


def gradient(*, compiled: bool) -> str:
    torch.compiler.reset()
    x = torch.ones(2, 64, requires_grad=True)
    weight = torch.ones(64, requires_grad=True)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (64,), weight, 1e-5)

    function = torch.compile(norm, backend="aot_eager") if compiled else norm
    try:
        function(x, weight).sum().backward()
    except NotImplementedError as error:
        return f"NotImplementedError: {str(error).partition(' with')[0]}"
    return "computed"


def kernel(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None):
    scale = (x.pow(2).mean(-1, keepdim=True) + (eps or 0.0)).rsqrt()
    return x * scale * weight, scale


def kernel_backward(gradient, x, shape, scale, weight, mask):
    return torch.zeros_like(x), torch.zeros_like(weight)


found = {}
library = torch.library.Library("aten", "IMPL")
library.impl("_fused_rms_norm", kernel, "CPU")
library.impl("_fused_rms_norm_backward", kernel_backward, "CPU")
found["with the library"] = gradient(compiled=True)
del library
gc.collect()
found["library deleted, eager"] = gradient(compiled=False)
found["library deleted, compiled"] = gradient(compiled=True)
for name in ("_fused_rms_norm", "_fused_rms_norm_backward"):
    getattr(torch.ops.aten, name).default._dispatch_cache.clear()
found["cache cleared, compiled"] = gradient(compiled=True)
print("torch", torch.__version__.partition("+")[0])
for name, outcome in found.items():
    print(f"{name}: {outcome}")
missing = "NotImplementedError: Could not run 'aten::_fused_rms_norm_backward'"
assert [*found.values()] == ["computed", "computed", missing, "computed"], found
PYTHON
# Output on 2026-11-30:
# torch 2.13.0
# with the library: computed
# library deleted, eager: computed
# library deleted, compiled: NotImplementedError: Could not run 'aten::_fused_rms_norm_backward'
# cache cleared, compiled: computed
