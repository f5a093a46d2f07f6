"""`titan-loop plan --match`: mixtures at a dense model's cost, counted here by hand."""

import re
from pathlib import Path

import pytest

from tests.support.tiny import tiny_config
from titan_loop.cli.main import main
from titan_loop.errors import EXIT_USER_ERROR, UserError
from titan_loop.families.moe import match
from titan_loop.families.moe.model import MoEOptions
from titan_loop.families.nanbeige.model import NanbeigeOptions
from titan_loop.models.family import ModelOptions, build_decoder
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

D, KEYS, F, V, L = 64, 32, 192, 128, 16
ATTENTION = 2 * D * (D + KEYS)


def run_of(model: ModelOptions, steps: int) -> LoopTrainer.Config:
    config = tiny_config(Path("nowhere"), Path("nowhere"), steps=4)
    config.model, config.training.seq_len = model, L
    config.recurrence.steps = Schedule.constant(steps)
    return config


def dense(layers: int, steps: int = 1) -> LoopTrainer.Config:
    return run_of(NanbeigeOptions(n_layers=layers, n_kv_heads=2, vocab_size=V), steps)


def costs_by_hand(
    layers: int, steps: int, width: int, experts: int = 0, top_k: int = 1
) -> tuple[int, int, int, int]:
    """Return parameters, those active, FLOPs of a token and bytes of it in the cache."""
    per_layer = ATTENTION + D * experts + 3 * D * width * top_k
    parameters = layers * (per_layer + 3 * D * width * max(0, experts - top_k) + 2 * D)
    flops = 6 * layers * steps * (per_layer + 2 * D * L) + 6 * D * V
    idle = layers * 3 * D * width * max(0, experts - top_k)
    total = parameters + D + 2 * V * D
    return total, total - idle, flops, layers * steps * 2 * KEYS * 2


@pytest.mark.parametrize("cost", ["flops", "parameters", "kv"])
def test_every_row_has_the_models_cost_within_a_percent(cost, monkeypatch):
    monkeypatch.setattr(match, "STEPS", (2, 3))
    monkeypatch.setattr(match, "EXPERTS", (8, 16))
    target = costs_by_hand(8, 1, F)
    lines = match.matched(dense(8), cost)
    model, *found = [re.findall(r"[-+.\de,]+", line) for line in lines if line[0] == " "]
    assert [float(cell.replace(",", "")) for cell in model] == [
        *(8, 1, F, *target[:2], pytest.approx(target[2], rel=1e-3), target[3])
    ]
    column = {"parameters": 0, "flops": 2, "kv": 3}[cost]
    others = [number for number in (0, 2, 3) if number != column]
    sums = []
    assert found
    for row in found:
        layers, steps, experts, top_k, width = map(int, row[:5])
        assert width % 8 == 0
        want = costs_by_hand(layers, steps, width, experts, top_k)
        assert abs(want[column] / target[column] - 1) <= 0.01
        shown = [float(cell.replace(",", "")) for cell in row[5:]]
        assert shown[::2] == [*want[:2], pytest.approx(want[2], rel=1e-3), want[3]]
        off = [want[number] / target[number] - 1 for number in range(4)]
        assert shown[1::2] == pytest.approx([100 * each for each in off], abs=0.051)
        sums.append(sum(abs(off[number]) for number in others))
    assert sums == sorted(sums)
    shapes = [(row[1], row[2]) for row in found]
    assert len(shapes) == len({*shapes})


def test_a_row_is_the_model_that_its_recipe_line_builds(monkeypatch):
    monkeypatch.setattr(match, "STEPS", (2,))
    monkeypatch.setattr(match, "EXPERTS", (8,))
    *_, row, line = match.matched(dense(4), "parameters")
    options = eval(line[line.index("MoEOptions(") : line.rindex(", recurrence")])
    options.vocab_size = V
    assert isinstance(options, MoEOptions)
    total = sum(p.numel() for p in build_decoder(options, max_seq_len=L).parameters())
    assert f" {total:,} " in row


def test_models_without_a_match_are_refused_in_a_line(monkeypatch):
    monkeypatch.setattr(match, "EXPERTS", (8,))
    with pytest.raises(
        UserError, match=r"within 1 %; the nearest, 1 layers at R = 2 .* at.*100.0 %"
    ):
        match.matched(dense(1), "kv")
    with pytest.raises(UserError, match="family=moe has experts already"):
        match.matched(run_of(MoEOptions(vocab_size=V), 2), "flops")
    narrow = dense(2)
    narrow.model.dim, narrow.model.n_heads, narrow.model.n_kv_heads = 12, 1, 1
    with pytest.raises(UserError, match=r"model\.dim=12 must be a multiple of 8"):
        match.matched(narrow, "flops")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--match flop nanbeige_quickstart", "--match flop is unknown; nearest: flops"),
        ("looped_moe_small --match=kv", "needs one stage of looped_moe_small: --stage with one of"),
        ("--match=kv looped_moe_small --nodes 2 --stage dense", "nodes"),
    ],
)
def test_mistakes_are_refused_before_anything_is_counted(words, message, capsys):
    assert main(["plan", *words.split()]) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_plan_counts_the_parameters_of_a_token(capsys):
    flags = ("--stage", "looped_moe", "--no-memory")
    assert main(["plan", "looped_moe_small", *flags]) in (0, EXIT_USER_ERROR)
    table = {line[:18].strip(): line[18:].split() for line in capsys.readouterr().out.splitlines()}
    total, active = (
        int(table[name][-1].replace(",", "")) for name in ("parameters", "active parameters")
    )
    idle = 2 * (17 - 2)  # experts of two layers, each of width 128
    assert total - active == 3 * 96 * 128 * idle
