"""Studies: the form chosen by held-out error, the command, its page and its record."""

import contextlib
import io
import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.analysis.scaling.planted import (
    BY_POWER,
    PLANTED,
    SIZES,
    TOKENS,
    additive,
    by_gain,
    joint,
    losses,
    write_csv,
)
from titan_loop.analysis.scaling.data import (
    ScalingData,
    read_csv,
)
from titan_loop.analysis.scaling.fit import fit
from titan_loop.analysis.scaling.law import ADDITIVE, DENSE, POWER, with_repeats
from titan_loop.analysis.scaling.published import predicted, read_law
from titan_loop.analysis.scaling.study import (
    _chosen,
    _composed,
    _fitted,
    _fitted_forms,
    _subsets,
    sizes_of,
    study,
)
from titan_loop.cli.main import main
from titan_loop.errors import EXIT_USER_ERROR, UserError
from titan_loop.storage.json_files import write_json


@pytest.mark.parametrize("form", DENSE)
def test_held_out_error_chooses_the_form_that_made_the_losses(form: str):
    """Noise of 0.005 nats; tools/bench/law_choice.py has twenty seeds."""
    points = losses(by_gain(form), noise=0.005, seed=1, tokens=TOKENS[::3])
    laws = _chosen(_fitted_forms(DENSE, points, samples=0, seed=0))
    (chosen,) = (law for law in laws if law.chosen)
    assert chosen.fit.law.name == form
    kinds = [hold_out.kind for hold_out in chosen.hold_outs]
    assert kinds == [
        "all but the largest size", "first half of the tokens", "all but the largest R",
    ]  # fmt: skip
    mask = points.steps < 8
    again = fit(DENSE[form], points[mask], starts=2).predict(points[~mask])
    expected = np.sqrt(np.mean((again - points.loss[~mask]) ** 2))
    assert chosen.hold_outs[2].rmse[0] == pytest.approx(expected, rel=1e-9)


def test_a_gate_makes_no_size_of_its_own():
    gated = losses(additive, steps=(1, 2, 4), tokens=TOKENS[::4])
    gated.width[gated.steps > 1] += 2e3 + 1  # R = 1 has no exit gate
    assert np.array_equal(
        sizes_of(gated), sizes_of(losses(additive, steps=(1, 2, 4), tokens=TOKENS[::4]))
    )
    by_size, *_ = _fitted("total loss", ADDITIVE, gated, samples=0, seed=0).hold_outs
    assert (by_size.kind, len(by_size.r_squared)) == ("3 of 5 sizes", 10)


def test_subsets_of_many_sizes_are_drawn_with_a_seed():
    drawn = _subsets(25, 15, seed=0)
    assert len(set(drawn)) == 10
    assert drawn == _subsets(25, 15, seed=0) != _subsets(25, 15, seed=1)
    assert len({subset[:12] for subset in drawn}) > 1  # ten enumerated ones share the smallest 14
    assert _subsets(5, 3, seed=0) == list(itertools.combinations(range(5), 3))


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, Path, str]:
    """A table of losses, the folder that the command wrote from it, and its printed text."""
    folder = tmp_path_factory.mktemp("study")
    path, output, printed = write_csv(folder / "losses.csv"), folder / "out", io.StringIO()
    words = ["scaling", "--csv", str(path), "--output", str(output), "--bootstrap", "2"]
    with contextlib.redirect_stdout(printed):
        assert main([*words, "--exit-pmf", "0.1", "0.2", "0.3", "0.4"]) == 0
    return path, output, printed.getvalue()


def test_the_command_writes_table_page_and_record(written):
    _, output, printed = written
    assert "total loss: L = E + A/(N + t1)^alpha" in printed
    assert "phi" in printed
    page = (output / "scaling.html").read_text()
    assert page.count("<img") == 8
    assert "0.9596" in page
    record = json.loads((output / "scaling.json").read_text())
    (total,) = (law for law in record["laws"] if law["name"] == "total loss")
    assert set(total["coefficients"]) == set(PLANTED) == set(total["intervals"])


