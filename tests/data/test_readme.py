"""The README's example runs as it stands."""

from pathlib import Path

import pytest

import titan_loop.data
from tests.readme import readme_of, run_example


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_example(readme_of(titan_loop.data))
    assert [len(labels) for _, labels in names["micro_batches"]] == [4] * 4
    assert names["evaluation"].labels.shape == (16, 256)
