"""Nodes and weights of an ONNX graph, with standard operators alone."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_dtypes import int4  # pyright: ignore[reportMissingImports]  a requirement of onnx
from onnx import (  # pyright: ignore[reportMissingImports]  the extra `onnx`
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    checker,
    helper,
    numpy_helper,
)

from titan_loop.formats.dense import BlockShape

OPSET = 23
"""The first with `Attention`, `RMSNormalization` and `RotaryEmbedding`."""
_IR_VERSION = 11
"""Of that opset: older engines refuse files of a package's newest."""

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL

_TYPES = {bool: np.bool_, int: np.int64, float: np.float32}

Dims = Sequence[int | str]


class Carried(NamedTuple):
    """A value that a loop hands from step to step.

    Attributes:
        name: Its name in the body.
        start: Its value before the first step, in the graph around the loop.
        end: Its value after a step, in the body.
    """

    name: str
    kind: int
    dims: Dims
    start: str
    end: str


class Graph:
    """A graph, or the body of a loop or branch, which may read values of the graph around it.

    Weights are initialisers of the graph that uses them: as initialisers of the graph around a
    loop, quantised ones do not load in onnxruntime 1.32.

    Args:
        read: Returns a tensor, fp32, by the format's name.
        bits: Bits of a weight of a matrix: 32, 8 or 4.
        block: Number of a row's weights that share a scale.
    """

    def __init__(
        self,
        shape: BlockShape,
        read: Callable[[str], np.ndarray],
        bits: int,
        block: int,
        prefix: str = "",
    ) -> None:
        self.shape, self.read, self.prefix = shape, read, prefix
        self.bits, self.block = bits, block
        self._nodes: list[NodeProto] = []
        self._weights: dict[str, TensorProto] = {}

    def inner(self, name: str) -> "Graph":
        """Return an empty graph for a body."""
        prefix = f"{self.prefix}{name}."
        return Graph(self.shape, self.read, self.bits, self.block, prefix)

    def proto(
        self, inputs: Sequence[ValueInfoProto], outputs: Sequence[ValueInfoProto]
    ) -> GraphProto:
        """Return the whole graph."""
        name = self.prefix or "looped"
        return helper.make_graph(self._nodes, name, inputs, outputs, [*self._weights.values()])

    def many(
        self, kind: str, *inputs: str, outputs: int | Sequence[str], **attributes: Any
    ) -> list[str]:
        """Append a node with a number of outputs, or with named ones; return their names."""
        stem = f"{self.prefix}{kind}.{len(self._nodes)}"
        if isinstance(outputs, int):
            outputs = [f"{stem}.{index}" for index in range(outputs)]
        self._nodes.append(helper.make_node(kind, inputs, outputs, stem, **attributes))
        return [*outputs]

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Append a node of one output; return its name."""
        return self.many(kind, *inputs, outputs=1, **attributes)[0]

    def weight(self, name: str, array: np.ndarray) -> str:
        """Add an initialiser unless it is there; return its name."""
        name = f"{self.prefix}{name}"
        if name not in self._weights:
            self._weights[name] = numpy_helper.from_array(np.array(array, order="C"), name)
        return name

    def constant(self, value: bool | int | float | list[int]) -> str:
        """Return a scalar, or a list of whole numbers."""
        first = value[0] if isinstance(value, list) else value
        return self.weight(f"constant.{value!r}", np.array(value, _TYPES[type(first)]))

    def scaled(self, x: str, factor: float) -> str:
        """Return a multiple of a value."""
        return x if factor == 1 else self.add("Mul", x, self.constant(float(factor)))

    def matrix(self, name: str, weight_OI: np.ndarray) -> str:
        """Return a matrix as the right factor of a product, (in, out)."""
        if self.bits == 32:
            return self.weight(name, weight_OI.T)
        whole_IO, scale_GO = quantised(weight_OI.T, self.bits, self.block)
        stored_IO = whole_IO.astype(int4 if self.bits == 4 else np.int8)
        parts = self.weight(name, stored_IO), self.weight(f"{name}.scale", scale_GO)
        return self.add("DequantizeLinear", *parts, axis=0, block_size=self.block)

    def linear(self, x: str, *stems: str) -> str:
        """Apply projections side by side; outputs follow each other on the last axis."""
        name, rows = "+".join(stems), [self.read(f"{stem}.weight") for stem in stems]
        x = self.add("MatMul", x, self.matrix(name, np.concatenate(rows)))
        if f"{stems[0]}.bias" not in self.shape.tensor_shapes():
            return x
        biases = np.concatenate([self.read(f"{stem}.bias") for stem in stems])
        return self.add("Add", x, self.weight(f"{name}.bias", biases))

    def norm(self, x: str, stem: str) -> str:
        """Apply an RMSNorm over the last axis."""
        gain = self.weight(stem, self.read(f"{stem}.weight") + self.shape.block["norm_offset"])
        return self.add("RMSNormalization", x, gain, axis=-1, epsilon=self.shape.norm_eps)

    def size(self, x: str, axis: int) -> str:
        """Return a size as a scalar."""
        return self.add("Squeeze", self.add("Shape", x, start=axis, end=axis + 1))

    def loop(
        self,
        body: "Graph",
        steps: str,
        going: str,
        carried: list[Carried],
        scans: Mapping[str, Dims],
    ) -> list[str]:
        """Append a loop; return the carried values at its end, then the scans of all steps.

        Args:
            body: Its inputs are `PREFIX.step`, from 0, `PREFIX.going`, and the carried values.
            going: Value of the body: whether there is another step.
            scans: Values of the body that are stacked, and their sizes.
        """
        always = self.constant(True)
        inputs = [value(f"{body.prefix}step", INT64, []), value(f"{body.prefix}going", BOOL, [])]
        inputs += [value(each.name, each.kind, each.dims) for each in carried]
        outputs = [value(going, BOOL, [])]
        outputs += [value(each.end, each.kind, each.dims) for each in carried]
        outputs += [value(name, FLOAT, dims) for name, dims in scans.items()]
        starts = (each.start for each in carried)
        count = len(carried) + len(scans)
        proto = body.proto(inputs, outputs)
        return self.many("Loop", steps, always, *starts, outputs=count, body=proto)


def quantised(weight_IO: np.ndarray, bits: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return whole numbers, (I, O), and a scale for every `block` inputs, (I/block, O).

    A block's largest element becomes the most negative number, which has no opposite, as in ggml's
    Q4_0, so that no number stays unused.
    """
    most = 2 ** (bits - 1)
    block_GBO = weight_IO.reshape(-1, block, weight_IO.shape[1])
    largest_G1O = np.take_along_axis(block_GBO, np.abs(block_GBO).argmax(1)[:, None], 1)
    scale_G1O = np.where(largest_G1O == 0, 1, largest_G1O / -most)
    whole_GBO = np.rint(block_GBO / scale_G1O).clip(-most, most - 1)
    return whole_GBO.reshape(weight_IO.shape), scale_G1O[:, 0].astype(np.float32)


def value(name: str, kind: int, dims: Dims) -> ValueInfoProto:
    """Return the type of an input or output."""
    return helper.make_tensor_value_info(name, kind, dims)


def checked(graph: GraphProto, version: str) -> ModelProto:
    """Return a model, written by a version of this package, that onnx finds sound."""
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=_IR_VERSION,
        producer_name="titan_loop",
        producer_version=version,
    )
    checker.check_model(model, full_check=True)
    return model
