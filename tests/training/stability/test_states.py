"""State norms against a float64 model whose every state keeps its gradient."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import build_decoder
from titan_loop.training.stability.states import StateNorms, gradient_norm, root_mean_square

FP32_TOLERANCE = 1e-4
"""Norms of a few thousand fp32 values after eight layers and back."""


class Recorder:
    """Keeps every state, with its gradient, in the order of visits."""

    def __init__(self) -> None:
        self.states: dict[tuple[int, int], Tensor] = {}

    def __call__(self, hidden: Tensor, step: int | None, layer: int) -> None:
        hidden.retain_grad()
        self.states[step or 0, layer] = hidden


def tiny(**options: object) -> LoopDecoder:
    torch.manual_seed(0)
    return build_decoder(OuroOptions(size="debugmodel", **options), max_seq_len=32)


def objective(model: LoopDecoder, tokens: Tensor) -> Tensor:
    output = model(tokens, recurrent_steps=3)
    return sum(h.double().pow(4).sum() for h in output.hidden_RBLD)


class Step:
    """A training step of which only the states are measured."""

    def __init__(self, model: LoopDecoder, *, recurrent_steps: int = 3) -> None:
        self.norms = StateNorms(
            layers=len(model.layers), recurrent_steps=recurrent_steps, device=torch.device("cpu")
        )
        self.trainer: Any = SimpleNamespace(step=1, model=model)
        self.begin()

    def begin(self) -> None:
        self.norms.on_phase(self.trainer, "reading data")

    def run(self, tokens: Tensor) -> None:
        self.norms.before_forward(self.trainer)
        loss = objective(self.trainer.model, tokens)
        self.norms.after_forward(self.trainer)
        loss.backward()

    def sums(self) -> Tensor:
        self.norms.on_gradients(self.trainer)
        return self.norms.sums


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("outside", [0, 1])
def test_norms_of_all_micro_batches_equal_a_float64_reference(micro_batches: int, outside: int):
    options = {"prelude_layers": outside, "coda_layers": outside} if outside else {}
    if outside:
        options["n_layers"] = 4
    model = tiny(**options)
    tokens = torch.randint(128, (4, 32), generator=torch.Generator().manual_seed(1))
    layers = len(model.layers)
    step = Step(model, recurrent_steps=4)
    for _ in range(2):  # an earlier step is forgotten
        step.begin()
        for part in tokens.chunk(micro_batches):
            step.run(part)
    sums = step.sums()
    rms, gradient = root_mean_square(sums), gradient_norm(sums, tokens.numel() * model.config.dim)

    reference, recorder = copy.deepcopy(model).double(), Recorder()
    reference.observe = recorder
    # One visit a cell in the reference: only the last step is read, so the coda runs once.
    objective(reference, tokens).backward()
    for (step, layer), state in recorder.states.items():
        if outside and layer == layers - 1:
            continue  # the coda reads every step: its cell adds up several states
        expected = state.detach().square().mean().sqrt(), state.grad.norm()
        got = rms[step, layer].double(), gradient[step, layer].double()
        assert torch.allclose(torch.stack(got), torch.stack(expected), rtol=FP32_TOLERANCE)
    looped = layers - 2 * outside
    assert len(recorder.states) == 3 * looped + 2 * outside
    assert torch.isfinite(rms).sum() == 3 * looped + 2 * outside
    assert torch.isnan(rms[4]).all()  # R was 3


def test_a_recomputed_visit_counts_once():
    model = tiny()
    tokens = torch.randint(128, (1, 32))
    step = Step(model)
    step.run(tokens)
    plain = step.sums()

    def recomputed(part):
        def run(*args: object) -> Tensor:
            return torch.utils.checkpoint.checkpoint(part, *args, use_reentrant=False)

        return run

    model.recurrence.wrap = recomputed
    step.begin()
    step.run(tokens)
    assert torch.equal(step.sums(), plain)
