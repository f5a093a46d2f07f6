"""Per-layer compilation on CPU: the same numbers, and no recompilation when R changes."""

import shutil

import pytest
import torch
from torch._dynamo.utils import counters
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims

from titan_loop.distributed import parallelize
from titan_loop.distributed.parallelize import parallelize_loop_decoder
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.sizes import ModelOptions, build_decoder

SEQ_LEN = 32
# Inductor fuses norms and activations, so fp32 sums run in another order.
COMPILED_TOLERANCE = 1e-4


def _parallelized(model: LoopDecoder, enable: bool) -> LoopDecoder:
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    return parallelize_loop_decoder(
        model,
        parallel_dims=ParallelDims.from_config(parallelism, 1),
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=enable, components=["model"]),
        ac_config=None,
        dump_folder="",
    )


def _model() -> LoopDecoder:
    torch.manual_seed(0)
    return build_decoder(ModelOptions(size="debugmodel"), max_seq_len=SEQ_LEN)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's own
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on CPU")
def test_compiled_layers_give_the_same_numbers_at_every_r_without_recompiling():
    eager, compiled = _model(), _parallelized(_model(), enable=True)
    tokens = torch.randint(128, (2, SEQ_LEN))
    positions = (torch.arange(SEQ_LEN) % 9).expand(2, -1).contiguous()
    torch._dynamo.reset()
    graphs = []
    for steps in (3, 1, 5):
        want = eager(tokens, positions, recurrent_steps=steps).hidden_RBLD[-1]
        got = compiled(tokens, positions, recurrent_steps=steps).hidden_RBLD[-1]
        torch.testing.assert_close(got, want, atol=COMPILED_TOLERANCE, rtol=0)
        graphs.append(counters["stats"]["unique_graphs"])
    got.sum().backward()
    assert graphs[0] == graphs[1] == graphs[2]


def test_without_a_compiler_one_line_says_so(monkeypatch, caplog):
    monkeypatch.setattr(parallelize, "_compiler_found", lambda: False)
    _parallelized(_model(), enable=True)
    assert "no C++ compiler" in caplog.text
