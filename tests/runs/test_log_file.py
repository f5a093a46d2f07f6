"""A run keeps what it logs, and why it ended."""

import logging
from pathlib import Path

import pytest

from titan_loop.runs.log_file import kept_log


def test_starts_are_appended_with_the_error_that_ends_them(tmp_path: Path):
    path, logger = tmp_path / "log.txt", logging.getLogger("titan_loop.test")

    def fails(number: int) -> None:
        logger.warning("start %d", number)
        raise KeyError("why")

    for number in range(2):
        with pytest.raises(KeyError), kept_log(path):
            fails(number)
        logger.warning("outside")
    lines = [line.split(maxsplit=2)[2] for line in path.read_text().splitlines()]
    ended = "ERROR ended by KeyError: 'why'"
    assert lines == ["WARNING start 0", ended, "WARNING start 1", ended]


def test_a_full_disk_costs_lines_that_are_counted(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])  # some may write to a stream of an earlier test
    with kept_log(Path("/dev/full")):
        for _ in range(2):
            logging.getLogger("titan_loop.test").warning("lost")
    printed = capfd.readouterr().err
    assert "/dev/full lacks up to 2 lines" in printed
    assert "Traceback" not in printed
