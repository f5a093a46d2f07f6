"""Runs of HRM-Text with random weights."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from tests.families.nanbeige.conftest import VOCABULARY, train_tokenizer
from tests.families.ouro.hugging_face.conftest import write_run
from titan_loop.families.hrm_text.model import HrmTextOptions
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import build_decoder


class Made(NamedTuple):
    """A model and its run."""

    model: LoopDecoder
    run: Path


Make = Callable[..., Made]


@pytest.fixture(scope="session")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return `make(**options)`, which writes the run of a model whose every weight matters."""

    def make(**options: object) -> Made:
        chosen = HrmTextOptions(**{"vocab_size": VOCABULARY, **options})  # type: ignore[arg-type]
        torch.manual_seed(20)
        model = build_decoder(chosen, max_seq_len=128).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                nn.init.normal_(parameter, std=0.1)
            if chosen.tie_weights:
                model.lm_head.weight = model.tok_embeddings.weight
        run = tmp_path_factory.mktemp("hrm_text") / "run"
        write_run(run, chosen, model)  # type: ignore[arg-type]
        return Made(model, run)

    return make


@pytest.fixture(scope="session")
def ascii_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tokenizer.json of `VOCABULARY` tokens of ASCII."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    return train_tokenizer(path, digits=True, every_byte=False)
