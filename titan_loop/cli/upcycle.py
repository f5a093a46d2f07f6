"""`titan-loop upcycle CHECKPOINT --output RUN --layers N`: more layers, by duplication."""

import logging
import sys
from pathlib import Path
from typing import Literal

from titan_loop.cli.arguments import command


@command("upcycle")
def run(
    checkpoint: Path,
    *,
    output: Path,
    layers: int,
    mode: Literal["stacked", "interleaved"] = "stacked",
    moments: Literal["duplicate", "scale", "reset"] = "scale",
) -> None:
    """Duplicate the layers of a checkpoint into a new run directory.

    `train` and `eval` take the new run like any other. See titan_loop/checkpoint/UPCYCLING.md.

    Args:
        checkpoint: Run (its newest checkpoint is taken) or its checkpoints/step-N.
        output: New run directory.
        layers: Number of layers of the new model, a multiple of the old number.
        mode: stacked repeats the stack; interleaved puts every layer next to its copies.
        moments: Moments of the copies: duplicate, scale (by 1/copies) or reset.
    """
    from titan_loop.checkpoint.upcycling import Upcycling
    from titan_loop.runs.conversion import upcycle_run
    from titan_loop.runs.saved_run import SavedRun

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    upcycling = Upcycling(layers, mode, moments)
    child = upcycle_run(checkpoint, output, upcycling, sys.argv)
    print(child)
    tokens = 2 * SavedRun(output).checkpoint().tokens
    print(f"To train it: titan-loop train {output} --total-tokens {tokens}")
