"""Laws: coefficients come back, held-out error chooses the form, tables and runs are read."""

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from tests.analysis.scaling.planted import BASE, GAINS, SIZES, TOKENS, by_gain, losses
from tests.evaluation.runs import write_checkpoint_of, write_run_of
from titan_loop.analysis.scaling.data import (
    STRETCHES,
    read_csv,
    read_runs,
    write_csv,
)
from titan_loop.analysis.scaling.fit import Fit, bootstrap, fit
from titan_loop.analysis.scaling.law import LAWS, Losses
from titan_loop.analysis.scaling.study import sizes_of, study
from titan_loop.cli.main import main
from titan_loop.errors import EXIT_USER_ERROR, UserError
from titan_loop.models.family import build_decoder
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.runs.saved_run import SavedRun
from titan_loop.runs.status import PlannedStage, write_plan
from titan_loop.storage.json_files import append_jsonl

JOINT, POWER = by_gain("power"), LAWS["power"]
BY_POWER = BASE | GAINS["power"]
NOISE = 0.01  # nats; twice the spread of three seeds of the quick start


@pytest.mark.parametrize("form", LAWS)
def test_planted_coefficients_are_recovered(form: str):
    law, planted, points = LAWS[form], BASE | GAINS[form], losses(by_gain(form))
    fitted = fit(law, points)
    assert {n: v / planted[n] for n, v in fitted.values.items()} == pytest.approx(
        dict.fromkeys(planted, 1.0), rel=0.02
    )
    assert fitted.r_squared(points) == pytest.approx(1, abs=1e-9)
    assert Fit(law, planted).predict(points) == pytest.approx(points.loss, rel=1e-12)


def test_phi_is_recovered_from_noisy_losses_and_lies_in_its_interval():
    points = losses(JOINT, noise=NOISE)
    fitted = bootstrap(fit(POWER, points), points, samples=40)
    assert fitted.values["phi"] == pytest.approx(GAINS["power"]["phi"], abs=0.03)
    low, high = fitted.intervals["phi"]
    assert low < fitted.values["phi"] < high < low + 0.2
    assert fitted.error(points) == pytest.approx(NOISE, rel=0.15)


@pytest.mark.parametrize("form", LAWS)
def test_held_out_error_chooses_the_form_that_made_the_losses(form: str):
    """Noise of 0.005 nats; tools/bench/law_choice.py has twenty seeds."""
    points = losses(by_gain(form), noise=0.005, seed=1, tokens=TOKENS[::3])
    (chosen,) = (law for law in study(points, samples=0) if law.chosen)
    assert chosen.fit.law.name == form
    assert [*chosen.held_out] == [
        "all but the largest size", "first half of the tokens", "all but the largest R",
    ]  # fmt: skip
    mask = points.steps < 8
    again = fit(LAWS[form], points[mask], starts=2).predict(points[~mask])
    expected = np.sqrt(np.mean((again - points.loss[~mask]) ** 2))
    assert chosen.held_out["all but the largest R"] == pytest.approx(expected, rel=1e-9)


@pytest.fixture
def roughly(monkeypatch) -> None:
    """Refine fits in a few steps, where coefficients do not matter."""
    monkeypatch.setattr("titan_loop.analysis.scaling.fit._EVALUATIONS", 5)


def test_too_few_values_of_r_or_points_choose_no_form_and_say_so(roughly):
    """At R = 1 and 2 all forms give the same losses; only a third R shows which one is right."""
    few = losses(JOINT, steps=(1, 2, 4), tokens=TOKENS[:2])
    for points, kinds, chosen, remark in (
        (losses(JOINT, steps=(1, 2), tokens=TOKENS[::4]), 2, 0, "2 values of R do not tell"),
        (losses(JOINT, steps=(1, 2, 4), tokens=TOKENS[::4]), 2, 1, "the largest R is not held"),
        (losses(JOINT, tokens=TOKENS[::4]), 3, 1, ""),
        (few[few.parameters < SIZES[2]], 0, 0, "too few points to hold any out"),
    ):
        laws = study(points, samples=0)
        assert {len(law.held_out) for law in laws} == {kinds}
        assert sum(law.chosen for law in laws) == chosen
        assert all(remark in law.remark for law in laws)
        assert bool(laws[0].remark) == bool(remark)


def test_sizes_are_widths_with_or_without_a_gate():
    """At 16/R layers of one width, N falls with R; a rank by N would call the largest R = 1."""
    points = losses(JOINT)
    shrunk = replace(points, parameters=points.parameters / points.steps)
    assert sizes_of(shrunk).tolist() == sizes_of(points).tolist()
    gated = replace(points, width=points.width + (points.steps > 1) * (2e3 + 1))
    assert sizes_of(gated).tolist() == sizes_of(points).tolist()


