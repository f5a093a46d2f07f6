"""Which parameters decay, and that the rate is set from tokens."""

import torch

from titan_loop.models.exit_gate import freeze_all_but_the_exit_gate
from titan_loop.models.sizes import ModelOptions, build_decoder
from titan_loop.training.learning_rate import TokenLearningRate
from titan_loop.training.optimizer import AdamWConfig
from titan_loop.training.schedule import Schedule


def test_norms_and_gate_do_not_decay_and_everything_else_does():
    model = build_decoder(ModelOptions(size="debugmodel"), max_seq_len=32)
    (optimizer,) = (
        AdamWConfig(weight_decay=0.3).optimizer_config(exit_gate=True).build(model_parts=[model])
    )
    decayed, kept = set(), set()
    for group in optimizer.param_groups:
        (decayed if group["weight_decay"] else kept).update(group["param_names"])
        assert group["betas"] == (0.9, 0.95)
    names = {name for name, _ in model.named_parameters()}
    assert kept == {n for n in names if n.endswith("norm.weight") or n.startswith("exit_gate.")}
    assert decayed == names - kept
    assert {"tok_embeddings.weight", "lm_head.weight"} <= decayed


def test_a_frozen_language_model_has_no_group_and_the_gate_does_not_decay():
    model = build_decoder(ModelOptions(size="debugmodel"), max_seq_len=32)
    freeze_all_but_the_exit_gate(model)
    config = AdamWConfig(weight_decay=0.3).optimizer_config(exit_gate=True, trainable="exit_gate")
    (optimizer,) = config.build(model_parts=[model])
    (group,) = optimizer.param_groups
    assert set(group["param_names"]) == {"exit_gate.weight", "exit_gate.bias"}
    assert group["weight_decay"] == 0


def test_a_model_without_gate_is_fully_assigned():
    model = build_decoder(ModelOptions(size="debugmodel", exit_gate=False), max_seq_len=32)
    (optimizer,) = AdamWConfig().optimizer_config(exit_gate=False).build(model_parts=[model])
    assigned = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert sorted(assigned) == sorted(name for name, _ in model.named_parameters())


def test_the_rate_is_a_function_of_tokens_in_every_group():
    model = build_decoder(ModelOptions(size="debugmodel"), max_seq_len=32)
    optimizers = AdamWConfig().optimizer_config(exit_gate=True).build(model_parts=[model])
    schedule = Schedule.parse("0:0 linear 100:1e-2")
    rate = TokenLearningRate.Config(schedule=schedule).build(
        optimizers=optimizers, training_steps=5
    )
    assert rate.set_tokens(50) == 5e-3
    assert {g["lr"] for o in optimizers for g in o.param_groups} == {5e-3}
    before = {n: p.clone() for n, p in model.named_parameters()}
    rate.set_tokens(0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers.step()
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
