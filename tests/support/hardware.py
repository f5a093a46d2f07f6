"""Marks for tests that need hardware: where it is missing, the test skips itself and says why."""

import pytest
import torch


def requires_gpu(count: int = 1) -> list[pytest.MarkDecorator]:
    """Return the marks of a test that needs CUDA devices.

    Assign them to `pytestmark`, or pass them as `marks` of a `pytest.param`.

    Args:
        count: Number of devices; more than one also marks the test `multi_gpu`.
    """
    found = torch.cuda.device_count()
    marks = [
        pytest.mark.gpu,
        pytest.mark.skipif(found < count, reason=f"needs {count} CUDA devices, found {found}"),
    ]
    if count > 1:
        marks.append(pytest.mark.multi_gpu)
    return marks
