"""Tiny dense Llamas with random weights, and their runs."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.contracts.folders import opened
from tests.support.llama_runs import Made, Make, ascii_tokenizer, make_run  # noqa: F401
from titan_loop.cli import main as cli
from titan_loop.models.decoder import LoopDecoder

TOKENS = torch.arange(40)[None] * 7 % 300


class Looped(NamedTuple):
    """A retrofitted model and its run."""

    model: LoopDecoder
    run: Path


Retrofit = Callable[..., Looped]


@pytest.fixture(scope="session")
def dense(make_run: Make) -> Made:  # noqa: F811
    """Return a dense model of four layers."""
    return make_run(recurrent_steps=1, n_layers=4)


@pytest.fixture(scope="session")
def retrofit(dense: Made, tmp_path_factory: pytest.TempPathFactory) -> Retrofit:
    """Return `retrofit(mode, *flags)`: the four layers as prelude 1, core 2 and coda 1."""

    def made(mode: str, *flags: object, source: Path = dense.run) -> Looped:
        run = tmp_path_factory.mktemp("retrofit") / "run"
        spans = () if "--prelude" in flags else ("--prelude", 1, "--core", 2, "--coda", 1)
        words = ("retrofit", source, "--output", run, "--mode", mode, *spans, *flags)
        assert cli.main([str(word) for word in words]) == 0
        return Looped(opened(run), run)

    return made


def logits(model: LoopDecoder, steps: int) -> torch.Tensor:
    """Return the logits of `TOKENS` after so many steps."""
    with torch.no_grad():
        return model.readout(model(TOKENS, recurrent_steps=steps).hidden_RBLD[-1])
