"""The model of a checkpoint: a check of its architecture, and the model itself, undistributed."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from titan_loop.checkpoint.loading import OPTIMIZER_PREFIX, KeyPolicy, check_keys
from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.errors import UserError
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import ModelOptions, build_decoder, completed_architecture

_DERIVED = {"branch_factor": "the factor that model.branch_scale gives at model.recurrent_steps"}


def check_architecture(
    saved: Mapping[str, Any],
    wanted: Mapping[str, Any],
    *,
    may_differ: Collection[str] = (),
    holder: str = "the checkpoint",
    otherwise: str = "another dump_folder",
) -> None:
    """Raise `UserError` naming every difference between a checkpoint's model and another.

    Args:
        otherwise: Remedy that the message offers besides using the checkpoint's values.
    """
    differing = different_options(saved, wanted) - set(may_differ)
    if not differing:
        return
    saved, wanted = completed_architecture(saved), completed_architecture(wanted)
    named = [
        f"{_DERIVED.get(name, f'model.{name}')}={wanted.get(name, 'unknown')} "
        f"(checkpoint: {saved.get(name, 'unknown')})"
        for name in {**wanted, **saved}
        if name in differing
    ]
    raise UserError(
        f"{holder} is of another architecture: {', '.join(named)}; use its values, or {otherwise}"
    )


def different_options(first: Mapping[str, Any], second: Mapping[str, Any]) -> set[str]:
    """Return the options in which two architecture records, each of any version, differ.

    Raises `UserError` for a family that this version does not know.
    """
    first, second = completed_architecture(first), completed_architecture(second)
    either, missing = {**first, **second}, object()
    return {name for name in either if first.get(name, missing) != second.get(name, missing)}


def load_model(
    checkpoint: Path, options: ModelOptions, *, max_seq_len: int, ema: bool = False
) -> LoopDecoder:
    """Build the model of a checkpoint and load its weights on the CPU, one tensor at a time.

    Errors are `CheckpointReader`'s; entries that do not fit the model raise `UserError`.
    """
    reader = CheckpointReader(checkpoint, ema=ema)
    model = build_decoder(replace(options, attention="sdpa"), max_seq_len=max_seq_len)
    state = model.state_dict()
    check_keys(
        {name: tuple(tensor.shape) for name, tensor in state.items()},
        reader.metadata,
        checkpoint=checkpoint,
        policy=KeyPolicy(ignore_saved=(f"{OPTIMIZER_PREFIX}*",)),
    )
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(reader.read(name))
    return model.eval()
