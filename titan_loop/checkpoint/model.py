"""A committed checkpoint as one undistributed model, for evaluation on a single device."""

from dataclasses import replace
from pathlib import Path

import torch

from titan_loop.checkpoint.keys import OPTIMIZER_PREFIX, KeyPolicy, check_keys
from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.sizes import ModelOptions, build_decoder


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
