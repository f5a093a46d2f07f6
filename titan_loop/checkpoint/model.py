"""The model of a checkpoint: which one it is, and itself as one undistributed model."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from titan_loop.checkpoint.loading import OPTIMIZER_PREFIX, KeyPolicy, check_keys
from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.errors import UserError
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import ModelOptions, build_decoder


def architecture(config: LoopDecoder.Config) -> dict[str, Any]:
    """Return the options in which two models must agree to share a checkpoint."""
    attention = config.layers[0].attention
    return {
        "dim": config.dim,
        "n_layers": len(config.layers),
        "n_heads": attention.n_heads,
        "n_kv_heads": attention.n_kv_heads or attention.n_heads,
        "hidden_dim": config.layers[0].feed_forward.w1.out_features,
        "vocab_size": config.vocab_size,
        "exit_gate": config.exit_gate is not None,
        "tie_weights": config.enable_weight_tying,
        "rope_theta": attention.rope.theta,
    }


def check_architecture(
    saved: Mapping[str, Any],
    wanted: Mapping[str, Any],
    *,
    holder: str = "the checkpoint",
    otherwise: str = "another dump_folder",
) -> None:
    """Raise `UserError` naming every difference between a checkpoint's model and this run's.

    Args:
        saved: The checkpoint's.
        wanted: The values it must have.
        holder: How the message calls the checkpoint.
        otherwise: Alternative to using the checkpoint's values, for the message.
    """
    differences = [
        f"model.{name}={wanted[name]} (checkpoint: {saved.get(name)})"
        for name in wanted
        if wanted[name] != saved.get(name)
    ]
    if differences:
        raise UserError(
            f"{holder} is of another architecture: {', '.join(differences)}; use its values, or "
            f"{otherwise}"
        )


def load_model(
    checkpoint: Path, options: ModelOptions, *, max_seq_len: int, verify_hashes: bool = True
) -> LoopDecoder:
    """Build the model of a checkpoint and load its weights on the CPU, one tensor at a time.

    Args:
        checkpoint: The folder of one checkpoint, of any world size.
        options: Options of the model, from the run's config.
        max_seq_len: Longest window the rotary table must cover.
        verify_hashes: Whether to read every file first and compare its hash; sizes are always
            compared.

    Returns:
        The model in evaluation mode.

    Raises:
        UserError: The folder is not a committed checkpoint, or not of such a model.
        DamagedCheckpointError: A file is missing, truncated or altered.
    """
    reader = CheckpointReader(checkpoint, look_at="hashes" if verify_hashes else "sizes")
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
