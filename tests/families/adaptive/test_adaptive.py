"""Adaptive loops and memory: layers from their formulas, refusals, decoding, compiled blocks."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from torchtitan.components.loss import IGNORE_INDEX

from tests.contracts.families import random_model
from tests.support.tiny import tiny_config, train_run
from titan_loop.cli.main import main
from titan_loop.families.adaptive.model import AdaptiveOptions
from titan_loop.families.adaptive.objective import PonderCostLoss
from titan_loop.inference.cache import FullCache
from titan_loop.inference.engine import Engine
from titan_loop.inference.rows import Request
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import build_decoder, decoder_config
from titan_loop.training.schedule import Schedule

EXACT = 1e-10  # both sides compute in float64
SEQ_LEN, VOCABULARY = 16, 128
MEMORY = {"local_slots": 5, "global_slots": 7}


def make(**options) -> LoopDecoder:
    """A model off its symmetric start, in float64."""
    model = random_model(AdaptiveOptions(**options), SEQ_LEN)
    for layer in model.layers.values():
        if layer.control is not None:
            torch.nn.init.normal_(layer.control.scale, -0.5)
    return model


def normed(x: Tensor, gain: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain + bias


def read(layer, number: int, bank, h: Tensor) -> Tensor:
    """W m of one token."""
    reader = layer.readers[number]
    query = normed(h, reader.query_gain)
    scores = torch.stack(
        [query @ normed(key, bank.key_gain) / math.sqrt(len(h)) for key in bank.keys]
    )
    return reader.output @ (scores.softmax(0) @ bank.values)


def remembered(layer, shared, h_LD: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Token by token: what memory makes of the states, and the gates of each bank."""
    rows, gates = [], []
    for h in h_LD:
        g = (layer.gates.weight @ h + layer.gates.bias).sigmoid()
        rows.append(h + g[0] * read(layer, 0, layer.bank, h) + g[1] * read(layer, 1, shared, h))
        gates.append(g)
    return torch.stack(rows), list(torch.stack(gates).T)


