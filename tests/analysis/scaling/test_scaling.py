"""Scaling laws: planted coefficients come back, and input that cannot be fitted is refused."""

import contextlib
import csv
import io
import itertools
import json
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.evaluation.runs import write_checkpoint_of, write_run_of
from titan_loop.analysis.scaling.data import (
    STRETCHES,
    ScalingData,
    _unique_tokens,
    read_csv,
    read_runs,
)
from titan_loop.analysis.scaling.data import write_csv as write_table
from titan_loop.analysis.scaling.fit import Fit, bootstrap, fit
from titan_loop.analysis.scaling.law import (
    ADDITIVE,
    DENSE,
    POWER,
    SPARSE,
    Law,
    Losses,
    with_repeats,
)
from titan_loop.analysis.scaling.page import write_study
from titan_loop.analysis.scaling.published import PUBLISHED, predicted, read_law
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
from titan_loop.models.family import build_decoder
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.runs.saved_run import SavedRun
from titan_loop.runs.status import PlannedStage, write_plan
from titan_loop.storage.json_files import append_jsonl

SIZES = (53e6, 134e6, 374e6, 778e6, 1.364e9)
TOKENS = np.linspace(1e9, 20e9, 20)
PLANTED = {
    "E": 1.7, "A": 400.0, "alpha": 0.34, "t1": 2e6, "B": 410.0, "beta": 0.28, "t2": 2e8,
    "C": 0.3, "gamma": 0.7, "t3": 0.5,
}  # fmt: skip
BASE = {"E": 1.7, "A": 400.0, "alpha": 0.34, "B": 410.0, "beta": 0.28}
BY_POWER = {**BASE, "phi": 0.46}
GAINS = {
    "linear": {"kappa": 0.2},
    "power": {"phi": 0.46},
    "bounded": {"kappa1": 0.9, "kappa2": 1.4},
}
NOISE = 0.01  # nats; twice the spread of three seeds of the quick start


def additive(n: float, d: float, r: float) -> float:
    """The law written out, in float64."""
    c = PLANTED
    return (
        c["E"]
        + c["A"] / (n + c["t1"]) ** c["alpha"]
        + c["B"] / (d + c["t2"]) ** c["beta"]
        + c["C"] / (r + c["t3"]) ** c["gamma"]
    )


def joint(n: float, d: float, r: float) -> float:
    """The law written out; 80 % of the parameters are looped."""
    c = BY_POWER
    effective = 0.2 * n + 0.8 * n * r ** c["phi"]
    return c["E"] + c["A"] / effective ** c["alpha"] + c["B"] / d ** c["beta"]


def by_gain(form: str):
    """A mapping's law written out; 80 % of the parameters are looped."""

    def law(n: float, d: float, r: float) -> float:
        c = GAINS[form]
        gain = {
            "linear": lambda: c["kappa"] * (r - 1),
            "power": lambda: r ** c["phi"] - 1,
            "bounded": lambda: c["kappa1"] * (1 - np.exp(-(r - 1) / c["kappa2"])),
        }[form]()
        effective = n + 0.8 * n * gain
        return BASE["E"] + BASE["A"] / effective ** BASE["alpha"] + BASE["B"] / d ** BASE["beta"]

    return law


def losses(law, steps=(1, 2, 4, 8), noise: float = 0.0, seed: int = 0, tokens=TOKENS) -> Losses:
    grid = np.array(list(itertools.product(SIZES, tokens, steps)))
    exact = np.array([law(*row) for row in grid])
    return Losses(
        parameters=grid[:, 0],
        looped=0.8 * grid[:, 0],
        total=grid[:, 0],
        experts=np.ones(len(grid)),
        tokens=grid[:, 1],
        unique=grid[:, 1],
        steps=grid[:, 2],
        loss=exact + noise * np.random.default_rng(seed).normal(size=len(grid)),
        run=np.array([f"{n}-{r}" for n, _, r in grid]),
        width=grid[:, 0],
    )


@pytest.mark.parametrize(
    ("law", "reference", "planted"),
    [
        (ADDITIVE, additive, PLANTED),
        (POWER, joint, BY_POWER),
        (DENSE["linear"], by_gain("linear"), BASE | GAINS["linear"]),
        (DENSE["bounded"], by_gain("bounded"), BASE | GAINS["bounded"]),
    ],
)
def test_planted_coefficients_are_recovered(law: Law, reference, planted: dict[str, float]):
    points = losses(reference)
    fitted = fit(law, points)
    assert {n: v / planted[n] for n, v in fitted.values.items()} == pytest.approx(
        dict.fromkeys(planted, 1.0), rel=0.02
    )
    assert fitted.r_squared(points) == pytest.approx(1, abs=1e-9)
    assert Fit(law, planted, 0.0).predict(points) == pytest.approx(points.loss, rel=1e-12)


