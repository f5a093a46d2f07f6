"""The smoothed loss against its formula in float64, token by token."""

import pytest
import torch
from torchtitan.config.configs import ParallelismConfig

from titan_loop.families.recurrent_depth.model import RecurrentDepthOptions
from titan_loop.families.recurrent_depth.objective import SmoothedLoss
from titan_loop.models.family import build_decoder

EXACT = 1e-12  # both sides compute in float64
SMOOTHING, VALID = 0.1, 7.0


@pytest.mark.parametrize("rows", [[5, 8, 10], None], ids=["labelled", "every token"])
def test_it_is_the_formula_over_labelled_tokens_with_its_gradient(rows: list[int] | None):
    torch.manual_seed(0)
    model = build_decoder(RecurrentDepthOptions(initial_outputs="matrix"), max_seq_len=6).double()
    loss_fn = SmoothedLoss(SmoothedLoss.Config(label_smoothing=SMOOTHING))
    loss_fn.set_lm_head(model.lm_head)
    tokens = torch.randint(128, (2, 6))
    labels = torch.full_like(tokens, -100)
    labels[0, 5], labels[1, 2], labels[1, 4] = 17, 3, 99
    output = model(tokens, recurrent_steps=3, collect="last")
    valid = torch.tensor(VALID, dtype=torch.float64)
    labelled = None if rows is None else torch.tensor(rows)
    loss, metrics = loss_fn(output, labels, valid, labelled_T=labelled)
    got = torch.autograd.grad(loss, [*model.parameters()])

    logits = model.readout(model(tokens, recurrent_steps=3).hidden_RBLD[2])
    wanted, plain = torch.zeros((), dtype=torch.float64), 0.0
    for b, position in ((0, 5), (1, 2), (1, 4)):
        values = logits[b, position]
        log_p = [value - values.exp().sum().log() for value in values]
        even = -sum(log_p) / len(log_p)
        wanted = wanted - (1 - SMOOTHING) * log_p[labels[b, position]] + SMOOTHING * even
        plain -= log_p[labels[b, position]].item()
    torch.testing.assert_close(loss, wanted / VALID, atol=EXACT, rtol=0)
    assert list(metrics) == ["ce/step_3"]
    assert float(metrics["ce/step_3"]) == pytest.approx(plain / VALID, abs=EXACT)
    for ours, theirs in zip(
        got, torch.autograd.grad(wanted / VALID, [*model.parameters()]), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=EXACT, rtol=0)


@pytest.mark.parametrize("name", ["tensor_parallel_degree", "context_parallel_degree"])
def test_ranks_cannot_share_the_vocabulary_or_a_window(name: str):
    config = SmoothedLoss.Config()
    assert not [*config.parallelism_refusals(ParallelismConfig())]
    (refusal,) = config.parallelism_refusals(ParallelismConfig(**{name: 2}))
    assert (
        str(refusal) == f"parallelism.{name}=2 does not work with loss=SmoothedLoss; leave it at 1"
    )
