"""Losses of runs and of tables, and tables that are refused."""

import csv
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.analysis.scaling.planted import TOKENS, additive, joint, losses, write_csv
from tests.evaluation.runs import write_checkpoint_of, write_run_of
from titan_loop.analysis.scaling.data import (
    STRETCHES,
    ScalingData,
    _unique_tokens,
    read_csv,
    read_runs,
)
from titan_loop.analysis.scaling.data import write_csv as write_table
from titan_loop.analysis.scaling.fit import fit
from titan_loop.analysis.scaling.law import DENSE, POWER, Losses
from titan_loop.errors import UserError
from titan_loop.models.family import build_decoder
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.runs.saved_run import SavedRun
from titan_loop.runs.status import PlannedStage, write_plan
from titan_loop.storage.json_files import append_jsonl


def test_series_that_rise_with_tokens_are_left_out_and_counted(tmp_path: Path):
    whole = read_csv(write_csv(tmp_path / "whole.csv"))
    cut = read_csv(write_csv(tmp_path / "cut.csv", rising=True))
    assert (whole.rising, cut.rising) == (0, 2)
    assert len(whole.by_step[4]) - len(cut.by_step[4]) == len(TOKENS[::4])


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
