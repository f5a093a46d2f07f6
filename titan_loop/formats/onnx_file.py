"""A folder with one ONNX file, for onnxruntime on any machine and in browsers.

checkpoint ─► OnnxShape ─► LoopGraph (`onnx_loop.py`) ─► model.onnx, config.json, tokenizer
"""

from collections.abc import Mapping
from functools import partial
from importlib import resources
from math import prod
from pathlib import Path
from shutil import copyfile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import titan_loop
from titan_loop.errors import UserError
from titan_loop.formats.format import Export, Format
from titan_loop.formats.llama_shape import EMBEDDING, LlamaShape
from titan_loop.formats.onnx_shape import OnnxShape
from titan_loop.models.family import completed_architecture
from titan_loop.plugins import find, names
from titan_loop.storage.json_files import write_json
from titan_loop.storage.staged_folder import staged_folder

if TYPE_CHECKING:
    from onnx import ModelProto  # pyright: ignore[reportMissingImports]  the extra `onnx`

FILE, CODE, EXAMPLE = "model.onnx", "titan_loop.formats.onnx_folder", "generate.py"
_MOST_BYTES = 2**31 - 1
_BITS = {"float32": 32, "int8": 8, "int4": 4}
_BLOCK = 32
"""Number of weights of a matrix's row that share a scale, in fewer bits than 32."""


def write(export: Export, output: Path) -> None:
    """Write a folder: model, config, tokenizer, and a program that runs them."""
    shape = export.shape
    assert isinstance(shape, OnnxShape)
    model = build(export)
    with staged_folder(output) as folder:
        (folder / FILE).write_bytes(model.SerializeToString())
        if export.tokenizer is not None:
            export.tokenizer.write(folder, max_positions=shape.max_positions)
        with resources.as_file(resources.files(CODE) / EXAMPLE) as source:
            copyfile(source, folder / EXAMPLE)
        ends = () if export.tokenizer is None else export.tokenizer.end_ids
        write_json(folder / "config.json", {**shape.to_json(), "eos_token_ids": [*ends]})


def build(export: Export) -> "ModelProto":
    """Return the model, checked; `UserError` without the package onnx, or beyond 2 GiB."""
    shape = export.shape
    assert isinstance(shape, OnnxShape)
    bits = _BITS[export.dtype]
    _check_size(shape, export.dtype, bits)
    try:
        from titan_loop.formats.onnx_graph import Graph, checked
        from titan_loop.formats.onnx_loop import LoopGraph
    except ImportError as error:
        fix = "pip install 'titan-loop[onnx]'"
        raise UserError(f"--to=onnx needs the package onnx, which is missing; {fix}") from error
    graph = Graph(shape, partial(_read, export), bits, _BLOCK)
    return checked(LoopGraph(graph, shape).build(), titan_loop.__version__)


def _check_size(shape: OnnxShape, dtype: str, bits: int) -> None:
    names_ = ("n_heads * head_dim", "dim", "hidden_dim")
    widths = (shape.n_heads * shape.head_dim, shape.dim, shape.hidden_dim)
    for name, width in zip(names_, widths, strict=True):
        if bits < 32 and width % _BLOCK:
            problem = f"--dtype={dtype} needs a multiple of {_BLOCK} as model.{name}, not {width}"
            raise UserError(f"{problem}; use float32")
    bytes_ = 4 * shape.parameter_count()
    if bits < 32:  # with scales, and a tied matrix twice: as embedding, in 8 bits, and as head
        sizes = {**shape.tensor_shapes()}
        rows, width = sizes.pop(EMBEDDING)
        blocks = sum(prod(size) for size in sizes.values()) // _BLOCK
        bytes_ = rows * (width + 4) + blocks * (_BLOCK * bits // 8 + 4)
    if bytes_ > _MOST_BYTES:
        raise UserError(
            f"--to=onnx: a file holds at most 2 GiB, and this model has {bytes_ / 2**30:.1f} in "
            f"{dtype}; use a smaller type of {', '.join(_BITS)}, or a smaller model"
        )


def _read(export: Export, tensor: str) -> np.ndarray:
    return export.read(tensor).to(torch.float32).numpy()


def _fitting(architecture: Mapping[str, Any], **arguments: int) -> LlamaShape:
    family = completed_architecture(architecture)["family"]
    shapes = {
        shape.family: shape for name in names("formats") if (shape := find("formats", name).onnx)
    }
    if family not in shapes:
        raise UserError(
            f"model.family={family}: the onnx format holds models of {', '.join(sorted(shapes))}"
        )
    return shapes[family].from_architecture(architecture, **arguments)


ONNX = Format(
    summary="folder with one file for onnxruntime, also in browsers; R and exits at run time",
    shape=_fitting,
    write=write,
    dtypes=tuple(_BITS),
)
