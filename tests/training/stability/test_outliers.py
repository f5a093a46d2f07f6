"""The rolling median against Python's statistics, in float64."""

import random
import statistics

import pytest
import torch

from titan_loop.training.stability.outliers import MAD_TO_DEVIATION, RollingMedian

CPU = torch.device("cpu")
TRUE = torch.tensor(True)


def expected_bound(values: list[float], threshold: float, floor: float) -> float:
    median = statistics.median(values)
    spread = statistics.median([abs(value - median) for value in values])
    return median + threshold * max(MAD_TO_DEVIATION * spread, floor)


@pytest.mark.parametrize("window", [4, 5, 16])
def test_bounds_are_those_of_the_last_accepted_values(window: int):
    source = random.Random(0)
    rolling = RollingMedian(window, 3.0, (0.01, 5.0), CPU)
    accepted: list[tuple[float, float]] = []
    for step in range(60):
        bounds = rolling.bounds().tolist()
        recent = accepted[-window:]
        if len(recent) < window:
            assert bounds == [float("inf")] * 2
        else:
            for number, floor in enumerate((0.01, 5.0)):
                wanted = expected_bound([pair[number] for pair in recent], 3.0, floor)
                assert bounds[number] == pytest.approx(wanted, rel=1e-12)
        pair = source.gauss(2, 1), source.gauss(-1, 3)
        accept = step % 3 != 0
        rolling.take(torch.tensor(pair, dtype=torch.float64), torch.tensor(accept))
        accepted += [pair] if accept else []


def test_a_saved_window_goes_on_to_the_bit_and_a_restart_forgets():
    one = RollingMedian(4, 2.0, (0.1,), CPU)
    for value in (0.1, 1 / 3, 0.7, 0.2, 0.9):
        one.take(torch.tensor([value], dtype=torch.float64), TRUE)
    other = RollingMedian(4, 2.0, (0.1,), CPU)
    other.load_state_dict(one.state_dict())
    assert torch.equal(other.bounds(), one.bounds())
    for rolling in (one, other):
        rolling.take(torch.tensor([5.0]), TRUE)
    assert torch.equal(other.bounds(), one.bounds())
    one.restart()
    assert one.bounds().isinf().all()
    longer = RollingMedian(5, 2.0, (0.1,), CPU)
    longer.load_state_dict(other.state_dict())  # of another length: begins anew
    assert longer.bounds().isinf().all()


def test_only_finite_values_enter_the_window():
    """A batch without labels has a loss of 0, whose logarithm is −∞."""
    rolling, wanted = (RollingMedian(2, 2.0, (0.1, 0.1), CPU) for _ in range(2))
    for pair in ([1.0, 2.0], [float("-inf"), 0.0], [3.0, float("nan")], [1.5, 1.0]):
        values = torch.tensor(pair, dtype=torch.float64)
        rolling.take(values, TRUE)
        if values.isfinite().all():
            wanted.take(values, TRUE)
    assert rolling.bounds().isfinite().all()
    assert torch.equal(rolling.bounds(), wanted.bounds())
