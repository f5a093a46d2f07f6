"""Files of a recipe's jobs: their numbers, and the history of their starts."""

import pytest

from titan_loop.errors import UserError
from titan_loop.launch.record import (
    read_jobs,
    write_jobs,
)


def test_jobs_of_another_version_are_refused(tmp_path):
    write_jobs(tmp_path, {"1a": "7", "1b": "8"})
    assert read_jobs(tmp_path) == {"1a": "7", "1b": "8"}
    (tmp_path / "slurm" / "jobs.json").write_text('{"format_version": 99}')
    with pytest.raises(UserError, match="format version 99"):
        read_jobs(tmp_path)
