"""Held-out text in llama.cpp beside the run: the same windows and bytes, read by both."""

import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from titan_loop.data.load.held_out_windows import HeldOutWindows
from titan_loop.errors import UserError
from titan_loop.evaluation.bits_per_byte import bits_per_byte, paired_difference
from titan_loop.evaluation.window_scores import WindowScores, at_depths, score_windows
from titan_loop.formats import llama_cpp
from titan_loop.formats.llama_shape import LlamaShape
from titan_loop.models.decoder import LoopDecoder
from titan_loop.tables import columns


def require_engine(shape: LlamaShape) -> None:
    """Raise `UserError` if llama.cpp cannot run a model of this shape, or is not installed."""
    if not shape.gguf_is_released:
        raise UserError(f"--measure: {shape.gguf_programs}")
    llama_cpp.require_library("--measure")


def in_llama_cpp(file: Path, windows: HeldOutWindows) -> WindowScores:
    """Return the scores of windows in llama.cpp, each document of a window alone.

    Raises `UserError` if its wheel is missing, or it cannot run the file.
    """
    rows: list[dict[str, list[int]]] = []
    window_of: list[int] = []
    for index, position_L in enumerate(windows.positions):
        bounds = [*(position_L == 0).nonzero().flatten().tolist(), len(position_L)]
        for part in itertools.starmap(slice, itertools.pairwise(bounds)):
            both = {"ids": windows.input, "labels": windows.labels}
            rows.append({name: ids_BL[index, part].tolist() for name, ids_BL in both.items()})
            window_of.append(index)
    nats_PW = np.zeros((1, len(windows.labels)))
    np.add.at(nats_PW[0], window_of, llama_cpp.nats(file, rows))
    return WindowScores.of(windows, (nats_PW, np.zeros_like(nats_PW)))


def table(
    model: LoopDecoder, files: Mapping[int, Path], sources: Mapping[str, HeldOutWindows]
) -> str:
    """Return bits per byte of a model and of its files in llama.cpp.

    Args:
        files: Recurrent steps → the file of so many.
    """
    rows: list[tuple[str, ...]] = [("source", "R", "run", "llama.cpp", "difference")]
    for name, windows in sources.items():
        ours = score_windows(windows, at_depths(model, [*files]), device=torch.device("cpu"))
        for nats_W, (steps, file) in zip(ours.nats_PW, files.items(), strict=True):
            theirs = in_llama_cpp(file, windows)
            gap = paired_difference(theirs.nats_PW[0], nats_W, ours.bytes_W)
            values = (bits_per_byte(nats, ours.bytes_W) for nats in (nats_W, theirs.nats_PW[0]))
            told = f"{gap.value:+.4f} [{gap.low:+.4f}, {gap.high:+.4f}]"
            rows.append((name, str(steps), *(f"{value:.4f}" for value in values), told))
    return "\n".join(columns(rows))
