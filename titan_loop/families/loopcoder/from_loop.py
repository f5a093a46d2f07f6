"""A trained loop of Llama's blocks becomes a LoopCoder.

    parent, step r:   A(q_r, K_r, V_r)
    LoopCoder:        g A(q_r, K_1, V_1) + (1 − g) A_W(q_r, K_r, V_r)

With g near 0 it is the parent whose later steps see the latest W tokens: the parent itself where no
text is longer than W. Every gate starts at g, whatever its query. Optimiser state is left behind.
"""

import math
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from titan_loop.checkpoint.tensors import CheckpointReader, LazyTensor
from titan_loop.errors import UserError
from titan_loop.families.loopcoder.model import SIZES, LoopCoderOptions
from titan_loop.models.family import ModelOptions, build_decoder
from titan_loop.models.llama import llama_part
from titan_loop.runs.conversion import how_to_train, remade_run
from titan_loop.runs.saved_run import SavedRun


def loopcoder(model: Path, *, output: Path, gate: float = 0.01, window: int = 64) -> None:
    """Make a LoopCoder of a loop of Llama's blocks, in a new run directory.

    See titan_loop/families/loopcoder/README.md.

    Args:
        model: A run of family nanbeige, or a checkpoint of one.
        output: New run directory.
        gate: Share of the first loop's keys in every head of later ones, above 0 and below 1.
        window: Keys of its own that a token sees in later loops.
    """
    if not 0 < gate < 1:
        raise UserError(f"--gate={gate} must be above 0 and below 1")
    if window < 1:
        raise UserError(f"--window={window} must be at least 1")

    def options(run: SavedRun, recurrent_steps: int) -> LoopCoderOptions:
        same = llama_part(run.model_options, SIZES, holder=run.path, made="a LoopCoder is made")
        same["recurrent_steps"] = recurrent_steps
        return LoopCoderOptions(**same, loop_window=window)

    print(
        remade_run(
            *(model, output, sys.argv),
            options=options,
            entries=partial(_entries, gate=gate),
            how={"loopcoder": {"gate": gate, "window": window}},
        )
    )
    print(how_to_train(output))


def _entries(
    reader: CheckpointReader, options: ModelOptions, *, gate: float
) -> Mapping[str, LazyTensor]:
    """Return the parent's tensors, and gates."""
    saved, dtype = {*reader.tensor_keys()}, reader.dtype("tok_embeddings.weight")
    model = build_decoder(options, max_seq_len=1, device="meta")
    logit = math.log(gate / (1 - gate))
    entries: dict[str, LazyTensor] = {}
    for name, tensor in model.state_dict().items():
        shape = tuple(tensor.shape)
        if name in saved:
            entries[name] = LazyTensor(shape, reader.dtype(name), partial(reader.read, name))
            continue
        value = logit if name.endswith(".mix.bias") else 0.0
        make = partial(torch.full, shape, value, dtype=dtype)
        entries[name] = LazyTensor(shape, dtype, make)
    return entries
