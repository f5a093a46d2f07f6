"""The record of a format, and of a model that is written in one."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.errors import UserError, nearest
from titan_loop.formats.llama_shape import LlamaShape
from titan_loop.formats.tokenizer_export import TokenizerExport
from titan_loop.plugins import find, names


@dataclass(frozen=True, kw_only=True)
class Export:
    """A model to be written.

    Attributes:
        tokenizer: Its tokenizer; None to write none.
        max_shard_bytes: Largest number of tensor bytes in one safetensors file.
        trained_tokens: Tokens that the weights were trained on, in all stages.
    """

    reader: CheckpointReader
    shape: LlamaShape
    tokenizer: TokenizerExport | None
    dtype: str
    max_shard_bytes: int
    trained_tokens: int

    def read(self, tensor: str) -> Tensor:
        """Return a tensor by the format's name, in the checkpoint's dtype."""
        return self.shape.read(self.reader, tensor)


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format that other programs read; a `Plugin` registers it under its name.

    Attributes:
        summary: A line for `convert export --list`.
        shape: Returns a checkpoint's shape, called like `LlamaShape.from_architecture`;
            it raises `UserError` if the format cannot hold the model.
        folder: Shape class of folders that `convert import` reads; None if it reads none.
        gguf: Shape class for the family's GGUF files; None means `folder`.
        onnx: Shape class for the family's ONNX files; None says nothing about them.
        programs: Returns which programs run a model of this shape, where the summary does not say.
        tokenizer_problem: Returns why a tokenizer.json has no place in the format; None means that
            every tokenizer has.
    """

    summary: str
    shape: Callable[..., LlamaShape]
    write: Callable[[Export, Path], None]
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    folder: type[LlamaShape] | None = None
    gguf: type[LlamaShape] | None = None
    onnx: type[LlamaShape] | None = None
    programs: Callable[[LlamaShape], str] | None = None
    tokenizer_problem: Callable[[Path], str | None] | None = None


def get_format(name: str) -> Format:
    """Return a format; raise `UserError` if there is none of this name."""
    found = find("formats", name)
    if found is None:
        raise UserError(f"--to={name} is unknown{nearest(name, names('formats'))}")
    return found


def check_tensors(reader: CheckpointReader, shape: LlamaShape) -> None:
    """Raise `UserError` if a tensor is missing or has another shape than the manifest says."""
    for name, expected in shape.tensor_shapes().items():
        found = expected if shape.fill(name) is not None else shape.shape_in(reader, name)
        if found != expected:
            raise UserError(
                f"the checkpoint's {shape.parameter_name(name)} has shape {found}, its manifest "
                f"says {expected}; choose another checkpoint"
            )
