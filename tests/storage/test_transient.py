"""Reads and writes are tried again after an error of the machine, each time later."""

import errno

import pytest

from titan_loop.storage import transient


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(transient.time, "sleep", found.append)
    monkeypatch.setattr(transient, "WAIT_SECONDS", 0.5)
    return found


def test_every_wait_is_twice_as_long_and_every_retry_is_counted(waits):
    calls = []

    def act() -> str:
        calls.append(None)
        if len(calls) < transient.ATTEMPTS:
            raise OSError(errno.EIO, "input/output error")
        return "read"

    before = transient.retries()
    assert transient.retried(act) == "read"
    assert waits == [0.5 * 2**n for n in range(transient.ATTEMPTS - 1)]
    assert transient.retries() - before == transient.ATTEMPTS - 1


def test_the_last_error_is_raised_and_others_are_not_tried_again(waits):
    def stale() -> None:
        raise OSError(errno.ESTALE, "stale file handle")

    with pytest.raises(OSError, match="stale"):
        transient.retried(stale)
    assert len(waits) == transient.ATTEMPTS - 1

    def absent() -> None:
        raise FileNotFoundError("gone")

    with pytest.raises(FileNotFoundError):
        transient.retried(absent)
    assert len(waits) == transient.ATTEMPTS - 1
