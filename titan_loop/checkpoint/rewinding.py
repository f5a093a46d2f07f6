"""Goes back to an older checkpoint of the run that is training; what came after it is set aside."""

import logging
from collections.abc import Collection

from titan_loop.checkpoint.choosing import newest_good
from titan_loop.checkpoint.manager import LoopCheckpointManager
from titan_loop.checkpoint.retention import committed_steps, step_folder
from titan_loop.ranks import on_rank_zero

logger = logging.getLogger(__name__)


def go_back(manager: LoopCheckpointManager, *, before: int, avoid: Collection[int]) -> int | None:
    """Load the newest good checkpoint of an earlier step; collective.

    Newer ones are renamed to `rewound-step-N`: they belong to what is given up, and the next start
    must not take them for the newest.

    Args:
        manager: The run's.
        before: Its step is below this.
        avoid: Steps to go back to only if there is no other.

    Returns:
        The step, whose state is loaded now; None if there is no such checkpoint.
    """
    manager.maybe_wait_for_saving()
    for shunned in ({*avoid}, set[int]()):
        found = newest_good(
            manager.path,
            look_at="hashes" if manager.config.verify_hashes else "sizes",
            group=manager.group,
            wanted=lambda step, shunned=shunned: step < before and step not in shunned,
        )
        if found is not None:
            step = found[0]
            on_rank_zero(manager.group, lambda step=step: _set_aside(manager, step))
            manager.load(step)
            return step
    return None


def _set_aside(manager: LoopCheckpointManager, step: int) -> None:
    for newer in committed_steps(manager.path):
        if newer > step:
            path = step_folder(manager.path, newer)
            aside = manager.path / f"rewound-step-{newer}"
            while aside.exists():
                aside = aside.with_name(f"{aside.name}-again")
            path.rename(aside)
            logger.warning("Renamed %s to %s", path, aside.name)
