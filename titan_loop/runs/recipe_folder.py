"""The run to use where a user gives the folder of a recipe instead of a run."""

import logging
from pathlib import Path

from titan_loop.errors import UserError, nearest
from titan_loop.runs.status import RECIPE_JSON

logger = logging.getLogger(__name__)


def chosen_run(folder: Path, stage: str | None) -> Path:
    """Return the run to look at; in a recipe's folder, the run of a stage or fork.

    Without a `stage` it is the one trained last, which the log names.
    """
    if not (folder / RECIPE_JSON).exists():
        if stage is not None:
            raise UserError(
                f"--stage {stage}: {folder} is not the folder of a recipe; leave --stage out"
            )
        return folder
    begun = {path.parent.name: path.stat().st_mtime for path in folder.glob("*/metrics.jsonl")}
    if not begun:
        raise UserError(f"{folder}: no stage has begun; train it first")
    if stage is not None and stage not in begun:
        raise UserError(f"--stage {stage} is not a stage begun in {folder}{nearest(stage, begun)}")
    if stage is None:
        by_age = sorted(begun, key=lambda name: (begun[name], name))
        stage = by_age[-1]
        text = "%s has the stages %s: taking %s; --stage takes another"
        logger.info(text, folder, ", ".join(by_age), stage)
    return folder / stage