@pytest.mark.parametrize("slots", [{}, {"global_slots": 7}, MEMORY])
def test_flops_are_those_counted(slots):
    model = build_decoder(AdaptiveOptions(**slots), max_seq_len=SEQ_LEN)
    tokens = torch.zeros(1, SEQ_LEN, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:  # does not know attention on a CPU
        model.readout(model(tokens).hidden_RBLD[0]).sum().backward()
    flops = model.config.training_flops(SEQ_LEN, 1)
    assert counter.get_total_flops() == SEQ_LEN * (flops.total - flops.attention)


@torch.no_grad()
def test_layers_are_their_formulas():
    model = make(**MEMORY)
    tokens = torch.randint(VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(1))
    context = model.make_context(tokens)
    h = model.tok_embeddings(tokens)
    got = model(tokens)
    for number, layer in enumerate(model.layers.values()):
        alpha, norm = layer.control.scale.tolist(), layer.loop_norm
        left, out, expected = torch.ones(1, 9, 1).double(), 0.0, 0.0
        for t in (1, 2, 3):
            branch = layer.block(normed(h, norm.weight, norm.bias), context)
            h = h + math.log1p(math.exp(alpha[t - 1])) * branch
            seen = torch.cat([h, torch.full((1, 9, 1), t / 3, dtype=torch.float64)], dim=-1)
            w = torch.cat([layer.control.weight, layer.control.step_weight])
            p = 1 / (1 + torch.exp(-(seen @ w + layer.control.bias)))[..., None]
            p_halt = left if t == 3 else left * p
            left = left * (1 - p)
            out, expected = out + p_halt * h, expected + t * p_halt
        h, gates = remembered(layer, model.bank, out[0])
        h = h[None]
        kinds = ("iterations", "local_gates", "global_gates", "scales")
        iterations, local, global_, scales = (got.aux[kind][number] for kind in kinds)
        found = [iterations, local[0], global_[0], scales]
        wanted = [expected[..., 0], *gates, torch.tensor(alpha, dtype=torch.float64).exp().log1p()]
        torch.testing.assert_close(found, wanted, atol=EXACT, rtol=0)
    read_state = normed(h, model.norm.weight, model.norm.bias)
    torch.testing.assert_close(got.hidden_RBLD[0], read_state, atol=EXACT, rtol=0)


@pytest.mark.parametrize(("bias", "cost"), [(-800.0, 1.0), (800.0, 0.0), (0.7, None)])
def test_the_ponder_cost_is_between_0_and_1(bias: float, cost: float | None):
    model = make()
    with torch.no_grad():
        for layer in model.layers.values():
            layer.control.bias.fill_(bias)
    tokens = torch.randint(VOCABULARY, (2, 10))
    labels = tokens[:, 1:].clone()
    labels[0, :4] = IGNORE_INDEX
    loss_fn = PonderCostLoss.Config(ponder_weight=0.5).build()
    loss_fn.set_lm_head(model.lm_head)
    output = model(tokens[:, :-1])
    loss, metrics = loss_fn(output, labels, 14.0)
    loss.backward()
    loss = loss.detach()
    valid = labels != IGNORE_INDEX
    iterations = [float(layer[valid].mean()) for layer in output.aux["iterations"].detach()]
    by_hand = (sum(iterations) / 2 - 1) / (3 - 1)
    assert float(metrics["loops/cost"]) == pytest.approx(by_hand, abs=EXACT)
    assert float(loss) == pytest.approx(float(metrics["ce/step_1"]) + 0.5 * by_hand, abs=1e-6)
    assert [float(metrics[f"loops/layer_{n}"]) for n in (1, 2)] == pytest.approx(iterations)
    scales = F.softplus(model.layers["1"].control.scale).tolist()
    assert [float(metrics[f"loop_scale/layer_2_{t}"]) for t in (1, 2, 3)] == pytest.approx(scales)
    assert 0 < by_hand < 1 if cost is None else by_hand == pytest.approx(cost, abs=EXACT)


@torch.no_grad()
def test_the_state_in_the_loop_keeps_increments_that_bf16_would_round_away():
    torch.manual_seed(0)
    model = build_decoder(AdaptiveOptions(n_layers=1), max_seq_len=SEQ_LEN).bfloat16()
    layer = model.layers["0"]
    layer.control.float()
    h = torch.randn(1, 4, 64).sign().bfloat16()
    out, _ = layer(h, model.make_context(torch.zeros(1, 4, dtype=torch.int64)), (None,) * 3)
    assert out.dtype == torch.float32
    moved = (out - h.float()).abs()
    assert moved.min() > 0
    assert moved.median() < 2**-9  # half a unit in the last place of 1 in bf16


@torch.no_grad()
def test_generation_equals_the_full_forward():
    """Rows of several lengths that make room for others, with a slot for each iteration."""
    model = make(**MEMORY)
    prompts = [[5, 9, 77, 3, 20], [64], [1, 2, 3]]
    requests = [Request(prompt=prompt, max_new_tokens=6) for prompt in prompts]
    engine = Engine(model, kv_cache="averaged")
    assert engine.stack.make_cache(FullCache, steps=1, rows=1, capacity=1).shape.layers == 6
    completions = engine.complete(requests, rows=2)
    for request, completion in zip(requests, completions, strict=True):
        tokens = list(request.prompt)
        for token in completion.tokens:
            output = model(torch.tensor([tokens]))
            assert token == int(model.readout(output.hidden_RBLD[0])[0, -1].argmax())
            tokens.append(token)


@pytest.mark.usefixtures("alone")
def test_a_run_is_evaluated_at_its_only_depth(source, tmp_path, capfd):
    config = tiny_config(source, tmp_path, steps=2)
    config.model, config.recurrence.steps = AdaptiveOptions(n_layers=1), Schedule.constant(1)
    train_run(config)
    assert main(["eval", str(tmp_path), "--windows", "2"]) == 0
    assert "R = 1 (trained)" in capfd.readouterr().out


def test_a_frozen_model_reads_its_memory_forward_only():
    options = AdaptiveOptions(local_slots=8, global_slots=4)
    config = decoder_config(options, max_seq_len=16)
    whole, frozen = (config.training_flops(16, 1, each) for each in ("all", "exit_gate"))
    assert whole.matrices == 3 * frozen.matrices
