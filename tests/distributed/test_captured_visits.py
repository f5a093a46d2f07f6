"""Visits on tensors that stay, as CUDA graphs replay them: here run without a graph."""

from contextlib import nullcontext
from typing import Literal

import pytest
import torch
from torch import Tensor

from tests.distributed.test_compile import DYNAMO_WARNS, model_of, parallelized
from titan_loop.distributed import captured_visits
from titan_loop.distributed.loop_fsdp import reshard_units
from titan_loop.errors import UserError
from titan_loop.families.hrm_text.model import HrmTextOptions
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.families.retrofit.model import RetrofitOptions
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import ModelOptions

pytestmark = DYNAMO_WARNS
CASES: list[tuple[ModelOptions, Literal["float32", "bfloat16"]]] = [
    (OuroOptions(size="debugmodel", n_layers=1), "bfloat16"),
    (RetrofitOptions(n_layers=3, prelude_layers=1, coda_layers=1, bridge=True), "float32"),
    (HrmTextOptions(size="debugmodel"), "float32"),
]
# Gradients are added in fp32 in another order, and in bf16 they are rounded before.
TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-2}


def passes(model: LoopDecoder, depths: list[tuple[int, int | None]]) -> list[Tensor]:
    """Return losses, then gradients, of micro-batches of other tokens, documents and depths."""
    losses = []
    for number, (steps, reached) in enumerate(depths):
        tokens = (torch.arange(32) * (number + 3) % 128).view(2, 16)
        positions = (torch.arange(16) % (number + 5)).expand(2, -1).contiguous()
        states = model(tokens, positions, recurrent_steps=steps, backward_steps=reached)
        loss = torch.stack(states.hidden_RBLD).float().pow(3).mean()
        loss.backward()
        losses.append(loss.detach())
    reshard_units(model)
    return losses + [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("options", "dtype"), CASES)
def test_replayed_visits_have_the_losses_and_gradients_of_eager_ones(options, dtype):
    """Shallower, deeper and truncated, in micro-batches; passes without gradients between."""
    own = parallelized(model_of(options), True, backend="eager", dtype=dtype, graphs=True)
    other = parallelized(model_of(options), False, dtype=dtype)
    torch._dynamo.reset()
    for depths in ([(2, None)] * 2, [(1, None)], [(3, 2)] * 2):
        for got, want in zip(passes(own, depths), passes(other, depths), strict=True):
            bound = TOLERANCE[dtype] * float(want.abs().max())
            torch.testing.assert_close(got, want, atol=bound, rtol=0)
        for model in (own, other):
            model.zero_grad()
            with torch.no_grad():
                model(torch.arange(8).view(1, 8), recurrent_steps=1)


class Capturing:
    """A stand-in for CUDA graphs that counts captures and replays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captured, self.replayed = 0, 0
        monkeypatch.setattr(captured_visits, "can_capture", lambda: True)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        monkeypatch.setattr(torch.cuda, "graph", self.capture)

    def capture(self, graph: object, pool: object, **options: object) -> nullcontext[None]:
        self.captured += 1
        return nullcontext()

    def replay(self) -> None:
        self.replayed += 1


def test_another_depth_captures_no_visit_again(monkeypatch: pytest.MonkeyPatch):
    graphs = Capturing(monkeypatch)
    model = parallelized(model_of(), True, backend="eager", graphs=True)
    for steps, captured in ((3, 0), (3, 6), (1, 6), (2, 6), (3, 6), (4, 6), (4, 8)):
        before = graphs.replayed
        passes(model, [(steps, None)])
        assert graphs.captured == captured
        assert graphs.replayed - before == 2 * min(steps, captured // 2)


def test_what_cannot_be_captured_is_named(monkeypatch: pytest.MonkeyPatch):
    Capturing(monkeypatch)
    model = parallelized(model_of(), True, backend="eager", graphs=True)
    passes(model, [(1, None)])

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", fail)
    with pytest.raises(
        UserError, match=r"compile.graphs=True: the forward pass .* set it to False"
    ):
        passes(model, [(1, None)])
