from pathlib import Path

import pytest

import titan_loop.data

README = Path(titan_loop.data.__path__[0]) / "README.md"


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = README.read_text().split("```python\n")[1:]
    names: dict[str, object] = {}
    exec(compile(example.split("```")[0], str(README), "exec"), names)
    assert [len(labels) for _, labels in names["micro_batches"]] == [4] * 4
    assert names["evaluation"].labels.shape == (16, 256)
