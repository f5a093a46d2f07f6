"""A folder of the Ouro format becomes a committed checkpoint.

config.json ─► OuroShape ─► names and shapes that must be there, no more and no less
*.safetensors ─► one tensor at a time, file by file ─► write_checkpoint
"""

import hashlib
import json
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_loop.checkpoint.architecture import architecture
from titan_loop.checkpoint.hugging_face.ouro_shape import OuroShape, parameter_name
from titan_loop.checkpoint.hugging_face.safetensors_files import SafetensorsFolder
from titan_loop.checkpoint.hugging_face.tokenizer_files import (
    TOKENIZER,
    check_vocabulary,
    load_tokenizer,
)
from titan_loop.checkpoint.tensors import LazyTensor, write_checkpoint
from titan_loop.errors import UserError
from titan_loop.models.sizes import SIZES, ModelOptions, decoder_config

CONFIG = "config.json"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_NAMED = 3
"""So many tensors are named in a message."""


class OuroFolder:
    """A checked folder of the Ouro format.

    Args:
        path: Holds config.json and safetensors; a tokenizer.json is checked if it is there.

    Raises:
        UserError: Anything about it is not as the format says.

    Attributes:
        shape: Of its model.
        tokenizer: Its tokenizer.json; None without one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shape = OuroShape.from_config(_read_config(path))
        self._files = SafetensorsFolder(path)
        self._check_tensors()
        tokenizer = path / TOKENIZER
        self.tokenizer = tokenizer if tokenizer.exists() else None
        if self.tokenizer is not None:
            check_vocabulary(
                tokenizer,
                load_tokenizer(tokenizer),
                vocab_size=self.shape.vocab_size,
                is_known=False,
            )

    @property
    def names(self) -> list[str]:
        """The format's tensors, in the order in which reading them is cheap."""
        return self._files.names

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one tensor in the wanted type."""
        return self._files.read(name).to(dtype)

    def lineage(self) -> dict[str, Any]:
        """Return what a manifest says of where the weights come from."""
        digest = hashlib.sha256((self.path / CONFIG).read_bytes()).hexdigest()
        return {"imported_from": str(self.path.resolve()), "config_sha256": digest}

    def _check_tensors(self) -> None:
        expected, found = self.shape.tensor_shapes(), self._files.shapes
        if self.shape.tie_weights and _HEAD not in found:
            expected.pop(_HEAD)  # transformers writes a tied matrix once
        missing, extra = expected.keys() - found.keys(), found.keys() - expected.keys()
        if _HEAD in missing:
            raise UserError(
                f"{self.path}: {_HEAD} is missing, but config.json has tie_word_embeddings=false; "
                "the folder is incomplete, or that field is wrong"
            )
        if missing or extra:
            raise UserError(
                f"{self.path} does not have the {len(expected)} tensors of its config.json: "
                + "; ".join(
                    f"{len(names)} {what} ({_some(names)})"
                    for what, names in (("missing", missing), ("unknown", extra))
                    if names
                )
            )
        for name, shape in expected.items():
            if found[name] != shape:
                raise UserError(
                    f"{self.path}: {name} has shape {found[name]}, config.json says {shape}; one "
                    "of them is of another model"
                )
        if self.shape.tie_weights and _HEAD in found:
            if not torch.equal(self._files.read(_HEAD), self._files.read(_EMBEDDING)):
                raise UserError(
                    f"{self.path}: config.json has tie_word_embeddings=true, but {_HEAD} and "
                    f"{_EMBEDDING} differ; set it to false, or repair the weights"
                )
            self._files.close()


def model_options(shape: OuroShape) -> ModelOptions:
    """Return the options that build a model of this shape, every one of them explicit."""
    size = next(
        (
            name
            for name, known in SIZES.items()
            if (known.dim, known.n_layers, known.n_heads, known.hidden_dim)
            == (shape.dim, shape.n_layers, shape.n_heads, shape.hidden_dim)
        ),
        ModelOptions().size,
    )
    return ModelOptions(
        size=size,
        vocab_size=shape.vocab_size,
        recurrent_steps=shape.recurrent_steps,
        n_layers=shape.n_layers,
        dim=shape.dim,
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_kv_heads,
        hidden_dim=shape.hidden_dim,
        tie_weights=shape.tie_weights,
        rope_theta=shape.rope_theta,
    )


def import_folder(folder: OuroFolder, checkpoint: Path, *, dtype: torch.dtype) -> None:
    """Write a committed checkpoint of step 0 that holds the folder's weights.

    Memory is one shard of the folder and one tensor.

    Args:
        folder: Checked.
        checkpoint: New folder.
        dtype: float32, which training needs and which holds every other type exactly, or bfloat16.
    """
    shapes = folder.shape.tensor_shapes()
    entries = {
        parameter_name(name): LazyTensor(shapes[name], dtype, partial(folder.read, name, dtype))
        for name in folder.names
    }
    if _HEAD not in folder.names:
        produce = partial(folder.read, _EMBEDDING, dtype)
        entries[parameter_name(_HEAD)] = LazyTensor(shapes[_HEAD], dtype, produce)
    config = decoder_config(model_options(folder.shape), max_seq_len=1)
    content = {
        "step": 0,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "stage_end": True,
        "trainer": {
            "step": 0,
            "tokens": 0,
            "recurrent_steps": folder.shape.recurrent_steps,
            "architecture": architecture(config),
        },
        "data": {},
        "lineage": {"parent": None, **folder.lineage()},
    }
    write_checkpoint(checkpoint, entries, content)


def _read_config(path: Path) -> dict[str, Any]:
    file = path / CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            f"{path} has no {CONFIG}: it is not a model, or its export or download never finished"
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as JSON ({error}); download it again") from error
    if not isinstance(config, dict):
        raise UserError(f"{file} is not a JSON object; download it again")
    return config


def _some(names: set[str]) -> str:
    shown = sorted(names)[:_NAMED]
    return ", ".join(shown) + (", …" if len(names) > _NAMED else "")
