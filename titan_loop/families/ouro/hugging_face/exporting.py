"""A committed checkpoint becomes a folder that transformers loads."""

import json
import shutil
from collections.abc import Mapping
from importlib import resources
from math import prod
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

import titan_loop
from titan_loop.checkpoint.retention import CHECKPOINTS
from titan_loop.checkpoint.safetensors_files import write_folder
from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.errors import UserError
from titan_loop.families.ouro.hugging_face.ouro_shape import OuroShape, parameter_name
from titan_loop.families.ouro.hugging_face.tokenizer_files import TokenizerExport
from titan_loop.models.family import completed_architecture
from titan_loop.storage.json_files import write_json
from titan_loop.storage.staged_folder import staged_folder

CONFIG = "config.json"
_REMOTE_CODE = "titan_loop.families.ouro.hugging_face.remote_code"
_REMOTE_FILES = ("configuration_ouro.py", "modeling_ouro.py")
_GATE = "model.early_exit_gate."
_NEVER_EXITS = -30.0
"""Logit of the exit gate that a model without one is given: a probability of 1e-13 a step."""

_TEMPLATE = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- looped-language-model
- ouro
- custom_code
---

# {name}

A looped language model: {stack}, applied {recurrent_steps} times to every token, with an
exit gate (LoopLM; Zhu et al. 2025, arXiv 2510.25741). Exported by titan_loop {version}.{gate}

| | |
|---|---|
| parameters | {parameters:,} |
| width, layers, heads | {dim}, {n_layers}, {n_heads} |
| feed-forward width, vocabulary | {hidden_dim}, {vocab_size} |
| recurrent steps | {recurrent_steps} |
| weights | {dtype} |
| window of the last stage | {max_positions} |
| trained for | {tokens:,} tokens in all stages, {step:,} steps in the last |

## Use

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
    prompt = {prompt}
    answer = model.generate(**prompt, max_new_tokens=32)
    print(tokenizer.batch_decode(answer))

`generate` and `forward` take `exit_at_step=k` (read out after step k, counted from 0) or
`exit_threshold=q` (read out each token once its cumulated exit probability reaches q). Steps that
no token in the batch needs are not computed, and caching stays exact. For another number of
recurrent steps: `from_pretrained(..., total_ut_steps=n)`.

`configuration_ouro.py` and `modeling_ouro.py` are titan_loop's own, tested with transformers 4.57.6
and 5.x; names and shapes of the tensors are those of the released Ouro models.

## Lineage

    {lineage}
"""
_PROMPT = 'tokenizer(["Once upon a time"], return_tensors="pt")'
_CHAT_PROMPT = """tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello!"}],
        add_generation_prompt=True, return_dict=True, return_tensors="pt",
    )"""


def checkpoint_shape(reader: CheckpointReader, *, max_positions: int) -> OuroShape:
    """Return the shape of a checkpoint's model, from its manifest.

    Raises:
        UserError: The model is not of the Ouro family, or its tensors do not match its manifest.
    """
    trainer = reader.manifest["trainer"]
    shape = OuroShape.from_architecture(
        trainer["architecture"],
        recurrent_steps=trainer["recurrent_steps"],
        max_positions=max_positions,
    )
    gate = _has_gate(reader.manifest)
    for name, expected in shape.tensor_shapes().items():
        if name.startswith(_GATE) and not gate:
            continue
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
    trained_tokens: int,
) -> None:
    """Write a folder of the Ouro format; it appears under its name when all of it is there.

    Memory is one tensor at a time. The format has a gate in any case: a model without one gets a
    gate that never exits before the last step.

    Args:
        reader: The checkpoint.
        output: New folder.
        shape: Result of `checkpoint_shape`.
        tokenizer: Result of `open_tokenizer`.
        dtype: float32, which loses nothing, or bfloat16, as released models have it.
        max_shard_bytes: Most tensor bytes in one safetensors file.
        trained_tokens: Tokens that the weights were trained on, in all stages.

    Raises:
        UserError: The output is not empty, or cannot be written to its end.
    """
    gate = _has_gate(reader.manifest)

    def read(name: str) -> Tensor:
        if name.startswith(_GATE) and not gate:
            return torch.full(
                shape.tensor_shapes()[name], _NEVER_EXITS if name.endswith("bias") else 0.0
            )
        return reader.read(parameter_name(name))

    dtype_name = str(dtype).removeprefix("torch.")
    with staged_folder(output) as folder:
        write_folder(folder, shape.tensor_shapes(), dtype, read, max_shard_bytes=max_shard_bytes)
        tokenizer.write(folder, max_positions=shape.max_positions)
        for file in _REMOTE_FILES:
            with resources.as_file(resources.files(_REMOTE_CODE) / file) as source:
                shutil.copyfile(source, folder / file)
        card = model_card(
            output.name,
            shape,
            reader.manifest,
            dtype=dtype_name,
            has_chat=tokenizer.has_chat,
            trained_tokens=trained_tokens,
        )
        (folder / "README.md").write_text(card, encoding="utf-8")
        # Last: without it neither transformers nor our own import takes this folder for a model.
        config = shape.to_config(
            dtype=dtype_name, bos_id=tokenizer.end_of_text_id, eos_id=tokenizer.eos_id
        )
        write_json(folder / CONFIG, config)


def model_card(
    name: str,
    shape: OuroShape,
    manifest: Mapping[str, Any],
    *,
    dtype: str,
    has_chat: bool,
    trained_tokens: int,
) -> str:
    """Return the card's text.

    Args:
        name: Name of the folder.
        shape: Shape of the model.
        manifest: Manifest of the exported checkpoint.
        dtype: Type of the exported weights.
        has_chat: Whether there is a chat template.
        trained_tokens: Tokens that the weights were trained on, in all stages.
    """
    lineage = {
        name: _without_folders(manifest.get(name)) for name in ("step", "created", "lineage")
    }
    return _TEMPLATE.format(
        name=name,
        version=titan_loop.__version__,
        parameters=sum(prod(size) for size in shape.parameter_shapes().values()),
        dim=shape.dim,
        stack="1 layer" if shape.n_layers == 1 else f"{shape.n_layers} layers",
        n_layers=shape.n_layers,
        n_heads=shape.n_heads,
        hidden_dim=shape.hidden_dim,
        vocab_size=shape.vocab_size,
        recurrent_steps=shape.recurrent_steps,
        max_positions=shape.max_positions,
        dtype=dtype,
        tokens=trained_tokens,
        step=manifest["step"],
        prompt=_CHAT_PROMPT if has_chat else _PROMPT,
        gate=""
        if _has_gate(manifest)
        else "\nIt was trained without the gate, which never exits before the last step.",
        lineage=json.dumps(lineage, indent=2).replace("\n", "\n    "),
    )


def _has_gate(manifest: Mapping[str, Any]) -> bool:
    return completed_architecture(manifest["trainer"]["architecture"])["exit_gate"]


def _without_folders(value: Any) -> Any:
    """Return JSON without the folders of this machine: of a checkpoint its run's name is left."""
    if isinstance(value, Mapping):
        return {name: _without_folders(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    if not isinstance(value, str) or not value.startswith("/"):
        return value
    path = PurePath(value)
    return "/".join(path.parts[-3:] if path.parent.name == CHECKPOINTS else path.parts[-1:])
