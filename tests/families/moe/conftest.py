"""Runs of mixtures whose every weight and bias matters."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.families.ouro.hugging_face.conftest import random_model, write_run
from tests.support.llama_runs import VOCABULARY, Made, ascii_tokenizer, make_run  # noqa: F401
from titan_loop.families.moe.model import MoEOptions

MakeMoE = Callable[..., Made]


@pytest.fixture(scope="session")
def make_moe(tmp_path_factory: pytest.TempPathFactory) -> MakeMoE:
    """Return `make_moe(bias=…, **options)`, which writes the run of a mixture."""

    def make(*, bias: float = 0.2, **options: object) -> Made:
        small = {"vocab_size": VOCABULARY, "experts": 4, "expert_hidden_dim": 32}
        chosen = MoEOptions(**{**small, **options})  # type: ignore[arg-type]
        model = random_model(chosen)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name.endswith("expert_bias_SE"):
                    nn.init.normal_(buffer, std=bias)
        run = tmp_path_factory.mktemp("moe") / "run"
        write_run(run, chosen, model)  # type: ignore[arg-type]
        return Made(model, run)

    return make