def test_phi_is_recovered_from_noisy_losses_and_lies_in_its_interval():
    points = losses(joint, noise=NOISE)
    fitted = bootstrap(fit(POWER, points), points, samples=40)
    assert fitted.values["phi"] == pytest.approx(BY_POWER["phi"], abs=0.03)
    low, high = fitted.intervals["phi"]
    assert low < fitted.values["phi"] < high
    assert high - low < 0.2
    assert fitted.rmse == pytest.approx(NOISE, rel=0.15)


def test_the_published_law_with_experts_is_recovered_from_its_own_losses():
    law, values = SPARSE["bounded"], PUBLISHED["loop-moe"]["coefficients"]
    grid = np.array(list(itertools.product(SIZES, TOKENS[::4], (1, 2, 4, 8), (1, 2, 4, 8, 16))))
    points = Losses(
        parameters=grid[:, 0],
        looped=0.8 * grid[:, 0],
        total=grid[:, 0] * (1 + 2 / 3 * (grid[:, 3] - 1)),
        experts=grid[:, 3],
        tokens=grid[:, 1],
        unique=grid[:, 1],
        steps=grid[:, 2],
        loss=np.ones(len(grid)),
        run=np.array([str(row) for row in grid]),
        width=grid[:, 0],
    )
    points = replace(points, loss=law.predict(values, points))
    fitted = fit(law, points)
    assert {n: v / values[n] for n, v in fitted.values.items()} == pytest.approx(
        dict.fromkeys(values, 1.0), rel=1e-3
    )


def test_tokens_read_again_count_for_less():
    """Muennighoff et al., Eq. 5, written out for one point; then fitted."""
    points = replace(losses(joint), unique=np.minimum(losses(joint).tokens, 4e9))
    law, values = with_repeats(POWER), {**BY_POWER, "reuse": 15.4}
    counted = 4e9 + 4e9 * 15.4 * (1 - np.exp(-(20e9 / 4e9 - 1) / 15.4))
    assert law.predict(values, points)[-1] == pytest.approx(joint(SIZES[-1], counted, 8), rel=1e-12)
    points = replace(points, loss=law.predict(values, points))
    assert fit(law, points).values["reuse"] == pytest.approx(15.4, rel=0.01)


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


def test_r_squared_is_that_of_the_definition():
    points = losses(additive, noise=0.05)
    fitted = fit(ADDITIVE, points)
    predicted = np.array(
        [
            fitted.values["E"]
            + fitted.values["A"] / (n + fitted.values["t1"]) ** fitted.values["alpha"]
            + fitted.values["B"] / (d + fitted.values["t2"]) ** fitted.values["beta"]
            + fitted.values["C"] / (r + fitted.values["t3"]) ** fitted.values["gamma"]
            for n, d, r in zip(points.parameters, points.tokens, points.steps, strict=True)
        ]
    )
    expected = 1 - ((points.loss - predicted) ** 2).sum() / (len(points) * points.loss.var())
    assert fitted.r_squared(points) == pytest.approx(expected, rel=1e-9)


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


