"""The best model for a budget: the paper's optima, the arithmetic, and limits nobody can meet."""

import json
import math
import shlex

import pytest

from titan_loop.analysis.scaling.published import read_law
from titan_loop.cli.main import main
from titan_loop.errors import EXIT_USER_ERROR, UserError
from titan_loop.families.moe.budget import (
    Budget,
    Choice,
    Shape,
    budget_lines,
    ranking,
    recipe_flags,
)


def published_loss(n, looped, total, tokens, steps, experts):
    """arXiv 2609.40316 written out with its own signs; N and D in billions."""
    first = 1 / (1 / 1.3174 - 1 / 57.1201)
    x = 1 / (1 / (experts - 1 + first) + 1 / 57.1201)
    gain = (n / total) ** -0.3286
    effective = n + 0.3682 * gain * looped * (1 - math.exp(-(steps - 1) / (1.4037 * gain)))
    by_size = 0.8085 * x**-0.1935 * effective ** (-0.1951 - 0.0137 * math.log(x))
    by_tokens = 3.4291 * x**-0.2056 * tokens ** (-0.7548 + 0.0881 * math.log(x))
    return by_size + by_tokens + 1.3555


def test_the_published_joint_optima():
    """Table C.3b: 5e21 FLOPs and weights of four bits in 1, 3 and 10 GB."""
    law = read_law("loop-moe")
    found = [ranking(law, Budget(flops=5e21, memory_bytes=g * 1e9))[0] for g in (1, 3, 10)]
    assert [(c.parameters, c.experts, c.steps) for c in found] == [
        (1.0e9, 2, 2),
        (1.0e9, 8, 2),
        (1.6e9, 16, 1),
    ]


def test_every_choice_obeys_its_limits_and_its_loss_is_the_law():
    budget = Budget(
        flops=5e21, memory_bytes=6e9, inference_tokens=2e11, context_tokens=4096, weight_bits=8
    )
    found = ranking(read_law("loop-moe"), budget)
    assert len(found) > 20
    assert [c.loss for c in found] == sorted(c.loss for c in found)
    for choice in found:
        shape = Shape.of(choice.parameters)
        loop = shape.layers - 4
        visited = choice.parameters * (4 + choice.steps * loop) / shape.layers
        spent = 6 * visited * choice.tokens + 2 * visited * 2e11
        assert spent == pytest.approx(5e21, rel=1e-9)
        total = choice.parameters * (1 + 2 / 3 * (choice.experts - 1))
        cache = 4 * (4 + choice.steps * loop) * shape.dim * 4096
        stored = total + 128_256 * shape.dim + cache
        assert choice.memory_bytes == pytest.approx(stored, rel=1e-12)
        assert choice.memory_bytes <= 6e9
        billions = (choice.parameters / 1e9, choice.looped / 1e9, total / 1e9, choice.tokens / 1e9)
        expected = published_loss(*billions, choice.steps, choice.experts)
        assert choice.loss == pytest.approx(expected, rel=1e-12)


def test_tokens_served_make_models_smaller_and_shallower():
    law = read_law("loop-moe")
    visited = [
        ranking(law, Budget(flops=5e21, memory_bytes=3e9, inference_tokens=served))[0].visited
        for served in (0, 1e11, 2e12)
    ]
    assert visited[0] > visited[1] > visited[2]


def test_fixed_tokens_leave_out_models_that_cost_more():
    found = ranking(read_law("loop-moe"), Budget(flops=5e21, tokens=1e12))
    assert {choice.tokens for choice in found} == {1e12}
    assert all(6 * choice.visited * 1e12 <= 5e21 for choice in found)


@pytest.mark.parametrize("parameters", [1e6, 3e7, 0.3e9, 1.0e9, 2.5e9, 70e9])
def test_shapes_have_about_the_parameters_that_were_asked_for(parameters):
    shape = Shape.of(parameters)
    assert 12 * shape.dim**2 * shape.layers == pytest.approx(parameters, rel=0.35)
    assert shape.dim % 128 == 0
    assert shape.layers > 2 * shape.outside


