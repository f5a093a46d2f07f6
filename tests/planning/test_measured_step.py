"""Arithmetic of measured steps, their files, and the key that decides which step is shared."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from titan_loop.planning import measured_step
from titan_loop.planning.measured_step import (
    CACHE_VARIABLE,
    MeasuredStep,
    read_measured,
    rehearsal_key,
    write_measured,
)
from titan_loop.planning.step_meter import Moved

STEP = MeasuredStep(
    micro_batches=2, moved={"gather": Moved(10, 100.0)}, moved_again={"gather": Moved(4, 40.0)},
    peak_bytes=1000.0, checkpoint_bytes=7,
)  # fmt: skip


@pytest.mark.parametrize(
    ("micro_batches", "count"), [(2, 10), (3, 14), (3.4, 14), (6, 26), (1, 10)]
)
def test_every_further_micro_batch_moves_as_much_as_the_last(micro_batches, count):
    assert STEP.moved_in(micro_batches) == {"gather": Moved(count, 10.0 * count)}


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("content", [None, "{", "[]", '{"format_version": 1}'])
def test_a_step_is_read_as_it_was_written_or_not_at_all(folder: Path, content: str | None):
    assert read_measured("key") is None
    write_measured("key", STEP)
    assert read_measured("key") == STEP
    if content is not None:
        (folder / "key.json").write_text(content)
        assert read_measured("key") is None


def needs(**changes: Any) -> Any:
    loader = SimpleNamespace(columns=lambda: [], knows_depth=lambda: changes.get("knows", False))
    recurrence = SimpleNamespace(most_backward_steps=changes.get("reached"))
    config = SimpleNamespace(dataloader=loader, recurrence=recurrence)
    values = {"policy": "per_step", "recurrent_steps": 4, "shapes": {"w": (2, 3)}, "dim": 64}
    values |= changes
    return SimpleNamespace(
        config=config,
        model=SimpleNamespace(architecture={"dim": values["dim"]}),
        units=[SimpleNamespace(unit="layers", shapes=values["shapes"])],
        policy=values["policy"],
        recurrent_steps=values["recurrent_steps"],
    )


@pytest.mark.parametrize(
    "changes",
    [{"policy": "per_visit"}, {"recurrent_steps": 5}, {"shapes": {"w": (3, 2)}}, {"dim": 65},
     {"knows": True}, {"reached": 2}],
)  # fmt: skip
def test_a_key_changes_with_the_work(monkeypatch, changes):
    monkeypatch.setattr(
        measured_step, "traits", lambda value: value if isinstance(value, dict) else 0
    )
    key = rehearsal_key(needs(), 8, 2)
    assert len(key) == 64
    assert key == rehearsal_key(needs(), 8, 2)
    assert key != rehearsal_key(needs(**changes), 8, 2)
    assert len({key, rehearsal_key(needs(), 4, 2), rehearsal_key(needs(), 8, 1)}) == 3
