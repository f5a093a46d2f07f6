"""`titan-loop status FOLDER`: the tree of stages and forks, losses, time left, the next command."""

from pathlib import Path

from titan_loop.cli.arguments import command


@command("status")
def run(folder: Path) -> None:
    """Show the progress of a recipe's stages, or of one run.

    Args:
        folder: Recipe's folder, or a run directory.
    """
    from titan_loop.runs.status import read_status, status_lines

    print("\n".join(status_lines(read_status(folder))))
