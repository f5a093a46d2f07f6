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
