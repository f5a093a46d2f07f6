"""A committed checkpoint becomes a folder that transformers loads."""

import shutil
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from titan_loop.checkpoint.hugging_face.model_card import model_card
from titan_loop.checkpoint.hugging_face.ouro_shape import OuroShape, parameter_name
from titan_loop.checkpoint.hugging_face.safetensors_files import write_folder
from titan_loop.checkpoint.hugging_face.tokenizer_files import TokenizerExport
from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.errors import UserError
from titan_loop.storage.json_files import write_json
from titan_loop.storage.staged_folder import staged_folder

CONFIG = "config.json"
_REMOTE_CODE = "titan_loop.checkpoint.hugging_face.remote_code"
_REMOTE_FILES = ("configuration_ouro.py", "modeling_ouro.py")


def checkpoint_shape(reader: CheckpointReader, *, max_positions: int) -> OuroShape:
    """Return the shape of a checkpoint's model, from its manifest.

    Raises:
        UserError: It is no model of the Ouro family, or its tensors are not those of its manifest.
    """
    trainer = reader.manifest["trainer"]
    shape = OuroShape.from_architecture(
        trainer["architecture"],
        recurrent_steps=trainer["recurrent_steps"],
        max_positions=max_positions,
    )
    for name, expected in shape.tensor_shapes().items():
        found = tuple(reader.shape(parameter_name(name)))
        if found != expected:
            raise UserError(
                f"the checkpoint's {parameter_name(name)} has shape {found}, its manifest says "
                f"{expected}; choose another checkpoint"
            )
    return shape


def export_folder(
    reader: CheckpointReader,
    output: Path,
    *,
    shape: OuroShape,
    tokenizer: TokenizerExport,
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> None:
    """Write a folder of the Ouro format; it appears under its name when all of it is there.

    Memory is one tensor at a time.

    Args:
        reader: The checkpoint.
        output: New folder.
        shape: From `checkpoint_shape`.
        tokenizer: From `open_tokenizer`.
        dtype: float32, which loses nothing, or bfloat16, as released models have it.
        max_shard_bytes: Most tensor bytes in one safetensors file.

    Raises:
        UserError: The output is not empty, or cannot be written to its end.
    """

    def read(name: str) -> Tensor:
        return reader.read(parameter_name(name))

    dtype_name = str(dtype).removeprefix("torch.")
    with staged_folder(output) as folder:
        write_folder(folder, shape.tensor_shapes(), dtype, read, max_shard_bytes=max_shard_bytes)
        tokenizer.write(folder, max_positions=shape.max_positions)
        for file in _REMOTE_FILES:
            with resources.as_file(resources.files(_REMOTE_CODE) / file) as source:
                shutil.copyfile(source, folder / file)
        card = model_card(
            output.name, shape, reader.manifest, dtype=dtype_name, has_chat=tokenizer.has_chat
        )
        (folder / "README.md").write_text(card, encoding="utf-8")
        # Last: without it nobody, neither transformers nor our own import, takes this for a model.
        config = shape.to_config(
            dtype=dtype_name, bos_id=tokenizer.end_of_text_id, eos_id=tokenizer.eos_id
        )
        write_json(folder / CONFIG, config)
