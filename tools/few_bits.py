"""Cost of few bits in llama.cpp itself: each type's file, read beside the run.

run ─► a GGUF of every type ─► llama.cpp's nats of held-out windows, less the run's
    ─► evals/few_bits-step-N.json, which `titan-loop results add` takes in

python -m tools.few_bits RUN
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from titan_loop.cli import main as cli
from titan_loop.evaluation.bits_per_byte import bits_per_byte
from titan_loop.evaluation.engine_scores import in_llama_cpp
from titan_loop.evaluation.window_scores import (
    WindowScores,
    at_depths,
    open_run,
    score_windows,
    with_total,
)
from titan_loop.inference.loading import load_checkpoint
from titan_loop.runs.saved_run import SavedRun
from titan_loop.storage.json_files import write_json
from train_configs.nanbeige.recipes import TYPES

WINDOWS = 16
"""Held-out windows of each source."""


def measure(folder: Path) -> dict[str, float]:
    """Return the run's held-out bits per byte, and what each type adds to them."""
    run = SavedRun.open(folder)
    windows, model = open_run(run, count=WINDOWS), load_checkpoint(str(folder)).model
    steps, device = model.config.recurrent_steps, torch.device("cpu")
    forward = at_depths(model, [steps])
    scores = {name: score_windows(part, forward, device=device) for name, part in windows.items()}
    ours = _bits(with_total(scores))
    results = {f"{name}/bits_per_byte/run": value for name, value in ours.items()}
    for dtype in TYPES:
        with TemporaryDirectory() as place:
            file = Path(place) / "model.gguf"
            flags = ["--to", "gguf", "--dtype", dtype, "--no-tokenizer", "--output", str(file)]
            flags += ["--recurrent-steps", str(steps)]
            assert cli.main(["convert", "export", str(folder), *flags]) == 0
            found = {name: in_llama_cpp(file, part) for name, part in windows.items()}
        for name, value in _bits(with_total(found)).items():
            results[f"{name}/bits_added/{dtype}"] = value - ours[name]
    return results


def _bits(scores: dict[str, WindowScores]) -> dict[str, float]:
    return {
        f"held_out/{name}": bits_per_byte(each.nats_PW[0], each.bytes_W)
        for name, each in scores.items()
    }


def main() -> int:
    """Measure a run and write the numbers into it."""
    folder = Path(sys.argv[1])
    step = SavedRun.open(folder).checkpoint().step
    record = {"step": step, "results": measure(folder)}
    write_json(folder / "evals" / f"few_bits-step-{step}.json", record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
