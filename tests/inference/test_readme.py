"""The README's example runs as it stands."""

import pytest

import titan_loop.inference
from tests.readme import readme_of, run_example

README = readme_of(titan_loop.inference)


@pytest.mark.usefixtures("run_of_the_readme")
def test_the_example_runs():
    names = run_example(README)
    for answer in names["answers"]:
        assert 0 < len(answer.tokens) <= 16
        assert len(answer.steps) == len(answer.tokens)
        assert set(answer.steps) <= {1, 2, 3, 4}


def test_the_call_diagram_is_what_happens():
    """Rows a, b, c and x, y, z of the README's diagram, call by call."""
    from tests.inference.reference import make_model, prompts
    from tests.inference.test_engine import _Scripted, requests
    from titan_loop.inference.engine import Engine

    policy = _Scripted(([3, 3, 1, 2], [3, 1, 2, 3]))
    calls = []
    fires = policy.fires
    policy.fires = lambda evidence: calls.append(evidence.step_BL[:, 0].tolist()) or fires(evidence)
    Engine(make_model(), exit_policy=policy).complete(requests(prompts(3, 3), 4))
    lines = README.read_text(encoding="utf-8").splitlines()
    row_0, row_1 = ([*line.split()[3:9]] for line in lines if line.startswith("    row "))
    drawn = [[int(a[1]), int(x[1])] for a, x in zip(row_0, row_1, strict=True)]
    assert calls[3:] == drawn
