"""Reads and writes are tried again after an error of the machine, each time later."""

import errno

import pytest

from titan_loop.storage import transient


def test_only_errors_of_the_machine_are_tried_again_each_time_later(monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr(transient.time, "sleep", waits.append)
    monkeypatch.setattr(transient, "WAIT_SECONDS", 0.5)

    def act(*errors: int) -> str:
        left = [*errors]

        def once() -> str:
            if left:
                raise OSError(left.pop(), "it says")
            return "read"

        return transient.retried(once)

    assert act(*[errno.EIO] * 4) == "read"
    assert waits == [0.5, 1.0, 2.0, 4.0]
    with pytest.raises(OSError, match="it says"):
        act(*[errno.ESTALE] * 5)
    assert len(waits) == 8
    with pytest.raises(FileNotFoundError):
        act(errno.ENOENT)
    assert len(waits) == 8
