"""The best model for a budget: the paper's optima, the arithmetic, and limits nobody can meet."""

import json
import math
import re
import shlex
from dataclasses import replace

import pytest
import torch

from titan_loop.analysis.scaling.fit import Fit
from titan_loop.analysis.scaling.law import DENSE, with_repeats
from titan_loop.analysis.scaling.published import NamedLaw, read_law
from titan_loop.cli import plan
from titan_loop.cli.main import main
from titan_loop.cli.stage_flags import resolve_recipe
from titan_loop.errors import EXIT_USER_ERROR, UserError
from titan_loop.families.moe import budget as budget_module
from titan_loop.families.moe.budget import (
    Budget,
    Choice,
    Shape,
    budget_lines,
    ranked,
    ranking,
    recipe_words,
)
from titan_loop.training.chosen_model import stage_architecture

LIMITS = {"memory": None, "flops": 5e21}
DENSE_VALUES = {"E": 1.7, "A": 400.0, "alpha": 0.34, "B": 410.0, "beta": 0.28}


def chosen(parameters, *, experts=1, steps=1, tokens=2e10):
    """Return a model of a budget, whose loss and memory do not matter."""
    return Choice(
        parameters=parameters,
        looped=parameters,
        experts=experts,
        steps=steps,
        tokens=tokens,
        memory_bytes=1e9,
        loss=2.0,
        extrapolated=[],
    )


def flags_of(words):
    """Return flag → value; "" for switches."""
    pairs = zip(words, [*words[1:], "--"], strict=True)
    return {
        word: "" if value.startswith("--") else value
        for word, value in pairs
        if word.startswith("--")
    }


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


@pytest.mark.parametrize(
    "parameters", [5e4, 3e5, 1e6, 17.2e6, 3e7, 0.3e9, 0.6e9, 1.0e9, 2.5e9, 70e9]
)
def test_shapes_have_the_parameters_that_were_asked_for(parameters):
    shape = Shape.of(parameters)
    active = 4 * shape.dim**2 + 3 * shape.dim * shape.hidden_dim
    assert shape.parameters(1) == (active * shape.layers, active * shape.layers)
    assert active * shape.layers == pytest.approx(parameters, rel=0.02)
    assert 12 * shape.dim**2 * shape.layers == pytest.approx(parameters, rel=0.2)
    head_dim, rest = divmod(shape.dim, shape.heads)
    assert rest == 0
    assert head_dim in (16, 32, 64, 128)
    assert shape.heads >= 4
    assert shape.layers > 2 * shape.outside


def test_a_loop_takes_more_than_half_of_the_layers():
    shapes = [Shape(dim=128, layers=layers, hidden_dim=8) for layers in (1, 8, 9)]
    assert [shape.outside for shape in shapes] == [0, 0, 4]
    cache = Shape(dim=256, layers=10, hidden_dim=8).cache_bytes(3, 100)
    assert cache == 4 * (4 + 3 * 6) * 256 * 100
    assert Shape.of(1) == Shape(dim=16, layers=1, hidden_dim=8)


def test_the_words_of_a_dense_model():
    shape = Shape.of(1e9)  # (1e9 · 85 / 12)^(1/3) = 1920.6, and 1e9 / (12 · 1920²) = 22.6
    assert shape == Shape(dim=1920, layers=23, hidden_dim=4992)  # 1e9 / 23 = 4·1920² + 3·1920·4988
    recipe, *words = recipe_words(
        chosen(1e9, steps=3, tokens=2e10 + 0.4), Budget(flops=1e21, vocabulary=1000)
    )
    assert recipe == "nanbeige_quickstart"
    assert flags_of(words) == {
        "--model.tie-weights": "",
        "--model.dim": "1920",
        "--model.n-layers": "23",
        "--model.n-heads": "15",
        "--model.n-kv-heads": "15",
        "--model.hidden-dim": "4992",
        "--model.prelude-layers": "2",
        "--model.coda-layers": "2",
        "--model.vocab-size": "1000",
        "--recurrence.steps": "3",
        "--training.seq-len": "4096",
        "--training.local-batch-size": "1",
        "--batch.global-batch-tokens": "2097152",
        "--total-tokens": "20000000000",
    }