def write_table(path: Path) -> Path:
    write_csv(losses(JOINT, tokens=TOKENS[::4]), path)
    return path


def test_the_command_writes_record_and_plots(tmp_path: Path, capsys, roughly):
    path, output = write_table(tmp_path / "losses.csv"), tmp_path / "out"
    words = ["scaling", "--csv", str(path), "--output", str(output), "--bootstrap", "2"]
    assert main(words) == 0
    assert "power: L = E + A/(N + N_looped·(R^phi − 1))^alpha" in capsys.readouterr().out
    assert {file.name for file in output.iterdir()} == {
        "scaling.json", "iso_flop.png",
    }  # fmt: skip
    (law,) = (x for x in json.loads((output / "scaling.json").read_text())["laws"] if x["chosen"])
    assert law["form"] == "power"
    assert set(law["coefficients"]) == set(law["intervals"]) == set(BY_POWER)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.replace("recurrent_steps", "loops"), "lacks the columns recurrent_steps"),
        (lambda t: t.replace("374000000.0", "-1"), "parameters='-1' must be a positive number"),
        (lambda t: "\n".join(t.splitlines()[:1]), "has no rows below its header"),
        (lambda t: "\n".join(t.splitlines()[:6]), "fewer than the 7 coefficients"),
        (
            lambda t: "\n".join(t.splitlines()[i] for i in (0, *range(2, 80, 4))),
            "at least two values of R, and all points have 2",
        ),
    ],
)
def test_a_table_that_cannot_be_fitted_is_refused(tmp_path: Path, capsys, change, message: str):
    path = write_table(tmp_path / "losses.csv")
    path.write_text(change(path.read_text()))
    words = ["scaling", "--csv", str(path), "--output", str(tmp_path / "out")]
    assert main(words) == EXIT_USER_ERROR
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*words, "--skip", "1"]) == EXIT_USER_ERROR
    assert "skip=1.0 must be at least 0 and below 1" in capsys.readouterr().err
    assert main([*words[:-1], str(path)]) == EXIT_USER_ERROR
    assert f"output={path} cannot be written" in capsys.readouterr().err, "before the fits"


def write_run(source: Path, path: Path, *, steps: int, contents: str = "ab") -> Path:
    """A run whose logged losses follow the law."""
    write_run_of(source, path)
    for step in range(1, 2 * STRETCHES + 1):
        tokens = 10_000_000 * step
        record = {"step": step, "tokens": tokens, "recurrent_steps": steps}
        record["loss"] = JOINT(1e5, tokens, steps)
        append_jsonl(RunDirectory(path).metrics_jsonl, record)
    write_checkpoint_of(path, 3, data={"sources": [{"contents": contents, "share": 1.0}]})
    return path


def test_runs_give_averages_over_stretches_without_warm_up(source: Path, tmp_path: Path):
    run = write_run(source, tmp_path / "a", steps=4)
    points = read_runs([run])
    assert len(points) == STRETCHES - 1
    assert points.tokens[0] == pytest.approx(3.5e7)  # steps 3 and 4 of 40
    expected = np.mean([JOINT(1e5, t, 4) for t in (3e7, 4e7)])
    assert points.loss[0] == pytest.approx(expected, rel=1e-12)
    model = build_decoder(SavedRun(run).model_options, max_seq_len=8)
    tables = ("tok_embeddings.", "lm_head.")
    counted = [p.numel() for name, p in model.named_parameters() if not name.startswith(tables)]
    assert points.parameters[0] == points.looped[0] == sum(counted)
    assert points.width[0] == model.config.dim
    write_csv(points, tmp_path / "losses.csv")
    again = read_csv(tmp_path / "losses.csv")
    for name in (item.name for item in fields(Losses)):
        assert getattr(again, name).tolist() == getattr(points, name).tolist()
    late = points.late(0.5)
    assert late.tokens.tolist() == [t for t in points.tokens if t >= 0.5 * points.tokens.max()]
    other = write_run(source, tmp_path / "other", steps=4, contents="cd")
    with pytest.raises(UserError, match=r"other and .*a were trained on different data"):
        read_runs([run, other])


def test_a_recipes_controls_stay_out_of_its_law(source: Path, tmp_path: Path):
    stages = []
    for name, steps, control in (("looped", 4, False), ("standard", 2, True)):
        write_run(source, tmp_path / "study" / name, steps=steps)
        stages.append(PlannedStage(name, None, 1, control))
    write_plan(tmp_path / "study", "study", stages)
    assert set(read_runs([tmp_path / "study"]).steps) == {4}
    assert set(read_runs([tmp_path / "study" / "standard"]).steps) == {2}
