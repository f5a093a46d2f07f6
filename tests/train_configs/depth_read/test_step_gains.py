"""Changes between steps of the same runs, from made-up results of two seeds."""

from dataclasses import replace

import pytest

from titan_loop.analysis.results import ResultTable, RunResult, table_text
from titan_loop.analysis.results_plots import draw_table
from train_configs.depth_read.step_gains import StepGains

BITS = {"math": [(3.0, 2.0, 1.8), (3.2, 2.4, 2.3)], "prose": [(3.0, 2.9, 2.9), (3.0, 2.9, 3.1)]}
RUN = RunResult(
    recipe="r", stage="s", seed=1, overrides=[], commit=None, machine="", versions={}, tokens=1,
    steps=1, seconds=1.0, losses=[[1, 1.0]], results={},
)  # fmt: skip
RESULTS = [
    replace(
        RUN,
        seed=seed,
        results={
            f"{source}/bits/static:{step + 1}": runs[seed][step]
            for source, runs in BITS.items()
            for step in range(3)
        },
    )
    for seed in range(2)
]
GAINS = StepGains(
    name="gains",
    title="change of bits",
    rows={source: {"task": source} for source in BITS},
    columns={f"step {step}": {"reading": f"static:{step}"} for step in (1, 2, 3)},
    everywhere={"metric": "bits"},
    columns_are="step",
    factor=1.0,
)


def value(table: ResultTable, row: str, column: str) -> float:
    mean = table.mean(RESULTS, row, column)
    assert mean is not None
    assert mean[1] == 2
    return mean[0].value


def test_a_step_is_compared_with_the_one_before_or_with_the_last(tmp_path):
    assert GAINS.mean(RESULTS, "math", "step 1") is None
    assert value(GAINS, "math", "step 2") == pytest.approx(-0.9)
    assert value(GAINS, "math", "step 3") == pytest.approx(-0.15)
    assert value(GAINS, "prose", "step 3") == pytest.approx(0.1)
    gaps = replace(GAINS, over="last")
    assert gaps.mean(RESULTS, "math", "step 3") is None
    assert value(gaps, "math", "step 1") == pytest.approx(1.05)
    assert "| prose | - | -0.1 |" in table_text(GAINS, RESULTS)
    assert draw_table(GAINS, RESULTS, tmp_path / "gains.png").is_file()
