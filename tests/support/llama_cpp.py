"""What llama.cpp answers to an exported file, beside our own log-probabilities."""

import json
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.support.llama_runs import VOCABULARY
from titan_loop.cli import main as cli
from titan_loop.models.decoder import LoopDecoder

DRIVER = Path(__file__).with_name("llama_cpp_driver.py")
PROMPT = [5, 9, 100, 33, 270, 12]
TOKENS = 64
HANGS_SECONDS = 600
"""Seconds after which it is asked again: once in hundreds of starts its server waits for ever."""
CLOSE = 5e-3  # in nats, of logits whose standard deviation is 1; fp32 sums in another order


def ask(python: str, model: Path, *requests: dict[str, Any]) -> list[Any]:
    """Return llama.cpp's answers."""
    asked = json.dumps({"model": str(model), "requests": requests})
    run = partial(subprocess.run, [python, str(DRIVER)], input=asked, capture_output=True)
    try:
        answers = run(text=True, check=False, timeout=HANGS_SECONDS)
    except subprocess.TimeoutExpired:
        answers = run(text=True, check=False)
    assert answers.returncode == 0, answers.stderr
    return json.loads(answers.stdout)


def export(run: Path, output: Path, *flags: object) -> Path:
    """Export a run."""
    arguments = ["convert", "export", run, "--output", output, *flags]
    assert cli.main([*map(str, arguments)]) == 0
    return output


def log_probs(model: LoopDecoder, ids: list[int], steps: int) -> torch.Tensor:
    """Return (L, V) log-probabilities in float64."""
    with torch.no_grad():
        output = model.double()(torch.tensor([ids]), recurrent_steps=steps)
        return model.readout(output.hidden_RBLD[-1])[0].log_softmax(-1)


def as_matrix(answer: dict[str, Any]) -> torch.Tensor:
    """Return (tokens, V) log-probabilities of llama.cpp."""
    rows = [[by_id[str(index)] for index in range(VOCABULARY)] for by_id in answer["log_probs"]]
    return torch.tensor(rows, dtype=torch.float64)
