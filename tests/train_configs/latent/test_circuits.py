"""Planted activations, matrices and models are found as what they are."""

from typing import Any

import numpy as np
import pytest
import torch

from titan_loop.families.latent.model import LatentDecoder, LatentOptions
from titan_loop.models.family import build_decoder
from train_configs.latent.circuits import (
    circuit_tables,
    find_circuits,
    frequency_groups,
    frequency_patterns,
    look,
    probe_of,
    relative_variance,
)
from train_configs.latent.solved import share_repaired
from train_configs.latent.task import DagArithmetic, Size

TASK = DagArithmetic(modulus=5, nodes=8, leaves=4, names=16, test_nodes=(8,))
NODES = Size(8, None)


def model(**changed: Any) -> LatentDecoder:
    torch.manual_seed(0)
    given = {"vocab_size": 7, "factors": TASK.factor_sizes, "relative_window": 8, **changed}
    options = LatentOptions(**given)
    built = build_decoder(options, max_seq_len=120).eval()
    assert isinstance(built, LatentDecoder)
    return built


def test_relative_variance_by_hand():
    outputs = torch.tensor([[3.0, 1.0], [3.0, -1.0]])
    assert relative_variance(outputs) == pytest.approx(1 / 10)
    assert relative_variance(outputs[:1].repeat(5, 1)) == 0


@pytest.mark.parametrize(
    ("pattern", "frequencies"),
    [
        ("0 0 0", (0, 0, 0)),
        ("j 0 0", (0, 2, 0)),
        ("j k 0", (1, 0, 2)),
        ("j j 0", (2, 2, 0)),
        ("j j j", (2, 2, 2)),
        ("j j k", (1, 1, 2)),
        ("j k l", (1, 2, 3)),
    ],
)
def test_a_wave_stands_in_the_group_of_its_frequencies(pattern, frequencies):
    m = 7
    values = np.stack(np.meshgrid(*[np.arange(m)] * 3, indexing="ij"), axis=-1)
    phase = 2 * np.pi * (values @ np.array(frequencies)) / m
    norms = frequency_groups(np.stack([np.cos(phase), 3 * np.sin(phase)], axis=-1))
    assert list(norms) == frequency_patterns(3)
    assert max(norms, key=lambda name: norms[name]) == pattern
    assert sum(value > 1e-12 for value in norms.values()) <= 2  # −f may be of another pattern


@pytest.mark.parametrize("options", [{}, {"scale_scores_by_terms": True}, {"n_kv_heads": 2}])
def test_a_look_shows_the_step_and_its_heads(options):
    built = model(**options)
    (graph,) = TASK.held_out_questions(1, NODES)
    probe = probe_of(TASK, graph, (0, 1, 2), 15)
    states = probe.factors.repeat(2, 1, 1)
    states[1, probe.solved_at[0], 0] = 0
    seen = look(built, states, [probe.result] * 2)
    columns = {"factors": states[..., 1:]}
    hidden = built(states[..., 0], recurrent_steps=1, columns=columns).hidden_RBLD[0]
    assert torch.equal(built.lm_head(hidden)[:, probe.result].argmax(-1), seen.values)
    # The heads of a layer add up to the output of its attention.
    outputs: list[torch.Tensor] = []
    built.layers["0"].attention.register_forward_hook(lambda *given: outputs.append(given[-1]))
    built(states[..., 0], recurrent_steps=1, columns=columns)
    torch.testing.assert_close(seen.heads[0].sum(1), outputs[0][:, probe.result])


@torch.no_grad()
def test_a_planted_head_is_the_group_of_its_name():
    """One head looks at the first operand by its place and passes its variable on."""
    built = model()
    for factor, table in enumerate(built.tok_embeddings.weight.split(built.config.sizes)):
        table.mul_(1 if factor == 2 else 0.1)
    attention = built.layers["0"].attention
    distance = 2 * 3  # of the first of three operands from the result
    attend = attention.inner_attention.forward

    def looks(q, k, v, **named):
        out = attend(q, k, v, **named)
        out[:, distance:, 1] = v[:, :-distance, 1]
        return out

    attention.inner_attention.forward = looks
    found = find_circuits(built, TASK, nodes=8, samples=20)
    assert found.name_variance[0][1] > 0.3
    assert 1 in found.name_groups[0]
    assert all(row[1] == pytest.approx(0, abs=1e-6) for row in found.name_variance[1:])
    heads = circuit_tables(found)["Heads by the change they respond to"]
    assert heads[0][1:] == ["operand 1", "operand 2", "operand 3", "result"]
    assert "1" in heads[1][1].split()


def test_repair_counts_what_one_step_restores(monkeypatch):
    built = model()

    def solver(told: torch.Tensor, positions: torch.Tensor, **named) -> object:
        states.append(told)
        return type("Output", (), {"hidden_RBLD": (told,)})

    def share(says) -> float:
        class Model:
            config = built.config
            lm_head = staticmethod(says)
            __call__ = staticmethod(solver)

        return share_repaired(Model(), TASK, "8_nodes", count=20)  # type: ignore[arg-type]

    states: list[torch.Tensor] = []
    one_hot = torch.nn.functional.one_hot
    assert share(lambda state: one_hot(state, 7)) == 0  # repeats what it is told
    examples = [TASK.encode(q) for q in TASK.held_out_questions(20, TASK.strata["8_nodes"])]
    length = states[0].shape[1]
    solved = torch.zeros(20, length, dtype=torch.int64)
    for row, example in enumerate(examples):
        solved[row, : min(length, len(example.labels))] = torch.from_numpy(example.labels[:length])
    assert share(lambda state: one_hot(solved, 7)) == 1
    hit = (states[0] != solved) & (states[0] != TASK.empty)
    depths = [torch.from_numpy(example.columns["depth"]) for example in examples]
    for row in range(20):
        at = hit[row].nonzero().flatten()
        at = at[at < len(depths[row])]
        assert len(at)
        assert len({int(depths[row][a]) for a in at}) == 1  # of one step