@pytest.mark.parametrize(
    ("parameters", "experts", "steps"),
    [(1e9, 1, 2), (1e9, 8, 2), (0.3e9, 16, 3), (2.5e9, 2, 1), (2e6, 4, 2)],
)
def test_the_recipe_has_the_parameters_of_the_choice(parameters, experts, steps):
    """Counted in the model that `plan` plans; the embedding is tied and left out."""
    choice = chosen(parameters, experts=experts, steps=steps)
    name, *flags = recipe_words(choice, Budget(flops=1e21, vocabulary=512))
    config = resolve_recipe(name, flags, verb="plan").stages[0].config
    model = stage_architecture(config)
    with torch.device("meta"):
        built = model.build()
    total = sum(parameter.numel() for parameter in built.parameters())
    embedding = 512 * Shape.of(parameters).dim
    assert total - embedding == pytest.approx(choice.total, rel=0.03)
    active = total - model.idle_parameters() - embedding
    assert active == pytest.approx(parameters, rel=0.03)
    norms = (2 * len(model.layers) + 1) * Shape.of(parameters).dim
    assert (active - norms, total - embedding - norms) == Shape.of(parameters).parameters(experts)
    assert config.recurrence.steps(0) == steps
    if experts > 1:
        assert (config.model.experts, config.model.top_k) == (experts, 1)
        assert not config.model.normalise_scores


@pytest.mark.parametrize(
    ("tokens", "batch", "window"),
    [
        (4.2e6, 4096, 512),  # 1,025 steps of eight windows
        (1e9, 2**19, 4096),
        (8e15, 2**21, 4096),
        (1e4, 512, 64),
    ],
)
def test_a_run_has_a_thousand_steps_of_eight_windows_or_more(tokens, batch, window):
    flags = flags_of(recipe_words(chosen(1e9, tokens=tokens), Budget(flops=1e21)))
    assert flags["--batch.global-batch-tokens"] == str(batch)
    assert flags["--training.seq-len"] == str(window)


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
        ({"inference_tokens": -1}, "--inference-tokens -1 must be a number of at least 0"),
        ({"inference_tokens": math.nan}, "--inference-tokens nan must be a number of at least 0"),
        ({"context_tokens": -1}, "--context-tokens -1 must be a number of at least 0"),
        ({"context_tokens": math.inf}, "--context-tokens inf must be a number of at least 0"),
        ({"unique_tokens": 0.0}, "--unique-tokens 0 must be a positive number"),
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


@pytest.mark.parametrize(("experts", "recipe"), [(16, "xllm_moe_ouro"), (1, "nanbeige_quickstart")])
def test_the_recipe_of_the_best_model_is_planned(experts, recipe, capsys):
    words = ["plan", "--budget", "5e21", "--memory", "3GB", "--most-experts", str(experts)]
    own = ["--no-memory", "--nodes", "2"]
    assert main([*words, *own]) == 0
    printed = capsys.readouterr().out
    assert "models fit 5e+21 FLOPs and 3 GB at 4 bits per weight; the best:" in printed
    command = next(line for line in printed.splitlines() if line.startswith("the best: "))
    budget = Budget(flops=5e21, memory_bytes=3e9, most_experts=experts)
    best = ranking(read_law("loop-moe"), budget)[0]
    assert (best.experts > 1) == (experts > 1)
    planned = ["titan-loop", "plan", *recipe_words(best, budget)]
    assert shlex.split(command.removeprefix("the best: ")) == [*planned, *own]
    assert f"{recipe} on 16 GPUs" in printed
    assert re.search(rf"^recurrent steps R, mean +{best.steps}$", printed, re.MULTILINE)


def test_the_best_dense_model_is_planned_where_experts_miss_the_size(monkeypatch):
    law = read_law("loop-moe")
    found = ranking(law, Budget(flops=5e21))
    dense = next(choice for choice in found if choice.experts == 1)
    assert dense is not found[0]
    monkeypatch.setattr(budget_module, "TOLERANCE", 0.0)
    lines, words = ranked(law, LIMITS)
    assert "xllm_moe_ouro cannot have the best model's shape: " in lines[-2]
    assert lines[-1] == (
        f"the best dense one, number {found.index(dense) + 1} with loss {dense.loss:.4f}, gives up "
        f"{dense.loss - found[0].loss:.4f}:"
    )
    assert words == recipe_words(dense, Budget(flops=5e21))
    monkeypatch.setattr(budget_module, "ranking", lambda law, budget: found[:1])
    lines, words = ranked(law, LIMITS)
    assert lines[-1].endswith("and no dense model fits: nothing is planned")
    assert words == []


