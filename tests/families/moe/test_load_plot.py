"""The plot of experts' loads: values by visit, its message, and the visits it leaves out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titan_loop.analysis.plots import charts
from titan_loop.families.moe.load_plot import PREFIX, plot_loads, read_loads, title_of

EQUAL = [1.0, 1.0, 1.0, 1.0]


def records(number: int = 40, visits: int = 2) -> list[dict[str, Any]]:
    """Return loads of layer 1, and of layer 2 at its steps; the last step ends halfway."""
    made: list[dict[str, Any]] = []
    for step in range(1, number + 1):
        busy = 1.0 + step / number
        record = {"step": step, "tokens": 100 * step, f"{PREFIX}layer_1": EQUAL}
        for visit in range(1, visits + 1):
            if visit < visits or step <= number // 2:
                record[f"{PREFIX}layer_2_step_{visit}"] = [busy, 0.0, 1.0, 3.0 - busy]
        made.append(record)
    return made


def test_loads_are_ordered_by_layer_and_step():
    loads = read_loads(records(visits=11))
    assert [visit.name for visit in loads] == [
        "layer 1",
        *(f"layer 2, step {step}" for step in range(1, 12)),
    ]
    assert loads[1].values.shape == (40, 4)
    assert loads[1].last == pytest.approx([1.9625, 0.0, 1.0, 1.0375])  # records 37 to 40
    assert np.isnan(loads[-1].last).all()
    assert np.isnan(loads[-1].values).all(1).tolist() == [False] * 20 + [True] * 20


def test_the_title_is_the_message():
    loads = read_loads(records())
    assert title_of(loads, 3) == (
        "At the end experts take 0.00 to 1.96 times an equal share of tokens; the busiest is "
        "expert 1 of layer 2, step 1"
    )
    assert title_of(loads, 2).endswith("\nthe 2 least equal of 3 visits")


@pytest.mark.parametrize(("number", "visits"), [(1, 2), (40, 20)])
def test_every_run_with_experts_has_the_plot(tmp_path: Path, monkeypatch, number, visits):
    import titan_loop.families.moe.load_plot as module

    drawn: dict[str, Any] = {}
    draw_panels = module.draw_panels

    def spy(names, draw, path, **settings):
        drawn.update(names=names, **settings)
        return draw_panels(names, draw, path, **settings)

    monkeypatch.setattr(module, "draw_panels", spy)
    made = records(number, visits)
    assert "experts" in charts(made)
    assert plot_loads(made, tmp_path / "experts.png").stat().st_size > 10_000
    assert len(drawn["names"]) == min(visits + (number > 1), 12)
    assert "experts" not in charts([{"step": 1, "tokens": 100}])


def test_the_end_is_the_last_tenth_of_the_records_without_those_that_lack_the_visit():
    def last(number: int, missing: tuple[int, ...] = ()) -> list[float]:
        key = f"{PREFIX}layer_1"
        made = [{} if n in missing else {key: [float(n), 0.0]} for n in range(1, number + 1)]
        (visit,) = read_loads(made)
        return visit.last.tolist()

    assert last(1) == [1.0, 0.0]
    assert last(14) == [14.0, 0.0]
    assert last(15) == [14.5, 0.0]
    assert last(30, missing=(29,)) == [29.0, 0.0]


def test_the_least_equal_visits_are_kept(tmp_path: Path, monkeypatch):
    import titan_loop.families.moe.load_plot as module

    kept: list[str] = []
    monkeypatch.setattr(module, "draw_panels", lambda names, *given, **more: kept.extend(names))
    key = f"{PREFIX}layer_1_step_"
    loads = {f"{key}{step}": [1.0 + step / 20, 1.0 - step / 20] for step in range(1, 15)}
    ended = {f"{PREFIX}layer_2": [2.0, 0.0]}  # only at first
    plot_loads([{"tokens": 1, **loads, **ended}] + [{"tokens": 2, **loads}] * 10, tmp_path / "x")
    assert kept == [f"layer 1, step {step}" for step in range(3, 15)]
