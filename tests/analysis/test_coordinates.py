"""The coordinate check trains models of every width and R, and tells level ones from others."""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from titan_loop.analysis import coordinates as module
from titan_loop.analysis.coordinates import Coordinates, analyse_coordinates, coordinates
from titan_loop.cli.main import main
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.inference.loading import load_checkpoint
from titan_loop.models.family import build_decoder

WIDE = ["--widths", "32", "128", "--recurrent-steps", "1", "2", "--updates", "3", "--rate", "0.01"]


ONE = ["--widths", "32", "--recurrent-steps", "1", "--updates", "2", "--rate"]


def moved(run: Path, *flags: str) -> dict[tuple[int, int], float]:
    assert main(["analyse", "coordinates", str(run), *WIDE, *flags]) == 0
    (record,) = (run / "evals").glob("coordinates-step-*.json")
    found = json.loads(record.read_text())["coordinates"]
    return {(each["recurrent_steps"], each["width"]): each["logits_moved"][0] for each in found}


def test_the_width_rule_levels_the_first_update(text_run: Path, capsys):
    without, level = moved(text_run, "--base-width", "0"), moved(text_run, "--base-width", "64")
    assert [*level] == [(steps, width) for steps in (1, 2) for width in (32, 128)]
    for steps in (1, 2):
        # AdamW moves a logit by all of its D columns.
        assert without[steps, 128] / without[steps, 32] > 1.5
        assert level[steps, 128] / level[steps, 32] == pytest.approx(1, abs=0.4)
    assert "states move" in capsys.readouterr().out
    assert (text_run / "plots" / "coordinates.png").exists()


def test_a_small_rate_moves_little(text_run: Path):
    assert main(["analyse", "coordinates", str(text_run), *ONE, "1e-6"]) == 0
    (record,) = (text_run / "evals").glob("coordinates-step-*.json")
    (found,) = json.loads(record.read_text())["coordinates"]
    assert 0 < max(*found["moved"], *found["logits_moved"]) < 1e-3


def test_mistakes(text_run: Path, capsys):
    assert main(["analyse", "coordinates", str(text_run)]) == 2
    assert "has no schedule; give --rate" in capsys.readouterr().err
    assert main(["analyse", "coordinates", str(text_run), *WIDE, "--widths", "17"]) == 2
    assert "widths=17 must be a multiple of" in capsys.readouterr().err
    assert main(["analyse", "coordinates", str(text_run), *WIDE, "--updates", "9999"]) == 2
    assert "updates=9999 need 39996 held-out windows" in capsys.readouterr().err
    assert main(["analyse", "coordinates", str(text_run), "--rate", "1"]) == 2
    assert "rate=1.0 must be above 0 and below 1" in capsys.readouterr().err
    assert main(["analyse", "coordinates", str(text_run), "--updates", "1"]) == 2
    assert "updates=1 must be at least 2" in capsys.readouterr().err
    assert main(["analyse", "coordinates", str(text_run), *WIDE, "--widths", "8"]) == 2
    assert "widths=8 must be a multiple of 16, the width of a head" in capsys.readouterr().err
    assert main(["analyse", "coordinates", str(text_run), "--rate", "0"]) == 2
    assert "rate=0.0 must be above 0 and below 1" in capsys.readouterr().err


def test_heads_keep_their_width_and_rates_are_those_of_the_run(text_run: Path, monkeypatch):
    made: list[dict[str, Any]] = []

    def note(run, options, tokens_WL, labels_WL, *, rate):
        made.append({**asdict(options), "rate": rate, "windows": len(tokens_WL)})
        moved = float(len(made)), 4.0 * len(made)
        return Coordinates(options.dim, options.recurrent_steps, 1.0, moved, moved, 5.0)

    def load(run):
        loaded = load_checkpoint(run)
        knots = [{"value": 0.01}, {"value": 0.03}, {"value": 0.02}]
        loaded.run.config["learning_rate"] = {"knots": knots}
        return loaded

    monkeypatch.setattr(module, "coordinates", note)
    monkeypatch.setattr(module, "load_checkpoint", load)
    found = analyse_coordinates(text_run)
    want = [(steps, width) for steps in (1, 2, 4, 8) for width in (64, 128, 256)]
    assert [(each["recurrent_steps"], each["dim"]) for each in made] == want
    for each in made:
        assert (each["n_heads"], each["hidden_dim"]) == (each["dim"] // 16, 3 * each["dim"])
        assert each["n_kv_heads"] == each["n_heads"]
        assert (each["rate"], each["windows"]) == (0.03, 32)
    assert found.lines == ["states move 12.00 times as far in the model that moves furthest"]
    analyse_coordinates(text_run, widths=(16,), recurrent_steps=(3,), updates=2, base_width=32)
    assert made[-1]["dim"] == 16
    assert made[-1]["n_heads"] == made[-1]["n_kv_heads"] == 1
    assert (made[-1]["base_width"], made[-1]["windows"]) == (32, 8)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_sizes_are_those_of_the_untrained_model_and_losses_of_the_last_update(optimizer):
    run: Any = SimpleNamespace(optimizer=optimizer, config={})
    tokens = torch.randint(128, (12, 16), generator=torch.Generator().manual_seed(3))
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    options = OuroOptions(size="debugmodel", recurrent_steps=2)
    found = coordinates(run, options, tokens, labels, rate=1e-9)
    torch.manual_seed(0)
    model = build_decoder(options, max_seq_len=16).eval()
    seen = []
    model.observe = lambda state, step, layer: seen.append((step, layer, state))
    with torch.no_grad():
        model(tokens[:4])
        logits = model.readout(model(tokens[8:], collect="last").hidden_RBLD[-1])
    last = max((each for each in seen[: len(seen) // 2] if each[0]), key=lambda each: each[:2])
    assert (found.width, found.recurrent_steps) == (64, 2)
    assert found.size == pytest.approx(last[2].square().mean().sqrt().item(), rel=1e-6)
    loss = F.cross_entropy(logits.flatten(0, 1), labels[8:].flatten())
    assert found.loss == pytest.approx(loss.item(), rel=1e-4)
    assert 0 < found.moved[0] < found.moved[1] < 1e-4
    assert 0 < found.logits_moved[0] < found.logits_moved[1] < 1e-4
