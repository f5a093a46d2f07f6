"""Training as a user starts it, a few minutes long, with the last exam read back."""

import subprocess
import sys
from pathlib import Path

from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import read_jsonl

SEEDS = ("--debug.seed", "1", "--dataloader.seed", "1")


def trained(folder: Path, recipe: str, stage: str | None = None, *flags: str) -> dict[str, float]:
    """Return what the last exam of a stage of a recipe read, or of a recipe that is one run."""
    words = [recipe, *(["--stage", stage] if stage else []), "--dump-folder", str(folder), *flags]
    subprocess.run([sys.executable, "-m", "titan_loop", "train", *words], check=True)
    return read_jsonl(RunDirectory(folder / (stage or "")).evals_jsonl)[-1]["results"]


def shorter(tokens: int, warmup: int) -> list[str]:
    """Return the flags that end a run after so many tokens, its learning rate with it."""
    rate = f"0:0 linear {warmup}:1e-2 cosine {tokens}:1e-3"
    return [*SEEDS, "--total-tokens", str(tokens), "--learning-rate", rate]
