"""A recipe is a list of stages; a stage is a complete run and the stage that it starts from.

    Recipe("ouro", [1a, 1b (parent 1a), …]) ─► runs/ouro/1a, runs/ouro/1b, …

Every stage has its own run directory below the recipe's folder, so a stage can be repeated, forked
or launched alone. Its checkpoints name the checkpoint that they descend from.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from titan_loop.errors import UserError, nearest
from titan_loop.training.trainer import LoopTrainer

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclass(kw_only=True, slots=True)
class Stage:
    """One job of a recipe."""

    name: str
    """Name of the stage and its run directory: letters, digits, dot, dash and underscore."""

    config: LoopTrainer.Config
    """Config of the run; the recipe sets `stage`, `dump_folder` and the parent's path."""

    parent: str | None = None
    """Name of the stage whose last checkpoint it starts from; None for initial weights."""

    control: bool = False
    """Whether it is a comparison, which `titan-loop scaling` leaves out of a law."""


@dataclass(kw_only=True, slots=True)
class Recipe:
    """Stages in the order in which they run."""

    name: str
    stages: list[Stage]
    folder: str = ""
    """Folder of the stages' run directories; empty for `runs/NAME`."""

    words: tuple[str, ...] = ()
    """Words after `titan-loop train` that name and change it; empty if no command line did."""

    is_fork: bool = False
    """Whether the one stage to train starts from a checkpoint that its parent did not leave."""

    @classmethod
    def of_one_run(cls, name: str, config: LoopTrainer.Config) -> "Recipe":
        """Return a recipe with one run, which trains in the config's own folder."""
        return cls(name=name, stages=[Stage(name=name, config=config)], folder=config.dump_folder)

    def check(self) -> None:
        """Raise `UserError` unless names are unique and every parent comes before its children."""
        if not self.stages:
            raise UserError(f"recipe {self.name} has no stage; give it at least one")
        seen: list[str] = []
        for stage in self.stages:
            name, parent, wrong = stage.name, stage.parent, ""
            if not _NAME.fullmatch(name):
                wrong = "cannot name a folder; use letters, digits, dot, dash and underscore"
            elif name in seen:
                wrong = "is there twice; rename one"
            elif parent is not None and parent in (
                other.name for other in self.stages[len(seen) :]
            ):
                wrong = f"starts from {parent}, which does not run before it: reorder them"
            elif parent is not None and parent not in seen:
                wrong = f"starts from {parent}, which does not exist{nearest(parent, seen)}"
            elif parent is not None and stage.config.checkpoint.carry.parent:
                wrong = f"names the parent {parent} and checkpoint.carry.parent; keep one, or fork "
                wrong += f"it with --stage {name}"
            if wrong:
                raise UserError(f"recipe {self.name}: stage {name!r} {wrong}")
            seen.append(name)

    def stage(self, name: str) -> Stage:
        """Return the stage called `name`; raise `UserError` if there is none."""
        stages = {stage.name: stage for stage in self.stages}
        if name not in stages:
            raise UserError(f"recipe {self.name} has no stage {name!r}{nearest(name, stages)}")
        return stages[name]

    def chosen(self, only: str | None) -> list[Stage]:
        """Return all stages, or the one called `only`."""
        return self.stages if only is None else [self.stage(only)]

    def place(self, folder: str = "") -> Path:
        """Set every stage's run directory and parent; return the folder of the recipe."""
        root = Path(folder or self.folder or f"runs/{self.name}")
        alone = len(self.stages) == 1 and self.stages[0].name == self.name
        for stage in self.stages:
            stage.config.stage = stage.name
            stage.config.dump_folder = str(root if alone else root / stage.name)
            if stage.parent is not None:
                stage.config.checkpoint.carry.parent = str(root / stage.parent)
        return root
