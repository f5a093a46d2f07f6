"""The coordinate check trains models of every width and R, and tells level ones from others."""

import json
from pathlib import Path

import pytest

from titan_loop.cli.main import main

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