def write_csv(path: Path, *, rising: bool = False) -> Path:
    """Step-wise losses and totals of four sizes at R = 1, 2 and 4, composed with known weights."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["parameters", "tokens", "recurrent_steps", "step", "loss"])
        for n, steps, d in itertools.product(SIZES[:4], (1, 2, 4), TOKENS[::4]):
            by_step = [additive(n, d, r) for r in range(1, steps + 1)]
            if rising and n == SIZES[0]:
                by_step[0] = 3 + d / 1e11
            weights = np.arange(1, steps + 1) / sum(range(1, steps + 1))
            for step, loss in enumerate(by_step, start=1):
                writer.writerow([n, d, steps, step, loss])
            writer.writerow([n, d, steps, "", float(weights @ by_step)])
    return path


def test_series_that_rise_with_tokens_are_left_out_and_counted(tmp_path: Path):
    whole = read_csv(write_csv(tmp_path / "whole.csv"))
    cut = read_csv(write_csv(tmp_path / "cut.csv", rising=True))
    assert (whole.rising, cut.rising) == (0, 2)
    assert len(whole.by_step[4]) - len(cut.by_step[4]) == len(TOKENS[::4])


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


def test_short_names_of_columns_do_and_unknown_ones_are_named(tmp_path: Path, caplog):
    points = losses(joint)
    path = tmp_path / "table.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["N", "N_rec", "D", "R", "loss", "gpu"])
        for row in zip(points.parameters, points.looped, points.tokens, points.steps, points.loss,
                       strict=True):  # fmt: skip
            writer.writerow([*row, "a100"])
    read = read_csv(path)
    assert "columns that are not used: gpu" in caplog.text
    assert read.total.looped == pytest.approx(points.looped)
    assert fit(POWER, read.total).values["phi"] == pytest.approx(0.46, rel=1e-4)


@pytest.mark.parametrize(
    ("header", "row", "message"),
    [
        ("N,D,R,loss,E", "1e8,1e9,2,3,4", "experts=4 needs total_parameters"),
        ("N,D,R,loss,U", "1e8,1e9,2,3,2e9", r"unique_tokens=2e\+09 must be at most tokens=1e\+09"),
        ("N,D,R,loss,N_rec", "1e8,1e9,2,3,2e8", r"looped_parameters=2e\+08 must be at most"),
        ("N,D,R,loss,E,N_total", "1e8,1e9,2,3,4,9e7", r"parameters=1e\+08 must be at most total_"),
        ("N,D,R,loss,step", "1e8,1e9,2,3,3", "step=3 must be at most recurrent_steps=2"),
        ("N,D,R,loss,E", "1e8,1e9,2,3,0.5", "experts=0.5 must be at least 1"),
        ("N,D,R,loss", "1e8,1e9,0.5,3", "recurrent_steps=0.5 must be at least 1"),
        ("N,D,R,loss", "1e8,20,2,3", r"tokens=20 do not fit parameters=1e\+08; give both in one"),
        ("N,D,R,loss,E,N_total", "0.1,2,2,3,4,0.3", "parameters of 0.1 at most are no counts, wh"),
        ("N,D,R,loss", "1e8,5e18,2,3", r"tokens=5e\+18 do not fit parameters=1e\+08; give both"),
        ("N,D,R,loss", "1e9,20000,2,3", "tokens=20000 do not fit parameters"),
        ("N,D,R,loss", "1e8,1e9,2", "line 2: loss='' must be a positive number; correct it or"),
    ],
)
def test_rows_that_contradict_themselves_are_refused(tmp_path: Path, header, row, message):
    path = tmp_path / "table.csv"
    path.write_text(f"{header}\n{row}\n")
    with pytest.raises(UserError, match=message):
        read_csv(path)


@pytest.mark.parametrize("header", [" n, d,R ,Loss,Seed,Dim", "N;D;R;loss;seed;width"])
def test_spaces_case_and_semicolons_do_not_matter(tmp_path: Path, header: str):
    path = tmp_path / "table.csv"
    mark = ";" if ";" in header else ","
    rows = ["1e8,1e9,1,3,0,64", "", "1e8,1e9,1,3.1,1,64", "2e8,1e9,2,2.9,0,128"]
    path.write_text("\n".join([header, *(row.replace(",", mark) for row in rows)]))
    read = read_csv(path).total
    assert read.width.tolist() == [64, 64, 128]
    assert len(set(read.run)) == 3
    path.write_text(path.read_text().replace("2.9", "nan"))
    with pytest.raises(UserError, match="line 5: loss='nan'"):
        read_csv(path)


def test_a_table_in_billions_is_fitted_in_its_unit(tmp_path: Path, caplog):
    points = losses(joint, tokens=TOKENS[::4])
    table = np.column_stack(
        [points.parameters / 1e9, points.tokens / 1e9, points.steps, points.loss]
    )
    path = tmp_path / "table.csv"
    np.savetxt(path, table, delimiter=",", header="N,D,R,loss", comments="")
    read = read_csv(path).total
    assert "parameters of 1.364 at most are no counts; coefficients are in" in caplog.text
    values = fit(DENSE["linear"], read).values
    counted = fit(DENSE["linear"], replace(points, looped=points.parameters)).values
    assert values["alpha"] == pytest.approx(counted["alpha"], rel=1e-3)
    assert values["B"] == pytest.approx(counted["B"] * 1e9 ** -counted["beta"], rel=1e-2)


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
    points = replace(
        losses(joint, steps=(1, 2, 4)),
        unique=np.minimum(losses(joint, steps=(1, 2, 4)).tokens, 4e9),
    )
    truth = {**BY_POWER, "reuse": 15.4}
    points = replace(points, loss=with_repeats(POWER).predict(truth, points))
    result = study(ScalingData(points, {}, 0, {}), samples=0)
    write_study(result, tmp_path, source="a test")
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


def write_run(source: Path, path: Path, *, steps: int, contents: str = "ab") -> Path:
    """A run whose logged losses follow the law, with an exit distribution."""
    write_run_of(source, path)
    directory = RunDirectory(path)
    for step in range(1, 2 * STRETCHES + 1):
        tokens = 10_000_000 * step
        by_step = [additive(1e5, tokens, r) for r in range(1, steps + 1)]
        append_jsonl(
            directory.metrics_jsonl,
            {
                "step": step, "tokens": tokens, "recurrent_steps": steps,
                "loss": float(np.mean(by_step)),
                **{f"ce/step_{r}": loss for r, loss in enumerate(by_step, start=1)},
                **{f"exit/pmf_{r}": 1 / steps for r in range(1, steps + 1)},
            },
        )  # fmt: skip
    write_checkpoint_of(path, 3, data={"sources": [{"contents": contents, "share": 1.0}]})
    return path


def test_runs_give_averages_over_stretches_without_warm_up(source: Path, tmp_path: Path):
    run = write_run(source, tmp_path / "a", steps=4)
    data = read_runs([run])
    assert len(data.total) == STRETCHES - 1
    assert data.total.tokens[0] == pytest.approx(3.5e7)  # steps 3 and 4 of 40
    expected = np.mean([additive(1e5, t, r) for t in (3e7, 4e7) for r in (1, 2, 3, 4)])
    assert data.total.loss[0] == pytest.approx(expected, rel=1e-12)
    assert len(data.by_step[4]) == 4 * (STRETCHES - 1)
    assert data.exit_pmf[4] == pytest.approx(np.full(4, 0.25))
    model = build_decoder(SavedRun(run).model_options, max_seq_len=8)
    tables = ("tok_embeddings.", "lm_head.")
    counted = [p.numel() for name, p in model.named_parameters() if not name.startswith(tables)]
    assert data.total.parameters[0] == data.total.looped[0] == sum(counted)
    assert data.total.width[0] == model.config.dim
    write_table(data, tmp_path / "losses.csv")
    again = read_csv(tmp_path / "losses.csv")
    for name in (item.name for item in fields(Losses)):
        assert getattr(again.total, name).tolist() == getattr(data.total, name).tolist()
        assert getattr(again.by_step[4], name).tolist() == getattr(data.by_step[4], name).tolist()


def test_rounding_is_no_repetition():
    read = {"windows": [2344, 2344, 1172], "epochs": [0.124, 0.174, 0.106]}
    run: Any = SimpleNamespace(
        seq_len=256, checkpoint=lambda: SimpleNamespace(manifest={"data": {"read": read}})
    )
    tokens = np.linspace(112_640, 1_500_160, 50)
    assert [*map(_unique_tokens(run), tokens)] == tokens.tolist()
    read["epochs"] = [2.0, 0.174, 0.106]
    assert _unique_tokens(run)(1_500_160.0) == 256 * (1172 + 2344 + 1172)


def test_the_start_of_every_run_is_left_out_by_its_own_length():
    points = losses(lambda n, d, r: n + 0 * d, steps=(1, 4))
    runs = np.where(points.tokens > np.median(points.tokens), "long", "short")
    data = ScalingData(replace(points, run=runs), {4: replace(points, run=runs)}, 0, {})
    late = data.without_start(0.5)
    for kept in (late.total, late.by_step[4]):
        for run in ("long", "short"):
            tokens = points.tokens[runs == run]
            expected = np.unique(tokens[tokens >= 0.5 * tokens.max()])
            assert np.unique(kept.tokens[kept.run == run]).tolist() == expected.tolist()
    assert len(data.without_start(0).total) == len(points)


def test_runs_of_different_data_are_named(source: Path, tmp_path: Path):
    one = write_run(source, tmp_path / "one", steps=2)
    other = write_run(source, tmp_path / "other", steps=4, contents="cd")
    with pytest.raises(UserError, match=r"other and .*one were trained on different data"):
        read_runs([one, other])


def test_a_recipes_controls_stay_out_of_its_law(source: Path, tmp_path: Path):
    stages = []
    for name, steps, control in (("looped", 4, False), ("standard", 2, True)):
        write_run(source, tmp_path / "study" / name, steps=steps)
        stages.append(PlannedStage(name, None, 1, control))
    write_plan(tmp_path / "study", "study", stages)
    assert set(read_runs([tmp_path / "study"]).total.steps) == {4}
    assert set(read_runs([tmp_path / "study" / "standard"]).total.steps) == {2}
