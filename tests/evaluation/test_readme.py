"""The README's example runs as it stands, and its commands are accepted."""

from pathlib import Path

import pytest

import titan_loop.evaluation
from tests.readme import readme_of, run_example
from titan_loop.evaluation.evaluate_tasks import evaluate_tasks
from titan_loop.evaluation.task_options import TaskOptions

README = readme_of(titan_loop.evaluation)


@pytest.mark.usefixtures("run_of_the_readme")
def test_the_example_runs():
    names = run_example(README)
    options = TaskOptions(
        tasks=("multi_hop",),
        recurrent_steps=4,
        exit="q:0.9",
        kv_cache="last",
        limit=4,
    )
    expected = evaluate_tasks(Path("runs/my"), options).tasks["multi_hop"]["q:0.9"]
    found = names["results"]
    for metric in ("acc,none", "acc_norm,none"):
        assert found["results"]["multi_hop"][metric] == expected.metrics[metric]
    assert found["config"]["mean_steps"] == expected.mean_steps
