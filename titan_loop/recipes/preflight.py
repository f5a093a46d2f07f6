"""Checks of a stage against its parent and its data; `training/preflight.py` checks a run alone.

`train` and `slurm submit` raise the first refusal; `plan` prints all that need no checkpoint.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from titan_loop.checkpoint.choosing import newest_good
from titan_loop.checkpoint.start_from import check_parent
from titan_loop.data.load.loader import WindowLoader
from titan_loop.errors import Refusal, caught
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.config import RunConfig

# Up to four epochs are nearly as good as new text (Muennighoff et al. 2023, arXiv 2305.16264, §5).
_MOST_SILENT_EPOCHS = 4


def parent_refusals(recipe: Recipe, stage: Stage) -> Iterator[Refusal]:
    """Refuse a stage without a checkpoint of its own while its parent is not complete."""
    if stage.parent is None or saved_state(stage.config) is not None:
        return
    parent = recipe.stage(stage.parent).config
    state = saved_state(parent)
    tokens = 0 if state is None else state["tokens"]
    if tokens < parent.total_tokens:
        yield Refusal(
            "checkpoint.carry.parent",
            f"stage {stage.name} starts from {stage.parent}, which has {tokens} of "
            f"{parent.total_tokens} tokens in {parent.dump_folder}",
            "train it to its end (without --training.steps), or fork with "
            f"--stage {stage.name} --checkpoint.carry.parent CHECKPOINT",
        )


def carry_refusals(
    stage: Stage, parent: Stage, *, wanted: Mapping[str, Any], trained: Mapping[str, Any]
) -> Iterator[Refusal]:
    """Refuse weights and moments that a stage cannot take over from its parent."""
    carry = stage.config.checkpoint.carry
    yield from caught("checkpoint.carry", lambda: check_parent(trained, wanted, carry))
    for field, has, wants in (
        ("trainable", parent.config.trainable, stage.config.trainable),
        ("optimizer.name", parent.config.optimizer.name, stage.config.optimizer.name),
    ):
        if carry.optimizer and has != wants:
            yield Refusal(
                "checkpoint.carry.optimizer",
                f"checkpoint.carry.optimizer=True, but {parent.name} has moments for "
                f"{field}={has} and this stage wants them for {field}={wants}",
                "set it to False",
            )


def repetition_refusals(stage: Stage) -> Iterator[Refusal]:
    """Refuse to read a source more than four times without a cap that allows it."""
    loader = stage.config.open_data()
    if not isinstance(loader, WindowLoader) or loader.order.repeated() is not None:
        return  # not text, or text that is to be read again and again
    demand = loader.demand(stage.config.windows_of_the_run())
    uncapped = [(source.epochs, source.name) for source in demand if source.max_epochs is None]
    epochs, name = max(uncapped, default=(0.0, ""))
    if epochs > _MOST_SILENT_EPOCHS:
        yield Refusal(
            "total_tokens",
            f"total_tokens={stage.config.total_tokens} reads {name} {epochs:.1f} times",
            "lower it, add documents, or allow that many epochs: "
            f"--stages.{stage.name}.dataloader.max-epochs {math.ceil(epochs)}",
        )


def saved_state(config: RunConfig) -> Mapping[str, Any] | None:
    """Return the trainer's record in a run's newest checkpoint; None before the first."""
    newest = newest_good(RunDirectory(config.dump_folder).checkpoints, look_at="manifest")
    return None if newest is None else newest[1]["trainer"]
