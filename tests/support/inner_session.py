"""Programs in forked processes of their own; imports nothing that reads the environment."""

import os
import sys
from pathlib import Path

import pytest


def become(folder: Path, environment: dict[str, str], output: Path) -> None:
    """Give this process, which is forked for it, what a new program would be started with.

    Args:
        folder: The working folder.
        environment: The whole environment.
        output: Where stdout and stderr go.
    """
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def run_inner_session(folder: Path, environment: dict[str, str], output: Path) -> None:
    """Run the tests of `folder`, a project, in this process, and end it; arguments as above."""
    become(folder, environment, output)
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", str(folder)]))
