"""What is raised for a checkpoint that is broken rather than wrongly asked for.

A run's own checkpoints are looked at before they are loaded, and an older one is used instead;
everywhere else nobody can repair it, so it is a `UserError`, too.
"""

from pathlib import Path

from titan_loop.errors import UserError


class DamagedCheckpointError(UserError):
    """A file of a checkpoint is missing, truncated or altered.

    Args:
        path: The file, or the checkpoint's folder.
        reason: What is wrong with it, as a phrase.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)  # both, so that it travels between ranks
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path} is damaged: {self.reason}; use another checkpoint"
