"""What loops are worth by a fitted law: the law written out, and files that are no fit."""

import json
import re
from pathlib import Path

import pytest

from titan_loop.cli.main import main
from titan_loop.errors import EXIT_USER_ERROR

LAW = {"E": 1.7, "A": 400.0, "alpha": 0.34, "B": 410.0, "beta": 0.28, "phi": 0.5}
TABLES = 2 * 2048 * 49_152  # embedding and head, which laws do not count
TOTAL = LOOPED = 1_434_652_673 - TABLES
TOKENS = -(-3 * 10**12 // 2**23) * 2**23


def write_fit(path: Path, **change: object) -> Path:
    law = {
        "name": "worth of a step, power", "form": "power", "chosen": True, "source": "a test",
        "coefficients": LAW, "rmse": 0.01,
        "range": {
            "parameters": [1e8, 2e9], "tokens": [1e9, 4e12], "recurrent_steps": [1, 4],
        },
    }  # fmt: skip
    path.write_text(json.dumps({"format_version": 3, "laws": [{**law, **change}]}))
    return path


def predicted(parameters: float, looped: float, steps: float) -> float:
    effective = parameters - looped + looped * steps ** LAW["phi"]
    return LAW["E"] + LAW["A"] / effective ** LAW["alpha"] + LAW["B"] / TOKENS ** LAW["beta"]


def test_plan_prints_the_law_beside_the_gpu_days(tmp_path: Path, capsys):
    fit = write_fit(tmp_path / "scaling.json")
    words = ["plan", "ouro_1_4b", "--nodes", "64", "--stage", "1b", "--no-memory"]
    words += ["--law", str(fit)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    table = printed[printed.index("worth of the recurrent steps") :]
    rows = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()[3:6]]
    planned, without, unrolled = (row[-4:] for row in rows)
    assert planned[:2] == [f"{TOTAL:,}", "4"]
    assert float(planned[2]) == pytest.approx(predicted(TOTAL, LOOPED, 4), abs=1e-4)
    assert float(without[2]) == pytest.approx(predicted(TOTAL, LOOPED, 1), abs=1e-4)
    deep = TOTAL + 3 * LOOPED
    assert unrolled[:2] == [f"{deep:,}", "1"]
    assert float(unrolled[2]) == pytest.approx(predicted(deep, 4 * LOOPED, 1), abs=1e-4)
    days = [float(row[3].replace(",", "")) for row in (planned, without, unrolled)]
    assert days[0] == pytest.approx(4 * days[1], rel=1e-3)  # the readouts are visited R times, too
    assert days[1] < days[2] < days[0]
    assert "extrapolated" not in table


def test_a_prediction_outside_of_the_fitted_range_says_so(tmp_path: Path, capsys):
    fit = write_fit(tmp_path / "scaling.json")
    words = ["plan", "ouro_1_4b", "--nodes", "64", "--stage", "1a", "--no-memory"]
    words += ["--law", str(fit)]
    assert main(words) == 0
    assert "extrapolated: the law was fitted to recurrent_steps 1 to 4" in capsys.readouterr().out


def test_a_form_that_was_not_chosen_is_read_by_its_name(tmp_path: Path, capsys):
    fit = write_fit(tmp_path / "scaling.json", chosen=False)
    words = ["plan", "ouro_1_4b", "--nodes", "64", "--stage", "1b", "--no-memory"]
    assert main([*words, "--law", f"{fit}:power"]) == 0
    assert "R^phi" in capsys.readouterr().out


def test_what_is_no_law_is_refused(tmp_path: Path, capsys):
    unchosen = write_fit(tmp_path / "other.json", chosen=False)
    for law, message in (
        (unchosen, "has no chosen law; name one as"),
        (f"{unchosen}:bounded", "has no law of the form bounded; name one as"),
        (
            tmp_path / "gone.json",
            "is neither a file nor a published law (loop-moe)",
        ),
    ):
        assert main(["plan", "quickstart", "--law", str(law)]) == EXIT_USER_ERROR
        assert message in capsys.readouterr().err
