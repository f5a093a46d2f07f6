"""The README shows the toy family and task as they are run by the tests."""

from pathlib import Path

import pytest

import titan_loop.models
from tests.data.tasks import toy_task
from tests.families import toy_family
from tests.readme import example, readme_of


@pytest.mark.parametrize(
    ("language", "module"), [("python", toy_family), ("python task", toy_task)]
)
def test_the_example_is_the_file_that_is_tested(language, module):
    assert module.__file__ is not None
    shown = example(readme_of(titan_loop.models), language)
    assert shown == Path(module.__file__).read_text(encoding="utf-8")
