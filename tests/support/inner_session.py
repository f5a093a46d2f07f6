"""A pytest session in a process of its own; imports nothing that reads the environment."""

import os
import sys
from pathlib import Path

import pytest


def run_inner_session(folder: Path, environment: dict[str, str], output: Path) -> None:
    """Run the tests of `folder` in this process, which is forked for it, and end it.

    Args:
        folder: The project; the session's working folder.
        environment: The whole environment.
        output: Where stdout and stderr go.
    """
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", str(folder)]))
