"""The tree of a recipe's stages and forks: the progress and loss of each, and the next stage.

It is read from files alone: `recipe.json`, which the runner writes, and the run directories below
the recipe's folder. A run outside the recipe that started from one of its stages is a fork.
"""

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from titan_loop.checkpoint.folders import CHECKPOINTS
from titan_loop.errors import UserError, seen_from
from titan_loop.runs.decisions import count_decisions
from titan_loop.runs.run_directory import LOCK, RunDirectory
from titan_loop.runs.saved_run import SavedRun
from titan_loop.storage.folder_lock import is_held
from titan_loop.storage.json_files import read_versioned_json, write_json
from titan_loop.tables import columns, format_duration

RECIPE_JSON = "recipe.json"
FORMAT_VERSION = 1
_FIX = "train once more to write it"


class PlannedStage(NamedTuple):
    """One stage of a recipe, as `recipe.json` records it; studies leave out a `control`.

    `parent` names the stage that it starts from; None stands for initial weights.
    """

    name: str
    parent: str | None
    total_tokens: int
    control: bool = False


def write_plan(
    folder: Path, recipe: str, stages: Iterable[PlannedStage], *, flags: Iterable[str] = ()
) -> None:
    """Record a recipe's stages, in their order, in its folder; call it on one rank.

    `recipe` is the name that `titan-loop train` takes, with the `flags` of all stages.
    """
    recorded = [stage._asdict() for stage in stages]
    plan = {"format_version": FORMAT_VERSION, "name": recipe, "flags": [*flags]}
    plan["stages"] = recorded
    write_json(folder / RECIPE_JSON, plan)