def test_a_study_composes_the_total_loss_from_the_steps(written):
    path, output, _ = written
    record = json.loads((output / "scaling.json").read_text())
    (composed,) = record["compositions"]
    assert composed["r_squared"] == pytest.approx(1, abs=1e-6)
    data = read_csv(path)
    by_step, total = fit(ADDITIVE, data.by_step[4]), data.total[data.total.steps == 4]
    assert _composed(by_step, np.full(4, 0.25), total) < composed["r_squared"] - 1e-3
    (step_law,) = (law for law in record["laws"] if law["name"] == "steps of R = 4")
    assert set(step_law["hold_outs"]) == {
        "2 of 4 sizes", "first 25% of the tokens", "first 50% of the tokens",
        "first 75% of the tokens", "3 of 4 values of R",
    }  # fmt: skip
    assert any("2 values of R" in remark for law in record["laws"] for remark in law["remarks"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.replace("recurrent_steps", "loops"), "lacks the columns recurrent_steps"),
        (lambda t: t.replace("step,", "R,", 1), "has two columns for recurrent_steps"),
        (lambda t: t.replace("374000000.0", "-1"), "parameters='-1' must be a positive number"),
        (lambda t: t.replace("374000000.0", "many"), "parameters='many' must be a positive"),
        (lambda t: "\n".join(t.splitlines()[:1]), "has no rows below its header"),
        (lambda t: "\n".join(t.splitlines()[:9]), "fewer than the 10 coefficients"),
        (
            lambda t: "\n".join(x for x in t.splitlines() if x.split(",")[2] in "recurrent_steps2"),
            "at least two values of R, and all points have 2",
        ),
    ],
)
def test_a_table_that_cannot_be_fitted_is_refused(tmp_path: Path, capsys, change, message: str):
    path = write_csv(tmp_path / "losses.csv")
    path.write_text(change(path.read_text()))
    assert main(["scaling", "--csv", str(path), "--output", str(tmp_path / "out")]) == (
        EXIT_USER_ERROR
    )
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_sizes_are_held_out_by_width():
    """At 16/R layers of one width, N falls with R; a rank by N would call the largest R = 1."""
    points = losses(joint)
    shrunk = replace(
        points, parameters=points.parameters / points.steps, looped=points.looped / points.steps
    )
    assert sizes_of(shrunk).tolist() == sizes_of(points).tolist()
    by_width, *_ = _fitted_forms(DENSE, shrunk, samples=0, seed=0)[1].hold_outs
    mask = points.parameters < SIZES[-1]
    again = fit(DENSE["power"], shrunk[mask], starts=2).predict(shrunk[~mask])
    expected = np.sqrt(np.mean((again - shrunk.loss[~mask]) ** 2))
    assert by_width.rmse[0] == pytest.approx(expected, rel=1e-9)


def test_two_values_of_r_choose_no_form_and_three_hold_none_out():
    """At R = 1 and 2 all forms give the same losses; only a third R shows which one is right."""
    for steps, kinds, chosen, remark in (
        ((1, 2), 2, 0, "2 values of R do not tell the forms apart, so none is chosen"),
        ((1, 2, 4), 2, 1, "the largest R is not held out"),
        ((1, 2, 4, 8), 3, 1, ""),
    ):
        points = losses(joint, steps=steps, tokens=TOKENS[::4])
        laws = _chosen(_fitted_forms(DENSE, points, samples=0, seed=0))
        assert {len(law.hold_outs) for law in laws} == {kinds}
        assert sum(law.chosen for law in laws) == chosen
        assert all(remark in " ".join(law.remarks) for law in laws)
        assert bool(laws[0].remarks) == bool(remark)


def test_forms_are_compared_on_the_same_parts():
    """Six points are enough to fit `power`, but not `bounded`, so no form holds out the rest."""
    points = losses(joint, steps=(1, 2, 4), tokens=TOKENS[:1])
    few = points[np.isin(points.parameters, SIZES[:3])]
    laws = _chosen(_fitted_forms(DENSE, few, samples=0, seed=0))
    assert [law.hold_outs for law in laws] == [(), (), ()]
    assert not any(law.chosen for law in laws)
    assert all("too few points to hold any out" in law.remarks[0] for law in laws)


def test_repeats_stay_in_a_law_that_is_read_again(tmp_path: Path):
    points = losses(joint, steps=(1, 2, 4), tokens=TOKENS[::4])
    points = replace(points, unique=np.minimum(points.tokens, 4e9))[points.parameters > 1e8]
    truth = {**BY_POWER, "reuse": 15.4}
    points = replace(points, loss=with_repeats(POWER).predict(truth, points))
    result = study(ScalingData(points, {}, 0, {}), samples=0)
    write_json(tmp_path / "scaling.json", result.as_record("a test"))
    law = read_law(f"{tmp_path / 'scaling.json'}:power")
    assert law.source == "a test"
    model = {"parameters": 1e9, "looped": 8e8, "tokens": 2e10, "steps": 2.0}
    once, again = (predicted(law, **model, unique=unique) for unique in (None, 4e9))
    assert again > once + 0.01
    counted = 4e9 + 4e9 * 15.4 * (1 - np.exp(-(20e9 / 4e9 - 1) / 15.4))
    assert again == pytest.approx(joint(1e9, counted, 2), rel=1e-3)


@pytest.mark.parametrize("skip", ["1", "-0.1", "nan"])
def test_a_share_to_skip_out_of_range_is_refused(skip: str, tmp_path: Path, capsys):
    assert main(["scaling", "--csv", str(tmp_path), "--skip", skip]) == EXIT_USER_ERROR
    assert f"skip={float(skip)} must be at least 0 and below 1" in capsys.readouterr().err


def test_a_wrong_exit_distribution_is_refused(tmp_path: Path):
    data = read_csv(write_csv(tmp_path / "losses.csv"))
    with pytest.raises(UserError, match=r"sums to 0\.7; give"):
        study(data, samples=0, exit_pmf=(0.1, 0.2, 0.4))
    with pytest.raises(UserError, match="no step-wise losses of runs trained with R = 3"):
        study(data, samples=0, exit_pmf=(0.2, 0.3, 0.5))