def test_a_loop_takes_more_than_half_of_the_layers():
    assert [Shape(dim=128, layers=layers).outside for layers in (1, 8, 9)] == [0, 0, 4]
    assert Shape(dim=256, layers=10).cache_bytes(3, 100) == 4 * (4 + 3 * 6) * 256 * 100
    assert Shape.of(1) == Shape(dim=128, layers=1)


def test_the_flags_of_a_shape():
    choice = Choice(
        parameters=1e9,
        looped=1e9,
        experts=1,
        steps=3,
        tokens=2e10 + 0.4,
        memory_bytes=1e9,
        loss=2.0,
        extrapolated=[],
    )
    shape = Shape.of(1e9)  # (1e9 · 85 / 12)^(1/3) = 1920.6, and 1e9 / (12 · 1920²) = 22.6
    assert shape == Shape(dim=1920, layers=23)
    words = recipe_flags(choice, 1000)
    flags = dict(zip(words[::2], words[1::2], strict=True))
    assert flags == {
        "--model.dim": "1920",
        "--model.n-layers": "23",
        "--model.n-heads": "15",
        "--model.n-kv-heads": "15",
        "--model.hidden-dim": "5120",
        "--model.prelude-layers": "2",
        "--model.coda-layers": "2",
        "--model.vocab-size": "1000",
        "--recurrence.steps": "3",
        "--training.seq-len": "4096",
        "--training.local-batch-size": "1",
        "--batch.global-batch-tokens": "2097152",
        "--total-tokens": "20000000000",
    }


def test_a_row_of_the_table():
    """A model that visits 1.5e9 parameters twice a token served, of a budget of 1e21 FLOPs."""
    law = read_law("loop-moe")
    sizes = {"parameters": 1e9, "looped": 0.5e9, "experts": 2, "steps": 2, "tokens": 3e9}
    found = [
        Choice(**sizes, memory_bytes=5e8, loss=2.25, extrapolated=[]),
        Choice(**sizes, memory_bytes=5e8, loss=2.5, extrapolated=["tokens 1 to 2"]),
        *[Choice(**sizes, memory_bytes=5e8, loss=3.0, extrapolated=["R 1 to 2"])] * 9,
    ]
    lines = budget_lines(law, Budget(flops=1e21, inference_tokens=1e11), found)
    assert lines[2] == "11 models fit 1e+21 FLOPs at 4 bits per weight; the best:"
    first, second, *_, last, note = lines[4:]
    assert first.split() == ["1", "1B", "2", "2", "3B", "0.50", "GB", "30%", "2.2500", "0.0000"]
    assert second.split() == ["2*", "1B", "2", "2", "3B", "0.50", "GB", "30%", "2.5000", "0.2500"]
    assert last.startswith("10*")
    assert note == "* extrapolated: the law was fitted to R 1 to 2, tokens 1 to 2"
    assert not budget_lines(law, Budget(flops=1e21), found[:1])[-1].startswith("*")


def test_nothing_served_and_a_whole_budget_are_limits_that_can_be_met():
    Budget(flops=1e21, inference_tokens=0, context_tokens=0, tokens=9e20, most_experts=1).check()
    for wrong, message in (
        ({"inference_tokens": -1}, "--inference-tokens and --context-tokens must be at least 0"),
        ({"context_tokens": -1}, "--inference-tokens and --context-tokens must be at least 0"),
        ({"tokens": 1e21}, "--tokens 1e.21 is not below --budget 1e.21"),
        ({"inference_tokens": 1e21}, "--inference-tokens 1e.21 is not below"),
        ({"memory_bytes": 0.0}, "--memory 0 must be a positive number"),
        ({"weight_bits": math.inf}, "--weight-bits inf must be a positive number"),
    ):
        with pytest.raises(UserError, match=message):
            Budget(flops=1e21, **wrong).check()