def test_sizes_below_the_smallest_shape_miss_the_tolerance():
    law = read_law("loop-moe")
    tiny = replace(law, grid={**law.grid, "parameters": [37e3], "experts": [16]})
    lines, words = ranked(tiny, {**LIMITS, "flops": 1e17})
    assert "not 3.7e+04 of 4.07e+05; " not in lines[-1]
    assert "cannot have the best model's shape" in lines[-1]
    assert words == []


def repeating_law():
    law = with_repeats(DENSE["power"])
    values = {**DENSE_VALUES, "phi": 0.5, "reuse": 15.4}
    limits = {"parameters": (1e8, 1e9), "tokens": (1e9, 4e10), "recurrent_steps": (1.0, 4.0)}
    return NamedLaw("mine", Fit(law, values, 0.01), "a test", limits)


def test_text_that_is_read_again_is_worth_less():
    """Muennighoff et al., Eq. 5, written out; the best model is larger where text is short."""
    law, unique = repeating_law(), 2e9
    found = ranking(law, Budget(flops=1e21, unique_tokens=unique))
    for choice in found:
        again = max(1.0, choice.tokens / unique) - 1
        counted = min(choice.tokens, unique) * (1 + 15.4 * (1 - math.exp(-again / 15.4)))
        size = choice.parameters + choice.looped * (choice.steps**0.5 - 1)
        expected = 1.7 + 400.0 * size**-0.34 + 410.0 * counted**-0.28
        assert choice.loss == pytest.approx(expected, rel=1e-12)
    enough = ranking(law, Budget(flops=1e21))
    assert found[0].visited > enough[0].visited
    assert ranking(law, Budget(flops=1e21, unique_tokens=1e15)) == enough
    lines, words = ranked(law, {**LIMITS, "flops": 1e21, "unique_tokens": unique})
    assert "models fit 1e+21 FLOPs and 2e+09 tokens of text at 4 bits" in lines[2]
    assert flags_of(words)["--dataloader.unique-tokens"] == "2000000000"
    assert "--dataloader.unique-tokens" not in ranked(law, {**LIMITS, "unique_tokens": 1e15})[1]


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
        (
            "--budget 5e11",
            "--budget 5e+11 is in FLOPs, about 6 × parameters × tokens, and trains the best model, "
            "of 3e+08 parameters, on 278 tokens: its loss",
        ),
        ("--budget 5e21 --inference-tokens nan", "--inference-tokens nan must be a number"),
        (
            "--budget 5e21 --unique-tokens 1e9",
            "--unique-tokens 1e+09 has no effect with --law loop-",
        ),
        ("--budget 5e21 --law ouro", "law=ouro: its source publishes no E, A, B, C, alpha"),
    ],
)
def test_limits_that_nobody_can_meet_are_one_line(flags, message, capsys):
    assert main(["plan", *flags.split()]) == EXIT_USER_ERROR
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "ouro_1_4b --budget 5e21",
        "my.module:mine --budget=5e21",
        "--budget 5e21 --nodes 2 ouro_1_4b",
    ],
)
def test_a_recipe_beside_a_budget_is_refused_before_the_table(words, capsys):
    assert main(["plan", *words.split()]) == EXIT_USER_ERROR
    printed = capsys.readouterr()
    recipe = "my.module:mine" if "mine" in words else "ouro_1_4b"
    assert f"so recipe {recipe} has no effect: leave it out, or leave --budget" in printed.err
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1


def test_a_recipes_name_may_be_a_flags_value(monkeypatch):
    planned = []
    monkeypatch.setattr(plan, "command", lambda name: lambda function: planned.append)
    plan.best(["--nodes", "2", "--dump-folder", "quickstart"], budget=5e21)
    assert planned[0][-4:] == ["--nodes", "2", "--dump-folder", "quickstart"]
