"""Steps with a number that is not finite: counted in a row, and too many end the run."""

from typing import Any

import pytest
import torch

from titan_loop.errors import NonFiniteError
from titan_loop.training.stability import non_finite
from titan_loop.training.verdict import TrainedStep


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []

    def warn(logger: object, message: str, *values: object) -> None:
        said.append(message % values)

    monkeypatch.setattr(non_finite, "warn_together", warn)
    return said


def step(number: int) -> TrainedStep:
    loss, norm, verdict = torch.tensor(float("nan")), torch.tensor(2.5), None
    return TrainedStep(number, range(8, 12), loss, {}, norm, verdict)  # pyright: ignore


def test_an_update_begins_the_count_anew(warnings):
    count, trainer = non_finite.NonFiniteSteps(3), None
    for number, updated in enumerate((False, False, True, False, False), start=1):
        count.on_verdict(trainer, step(number), updated=updated)  # pyright: ignore
    assert [said[-21:] for said in warnings] == [
        f"skipped ({n} of 3 in a row)"[-21:] for n in (1, 2, 1, 2)
    ]
    assert warnings[0] == (
        "step 1 (windows 8 to 11): loss nan or gradient norm 2.5 is not finite on some rank; "
        "update skipped (1 of 3 in a row)"
    )
    with pytest.raises(NonFiniteError, match=r"stopped at step 6 \(windows 8 to 11\): 3 steps in"):
        count.on_verdict(trainer, step(6), updated=False)  # pyright: ignore


def test_one_may_be_too_many(warnings):
    trainer: Any = None
    with pytest.raises(NonFiniteError, match="1 steps in a row"):
        non_finite.NonFiniteSteps(1).on_verdict(trainer, step(1), updated=False)
    assert len(warnings) == 1
