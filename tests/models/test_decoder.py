"""Identities of the looped decoder: what looping must equal, and what it must not touch."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import build_decoder
from titan_loop.models.output import LoopOutput

SEQ_LEN = 32
# fp32 sums of a few hundred terms of size one, in another order
FP32_TOLERANCE = 2e-5


def make_model(seed: int = 0, **options: Any) -> LoopDecoder:
    torch.manual_seed(seed)
    model = build_decoder(OuroOptions(size="debugmodel", **options), max_seq_len=2 * SEQ_LEN)
    with torch.no_grad():  # away from the symmetric start: norms of 1, a silent gate, tiny matrices
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def make_batch(seed: int = 1, lengths: tuple[int, ...] = (13, 9, 10)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(128, (2, sum(lengths)), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(2, -1)
    return tokens, positions


def tensors(output: LoopOutput) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def total(output: LoopOutput) -> Tensor:
    return sum(leaf.square().sum() for leaf in tensors(output))


@pytest.mark.parametrize(("size", "parameters"), [("1.4b", 1_434_652_673), ("2.6b", 2_667_974_657)])
def test_released_sizes_have_exactly_the_released_parameter_counts(size, parameters):
    model = build_decoder(OuroOptions(size=size), max_seq_len=64, device="meta")
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_looping_equals_the_unrolled_stack_of_tied_copies(steps):
    """R loops over N layers == R·N layers in a row; gradients are sums over the copies."""
    looped = make_model(recurrent_steps=steps)
    unrolled = [copy.deepcopy(looped) for _ in range(steps)]
    tokens, positions = make_batch()

    output = looped(tokens, positions)
    total(output).backward()

    context = unrolled[0].make_context(tokens, positions)
    hidden = unrolled[0].tok_embeddings(tokens)
    states, logits = [], []
    for one_copy in unrolled:
        for layer in one_copy.layers.values():
            hidden = layer(hidden, context)
        hidden = one_copy.norm(hidden)
        states.append(hidden)
        logits.append(one_copy.exit_gate(hidden))
    expected = LoopOutput(tuple(states), tuple(logits))
    total(expected).backward()

    torch.testing.assert_close(tensors(output), tensors(expected), rtol=0, atol=0)
    for name, parameter in looped.named_parameters():
        copies = [dict(m.named_parameters())[name].grad for m in unrolled]
        if all(gradient is None for gradient in copies):
            assert parameter.grad is None
            continue
        summed = sum(gradient for gradient in copies if gradient is not None)
        scale = summed.abs().max()
        assert torch.allclose(parameter.grad, summed, atol=FP32_TOLERANCE * float(scale), rtol=0)


def test_recurrent_steps_is_runtime_state():
    model = make_model()
    tokens, positions = make_batch()
    deep = model(tokens, positions, recurrent_steps=7)
    model.recurrent_steps = 2
    shallow = model(tokens, positions)
    assert (len(deep.hidden_RBLD), len(shallow.hidden_RBLD)) == (7, 2)
    assert torch.equal(deep.hidden_RBLD[1], shallow.hidden_RBLD[1])
    with pytest.raises(ValueError, match="recurrent_steps=0"):
        model(tokens, positions, recurrent_steps=0)


def test_tied_head_shares_the_embedding_and_sums_its_gradient():
    tied = make_model(tie_weights=True)
    assert tied.lm_head.weight is tied.tok_embeddings.weight
    untied = make_model(tie_weights=False)
    untied.load_state_dict(tied.state_dict())
    tokens, positions = make_batch()
    for model in (tied, untied):
        model.readout(model(tokens, positions).hidden_RBLD[-1]).square().mean().backward()
    summed = untied.lm_head.weight.grad + untied.tok_embeddings.weight.grad
    torch.testing.assert_close(tied.lm_head.weight.grad, summed, atol=1e-6, rtol=1e-5)


def _initial_gradient_norm(model: LoopDecoder, steps: int) -> float:
    tokens, labels = torch.randint(1024, (2, 1, 32), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    output = model(tokens, recurrent_steps=steps)
    for state in output.hidden_RBLD:
        assert 0.99 < float(state.detach().square().mean().sqrt()) < 1.01
    logits = model.readout(output.hidden_RBLD[-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    return float(
        torch.nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None)
    )


def test_initialisation_survives_eight_recurrent_steps_of_24_layers():
    """The R visits' gradients may add up, but must not multiply: with all norm gains 1 they do."""
    torch.manual_seed(0)
    options = OuroOptions(size="debugmodel", n_layers=24, vocab_size=1024)
    model = build_decoder(options, max_seq_len=64)
    growth = _initial_gradient_norm(model, 8) / _initial_gradient_norm(model, 1)
    assert growth < 4
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("post_norm.weight"):
                parameter.fill_(1.0)
    assert _initial_gradient_norm(model, 8) / _initial_gradient_norm(model, 1) > 20


def test_initializer_range_spreads_every_matrix_but_the_embedding():
    def spread(initializer_range: float) -> dict[str, Tensor]:
        torch.manual_seed(0)
        options = OuroOptions(
            size="debugmodel",
            initializer_range=initializer_range,
            positions="deberta",
            relative_window=16,
        )
        model = build_decoder(options, max_seq_len=32)
        return {name: p.detach() for name, p in model.named_parameters() if p.ndim > 1}

    published, wide = spread(0.02), spread(0.09)
    kept = {name for name in wide if torch.equal(wide[name], published[name])}
    assert kept == {"tok_embeddings.weight", "exit_gate.weight"}
    for name in wide.keys() - kept:
        torch.testing.assert_close(wide[name], published[name] * 4.5)
        assert 0.08 < wide[name].std() < 0.1, name


def test_keys_may_start_as_queries():
    def projections(**options: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
        torch.manual_seed(0)
        model = build_decoder(OuroOptions(size="debugmodel", **options), max_seq_len=8)
        layers = [layer.attention.qkv_linear for layer in model.layers.values()]
        return [(layer.wq.weight, layer.wk.weight, layer.wv.weight) for layer in layers]

    for own, shared in zip(projections(), projections(initial_keys="queries"), strict=True):
        assert torch.equal(own[0], shared[0])
        assert torch.equal(own[2], shared[2])
        assert not torch.equal(own[0], own[1])
        assert torch.equal(shared[0], shared[1])
        assert shared[0].data_ptr() != shared[1].data_ptr()  # and then learn on their own