def test_a_limit_holds_where_it_is_just_met():
    law = read_law("loop-moe")
    best = ranking(law, Budget(flops=1e20, weight_bits=8, most_experts=4))[0]
    assert max(c.experts for c in ranking(law, Budget(flops=1e20, most_experts=4))) == 4
    exact = Budget(flops=1e20, weight_bits=8, most_experts=4, memory_bytes=best.memory_bytes)
    assert ranking(law, exact)[0] == best
    less = Budget(flops=1e20, weight_bits=8, most_experts=4, memory_bytes=best.memory_bytes - 1)
    assert ranking(law, less)[0] != best
    smallest = min(c.parameters for c in ranking(law, Budget(flops=1e20)))
    assert {c.tokens for c in ranking(law, Budget(flops=6 * smallest))} == {1}
    with pytest.raises(UserError, match="no model fits"):
        ranking(law, Budget(flops=5.9 * smallest))
    spent = Budget(flops=1e20, weight_bits=8, most_experts=4, tokens=best.tokens)
    assert ranking(law, spent)[0].parameters == best.parameters


def test_the_recipe_of_the_best_dense_model_is_planned(capsys):
    words = ["plan", "--budget", "5e21", "--memory", "1GB", "--most-experts", "1", "--no-memory"]
    assert main([*words, "--nodes", "2"]) == 0
    printed = capsys.readouterr().out
    assert "models fit 5e+21 FLOPs and 1 GB at 4 bits per weight; the best:" in printed
    command = next(line for line in printed.splitlines() if line.startswith("the best: "))
    flags = shlex.split(command)
    best = ranking(read_law("loop-moe"), Budget(flops=5e21, memory_bytes=1e9, most_experts=1))[0]
    assert set(recipe_flags(best, 128_256)) <= set(flags)
    assert flags[-3:] == ["--no-memory", "--nodes", "2"]
    assert f"recurrent steps R, mean                      {best.steps}" in printed


def test_a_law_of_ones_own_is_searched_beyond_its_sizes(tmp_path):
    record = {
        "name": "worth of a step, power", "form": "power", "chosen": True, "source": "a test",
        "coefficients": {"E": 1.7, "A": 400.0, "alpha": 0.34, "B": 410.0, "beta": 0.28, "phi": 0.5},
        "rmse": 0.01,
        "range": {"parameters": [1e8, 1e9], "tokens": [1e9, 4e10], "recurrent_steps": [1, 4]},
    }  # fmt: skip
    path = tmp_path / "scaling.json"
    path.write_text(json.dumps({"format_version": 3, "laws": [record]}))
    found = ranking(read_law(str(path)), Budget(flops=1e21))
    assert {choice.experts for choice in found} == {1}
    assert {choice.steps for choice in found} == {1, 2, 4}
    assert max(choice.parameters for choice in found) == pytest.approx(1e10)
    assert found[0].extrapolated == ["tokens 1e+09 to 4e+10"] or "parameters" in str(found[0])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--budget -1", "--budget -1 must be a positive number"),
        ("--budget 5e21 --memory 3xB", "--memory 3xB is not a number of bytes; write it as 3GB"),
        ("--budget 1", "no model fits --budget 1 with the other limits"),
        ("--budget 5e21 --memory 1MB", "no model fits --budget 5e+21 with the other limits"),
        ("--budget 5e21 --tokens 6e21", "--tokens 6e+21 is not below --budget 5e+21: the budget"),
        ("--budget 5e21 --inference-tokens 1e14", "no model fits"),
        ("--budget 5e21 --law ouro", "law=ouro: its source publishes no E, A, B, C, alpha"),
    ],
)
def test_limits_that_nobody_can_meet_are_one_line(flags, message, capsys):
    assert main(["plan", *flags.split()]) == EXIT_USER_ERROR
    assert message in capsys.readouterr().err
