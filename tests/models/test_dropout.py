"""Dropout: what it computes, and that recomputation repeats its masks."""

import pytest
import torch
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from tests.contracts.families import random_model
from tests.support.tiny import tiny_config
from titan_loop.distributed.activation_checkpointing import RecurrentStepAC
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.dropout import seed_dropout
from titan_loop.models.family import decoder_config
from titan_loop.training.layout_preflight import layout_refusals

SEQ_LEN = 16


def make_model(rate: float = 0.3):
    options = OuroOptions(dropout=rate, embedding_dropout=rate, scale_embeddings=True)
    return random_model(options, SEQ_LEN).train()


def tokens():
    return torch.randint(128, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))


def test_the_embedding_is_dropped_once_in_training_alone():
    model = make_model()
    context = model.make_context(tokens())
    torch.manual_seed(3)
    got = model.start(tokens(), context)
    torch.manual_seed(3)
    mask = (torch.rand(got.shape) >= 0.3).double() / 0.7
    embedded = 8 * model.tok_embeddings(tokens())
    torch.testing.assert_close(got, mask * embedded, rtol=1e-13, atol=1e-13)
    assert torch.equal(model.eval().start(tokens(), context), embedded)


@pytest.mark.parametrize(
    "policy",
    [
        FullAC.Config(),
        SelectiveAC.Config(),
        RecurrentStepAC.Config(),
        RecurrentStepAC.Config(layers="full"),
    ],
)
@pytest.mark.parametrize("backward_steps", [None, 2])
def test_recomputed_gradients_equal_those_without_recomputation(policy, backward_steps):
    gradients = []
    for recomputed in (None, policy):
        model = make_model()
        if recomputed is not None:
            recomputed.build().apply(model)
        seed_dropout(model, 5, 1)
        states = model(tokens(), recurrent_steps=4, backward_steps=backward_steps).hidden_RBLD
        torch.rand(7)  # the generator has moved on when the backward pass begins
        sum((state**3).sum() for state in states).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_the_key_alone_decides_the_masks():
    model = make_model()

    def state(*key):
        seed_dropout(model, *key)
        return model(tokens()).hidden_RBLD[-1]

    assert torch.equal(state(1, 2, 0, 0), state(1, 2, 0, 0))
    for other in ((2, 2, 0, 0), (1, 3, 0, 0), (1, 2, 1, 0), (1, 2, 0, 1)):
        assert not torch.equal(state(1, 2, 0, 0), state(*other))
    plain = make_model(0.0)
    before = torch.get_rng_state()
    seed_dropout(plain, 1)
    plain(tokens())
    assert torch.equal(before, torch.get_rng_state())  # a model without dropout draws nothing


@pytest.mark.parametrize("option", ["dropout", "embedding_dropout"])
def test_settings_that_would_give_wrong_masks_are_refused(tmp_path, option):
    config = tiny_config(tmp_path / "source", tmp_path / "run")
    model = decoder_config(OuroOptions(**{option: 0.1}), max_seq_len=SEQ_LEN)
    assert not list(layout_refusals(config, model, 1))
    config.activation_checkpoint = FullAC.Config(preserve_rng_state=False)
    (masks,) = (str(refusal) for refusal in layout_refusals(config, model, 1))
    assert "preserve_rng_state=False recomputes with other dropout masks" in masks
    without = decoder_config(OuroOptions(), max_seq_len=SEQ_LEN)
    assert not list(layout_refusals(config, without, 1))
