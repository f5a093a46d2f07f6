"""A new run starts from another run's checkpoint: its weights, and its moments if wanted.

Step, tokens and data start anew, since a stage is a job with schedules of its own. R, β and the
RoPE base may differ between parent and run. Tensors may not, except for layers added by upcycling
and entries that keep their initial values.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from titan_loop.checkpoint.choosing import newest_good
from titan_loop.checkpoint.folders import CHECKPOINTS, is_committed, step_folder
from titan_loop.checkpoint.keep_policy import named_checkpoint
from titan_loop.checkpoint.loading import OPTIMIZER_PREFIX, KeyPolicy
from titan_loop.checkpoint.model import check_architecture, different_options
from titan_loop.checkpoint.tensor_table import read_table
from titan_loop.checkpoint.upcycling import Moments, Upcycling, looped_layers, with_layers
from titan_loop.errors import UserError, runs_in, seen_from


@dataclass(kw_only=True, slots=True)
class StartFrom:
    """The parent of a run that has no checkpoint of its own.

    Attributes:
        parent: A checkpoint, or a run (its newest is used); empty for initial weights. A parent
            whose files do not match its manifest is refused: falling back should be your decision.
        optimizer: Whether to take the optimiser's moments, too; otherwise they start at zero.
        keep_initial: Patterns of entries, such as "exit_gate.*", that keep their initial values if
            the parent lacks them; the model option before the first dot may then differ.
        upcycle: Whether and how to copy looped layers if this model has a multiple of the parent's:
            stacked repeats them all in order, interleaved puts each layer's copies side by side.
        moments: Whether copied layers get the parent's moments unchanged (duplicate), divided by
            the number of copies (scale), or zero (reset).
    """

    parent: str = ""
    optimizer: bool = True
    keep_initial: list[str] = field(default_factory=list)
    upcycle: Literal["no", "stacked", "interleaved"] = "no"
    moments: Moments = "scale"

    def upcycling(self, n_layers: int) -> Upcycling | None:
        """Return the upcycling that gives the parent `n_layers` layers; None if there is none."""
        if self.upcycle == "no":
            return None
        return Upcycling(n_layers=n_layers, mode=self.upcycle, moments=self.moments)

    def key_policy(self) -> KeyPolicy:
        """Return the entries in which parent and run may differ."""
        with_moments = [f"optimizer.*{pattern}" for pattern in self.keep_initial]
        return KeyPolicy(
            ignore_saved=() if self.optimizer else ("optimizer.*",),
            keep_initial=(*self.keep_initial, *with_moments),
        )

    def find_parent(self) -> Path:
        """Return the folder of the parent checkpoint; raise `UserError` if there is none."""
        path = named_checkpoint(Path(self.parent))
        if is_committed(path):
            return path
        folder = path / CHECKPOINTS
        newest = newest_good(folder, look_at="manifest")
        if newest is None:
            raise UserError(
                f"checkpoint.carry.parent={self.parent} is neither a checkpoint nor a run that "
                f"has one{seen_from(path)}; "
                + runs_in(path, "train the parent first, or give another path")
            )
        return step_folder(folder, newest[0])


def has_moments(checkpoint: Path) -> bool:
    """Return whether a checkpoint holds the optimiser's state; an imported one does not."""
    keys = read_table(checkpoint).state_dict_metadata
    return any(key.startswith(OPTIMIZER_PREFIX) for key in keys)


def check_moments(parent: Path, carry: StartFrom) -> None:
    """Raise `UserError` if a parent's moments are wanted and it has none, as after an import."""
    if carry.optimizer and not has_moments(parent):
        raise UserError(
            f"checkpoint.carry.parent={parent} has weights, but no optimizer moments; start "
            "without them: --checkpoint.carry.no-optimizer"
        )


def check_parent(saved: Mapping[str, Any], wanted: Mapping[str, Any], carry: StartFrom) -> None:
    """Raise `UserError` naming every difference between parent and run that is not allowed."""
    may_differ = {"rope_theta"}
    if upcycling := carry.upcycling(wanted["n_layers"]):
        saved = with_layers(saved, upcycling.sources(saved))
    may_differ |= {pattern.partition(".")[0] for pattern in carry.keep_initial}
    rest_fits = different_options(saved, wanted) <= {*may_differ, "n_layers"}
    # Upcycling helps only if nothing else differs and the number of looped layers is a multiple.
    deeper = rest_fits and len(looped_layers(wanted)) % len(looped_layers(saved)) == 0
    check_architecture(
        saved,
        wanted,
        may_differ=may_differ,
        holder="the parent",
        otherwise="checkpoint.carry.upcycle=stacked" if deeper else "another parent",
    )
