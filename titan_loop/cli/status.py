"""`titan-loop status FOLDER`: the tree of stages and forks, losses, time left, what is next."""

from collections.abc import Sequence
from pathlib import Path

from titan_loop.cli.parser import Parser
from titan_loop.errors import EXIT_OK


def run(arguments: Sequence[str]) -> int:
    """Print the tree."""
    parser = Parser("status", "Show how far a recipe's stages, or one run, have come.")
    parser.add_argument("folder", help="a recipe's folder, or a run directory")
    given = parser.parse(arguments)

    from titan_loop.runs.status import read_status, status_lines

    print("\n".join(status_lines(read_status(Path(given.folder)))))
    return EXIT_OK
