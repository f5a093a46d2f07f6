#!/usr/bin/env bash
# onnxruntime 1.32.0: `quantize_dynamic` takes ONNX's own `Attention` (opset 23) for the contrib operator of that
# name and writes a `QAttention` that no session loads; and of a `Loop` it quantises nothing unless `EnableSubgraph`
# is given, without a word. With `op_types_to_quantize=["MatMul"]` and that option the file loads and is smaller.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check install \
    onnxruntime==1.32.0 onnx==1.23.2
cat >"$folder/try.py" <<'PYTHON'
import os

import numpy as np
import onnx
from onnx import TensorProto, checker, helper, numpy_helper
from onnxruntime import InferenceSession
from onnxruntime.quantization import quantize_dynamic

WIDTH, STATE = 64, [1, 5, 64]
FLOAT = TensorProto.FLOAT


def block(x, y):
    """y = x + attention of x W, with one matrix for queries, keys and values."""
    weight = np.random.default_rng(0).normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8
    nodes = [
        helper.make_node("MatMul", [x, "weight"], ["joint"]),
        helper.make_node("Attention", ["joint"] * 3, ["seen"], q_num_heads=2, kv_num_heads=2),
        helper.make_node("Add", [x, "seen"], [y]),
    ]
    return nodes, [numpy_helper.from_array(weight, "weight")]


def save(path, graph):
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    checker.check_model(model, full_check=True)
    onnx.save(model, path)


def value(name, kind=FLOAT, dims=STATE):
    return helper.make_tensor_value_info(name, kind, dims)


nodes, weights = block("x", "y")
save("plain.onnx", helper.make_graph(nodes, "plain", [value("x")], [value("y")], weights))

nodes, weights = block("state", "next")
scalar = (TensorProto.INT64, []), (TensorProto.BOOL, [])
nodes.append(helper.make_node("Identity", ["going"], ["still"]))
inputs = [value("step", *scalar[0]), value("going", *scalar[1]), value("state")]
body = helper.make_graph(nodes, "body", inputs, [value("still", *scalar[1]), value("next")], weights)
loop = helper.make_node("Loop", ["steps", "", "x"], ["y"], body=body)
inputs = [value("x"), value("steps", *scalar[0])]
save("looped.onnx", helper.make_graph([loop], "looped", inputs, [value("y")]))

x = np.random.default_rng(1).normal(size=STATE).astype(np.float32)


def quantised(file, **options):
    """Return the size over the original's, and outputs beside the original's or the error's end."""
    quantize_dynamic(f"{file}.onnx", "small.onnx", **options)
    size = os.path.getsize("small.onnx") / os.path.getsize(f"{file}.onnx")
    feeds = {"x": x, **({"steps": np.array(3)} if file == "looped" else {})}
    (wanted,) = InferenceSession(f"{file}.onnx").run(None, feeds)
    try:
        (found,) = InferenceSession("small.onnx").run(None, feeds)
    except Exception as error:
        return size, " ".join(str(error).split())[-60:]
    return size, float(np.abs(found - wanted).max() / np.abs(wanted).max())


matrices, inside = {"op_types_to_quantize": ["MatMul"]}, {"extra_options": {"EnableSubgraph": True}}
size, plain = quantised("plain")
print(f"a layer with Attention: does not load: {plain}")
assert isinstance(plain, str) and "QAttention" in plain, "it has changed"
size, error = quantised("plain", **matrices)
print(f"its MatMul alone: {size:.2f} of the size, error {error:.3f}")
assert size < 0.5 and 0 < error < 0.05, "it has changed"
size, error = quantised("looped")
print(f"three times in a Loop: {size:.2f} of the size, error {error:.3f}")
assert size > 0.9 and error == 0, "it has changed"
size, error = quantised("looped", **matrices, **inside)
print(f"its MatMul, with EnableSubgraph: {size:.2f} of the size, error {error:.3f}")
assert size < 0.5 and 0 < error < 0.1, "it has changed"
PYTHON
cd "$folder" && "$folder/venv/bin/python" try.py 2>log || { tail -n 20 log; exit 1; }