@dataclass(slots=True)
class StageStatus:
    """One stage or fork, by the name of its run directory.

    Attributes:
        parent: Name of the run that it starts from; empty for initial weights.
        loss: Training loss of its last logged step, in nats; None before the first.
        runs: Whether a job trains it now; None if that is not known.
        planned: Whether it belongs to the recipe; True for a run without one.
        position: Position in the recipe; forks come after all stages.
        damage: Reason why none of its checkpoints can be used; empty if one can, or none exists.
        decisions: Skipped spikes and rewinds, as a phrase; empty if there were none.
    """

    name: str
    total_tokens: int
    parent: str = ""
    tokens: int = 0
    saved_tokens: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    runs: bool | None = None
    planned: bool = True
    position: int = 0
    damage: str = ""
    decisions: str = ""
    command: str = ""
    children: list["StageStatus"] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether a checkpoint holds its last token."""
        return self.saved_tokens >= self.total_tokens


def read_status(folder: Path) -> list[StageStatus]:
    """Return the stages of a recipe, or the run, that start from initial weights, as a tree.

    A folder of several runs and recipes, such as `runs`, gives all of them.
    """
    plan = read_plan(folder)
    recipe = _command_of(folder) if plan else ""
    places = {stage.name: (folder / stage.name).resolve() for stage in plan}
    parents = {places[stage.name]: places.get(stage.parent or "") for stage in plan}
    found = {
        places[stage.name]: StageStatus(
            stage.name, stage.total_tokens, position=position, command=recipe
        )
        for position, stage in enumerate(plan)
    }
    recipes: list[StageStatus] = []
    for run in [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]:
        if run != folder and (run / RECIPE_JSON).exists():
            for root in read_status(run):
                root.name = f"{run.name}/{root.name}"
                recipes.append(root)
        if not RunDirectory(run).run_json.exists():
            continue
        saved, place = SavedRun(run), run.resolve()
        fork = StageStatus(run.name, saved.total_tokens, planned=not plan, position=len(found))
        status = found.setdefault(place, fork)
        if saved.total_tokens >= status.total_tokens:  # else it is the recipe that goes on
            status.command = f"titan-loop train {shlex.quote(str(run))}"
        _measure(status, saved)
        if parents.get(place) is None:  # not the recipe's, or forked from elsewhere
            parents[place] = _parent_run(saved)
    if not found and not recipes:
        raise UserError(
            f"{folder} holds neither a run nor a recipe's stages; give the folder of one"
        )
    roots = []
    for place, status in found.items():
        parent = parents.get(place)
        status.parent = "" if parent is None else parent.name
        (found[parent].children if parent in found else roots).append(status)
    return roots + recipes


def status_lines(roots: list[StageStatus]) -> list[str]:
    """Return the tree as text, one stage per line, and the next stage to run."""
    rows = [row for root in roots for row in _rows(root, "", "")]
    lines = columns([(label, _describe(status)) for label, status in rows], left=(0, 1))
    left = [status for _, status in rows if status.planned and not status.complete]
    waiting = min(left, key=lambda status: status.position, default=None)
    lines.append(f"next: {waiting.command or waiting.name}" if waiting else "everything is trained")
    return lines


def _rows(status: StageStatus, stem: str, branch: str) -> Iterator[tuple[str, StageStatus]]:
    yield stem + branch + status.name, status
    below = stem + {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
    for number, child in enumerate(status.children, start=1):
        yield from _rows(child, below, "└─ " if number == len(status.children) else "├─ ")


def _describe(status: StageStatus) -> str:
    loss = "" if status.loss is None else f", loss {status.loss:.4f}"
    loss += f", {status.decisions}" if status.decisions else ""
    fork = "" if status.planned else ", not of the recipe"
    if status.damage:
        return f"{status.damage}{fork}"
    if status.complete:
        return f"complete, {status.total_tokens:,} tokens{loss}{fork}"
    if not status.tokens:
        origin = f" from {status.parent}" if status.parent else ""
        return f"not begun{origin}, {status.total_tokens:,} tokens{fork}"
    share, left = status.tokens / status.total_tokens, ""
    if status.runs is False:
        left = ", not running"
    elif status.tokens_per_second:
        seconds = max(0, status.total_tokens - status.tokens) / status.tokens_per_second
        left = f", about {format_duration(seconds)} left"
    return f"{share:.1%} of {status.total_tokens:,} tokens{loss}{left}{fork}"


def _measure(status: StageStatus, run: SavedRun) -> None:
    status.total_tokens = max(status.total_tokens, run.total_tokens)
    status.runs = is_held(run.path / LOCK)
    try:
        newest = run.newest(look_at="manifest")
    except UserError as error:
        newest, status.damage = None, str(error)
    status.tokens = status.saved_tokens = 0 if newest is None else newest.tokens
    status.decisions = count_decisions(run.directory.read_decisions())
    records = run.directory.read_metrics()
    if records:
        status.tokens = records[-1]["tokens"]
        status.loss = records[-1].get("loss")
        status.tokens_per_second = records[-1].get("tokens_per_second")


def read_plan(folder: Path) -> list[PlannedStage]:
    """Return the stages of a recipe's folder; none for a run's."""
    path = folder / RECIPE_JSON
    if not path.exists():
        if not folder.is_dir():
            raise UserError(
                f"{folder} is not a folder{seen_from(folder)}; give the folder of a run or a recipe"
            )
        return []
    return [PlannedStage(**stage) for stage in _read_plan(folder)["stages"]]


def _read_plan(folder: Path) -> dict[str, Any]:
    return read_versioned_json(folder / RECIPE_JSON, format_version=FORMAT_VERSION, fix=_FIX)


def _command_of(folder: Path) -> str:
    plan = _read_plan(folder)
    words = [
        plan["name"],
        "--dump-folder",
        str(folder),
        *plan.get("flags", []),
    ]  # dfd5e2b4 recorded none
    # Flags come last: `activation-checkpoint:KIND` must.
    return f"titan-loop train {shlex.join(words)}"


def _parent_run(run: SavedRun) -> Path | None:
    if run.parent is None:
        return None
    path = run.parent.absolute()  # a checkpoint may be a link
    return (path.parents[1] if path.parent.name == CHECKPOINTS else path).resolve()
