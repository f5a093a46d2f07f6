"""Where a run comes from: the chain of runs that its checkpoints' manifests name, oldest first."""

from pathlib import Path
from typing import Any, NamedTuple

from titan_loop.checkpoint.manifest import read_manifest
from titan_loop.checkpoint.retention import committed_steps
from titan_loop.errors import UserError
from titan_loop.runs.run_directory import RunDirectory


class Ancestor(NamedTuple):
    """One run of the chain; the last is the run itself.

    Attributes:
        run: Its folder.
        stage: The stage's name; empty for a run that is none.
        checkpoint: The one the next run started from, or the newest.
        manifest: That checkpoint's; None if it is gone or damaged.
    """

    run: Path
    stage: str
    checkpoint: Path
    manifest: dict[str, Any] | None


def read_lineage(run_directory: RunDirectory) -> list[Ancestor]:
    """Return the chain of a run; empty before its first checkpoint.

    A recipe's folder may have been moved: a parent that is not where the manifest says is looked
    for beside its child, and taken if its manifest has the recorded hash.
    """
    folder = run_directory.path / run_directory.read_config()["checkpoint"]["folder"]
    steps = committed_steps(folder)
    chain: list[Ancestor] = []
    checkpoint, manifest = None, None
    for step in reversed(steps):
        checkpoint = folder / f"step-{step}"
        manifest = _manifest_or_none(checkpoint)
        if manifest is not None:
            break
    while checkpoint is not None:
        lineage = {} if manifest is None else manifest["lineage"]
        run = checkpoint.parent.parent
        chain.append(Ancestor(run, lineage.get("stage") or "", checkpoint, manifest))
        origin = lineage.get("origin")
        checkpoint, manifest = None, None
        if origin is not None and len(chain) < 1000:  # a chain that bites its tail is damaged
            checkpoint, manifest = _find(origin, beside=run)
    return chain[::-1]


def _find(origin: dict[str, str], *, beside: Path) -> tuple[Path, dict[str, Any] | None]:
    recorded = Path(origin["path"])
    moved = beside.parent / Path(*recorded.parts[-3:])
    for path in (recorded, moved):
        manifest = _manifest_or_none(path)
        if manifest is not None and manifest["sha256"] == origin["manifest_sha256"]:
            return path, manifest
    return recorded, None


def _manifest_or_none(checkpoint: Path) -> dict[str, Any] | None:
    try:
        return read_manifest(checkpoint)
    except UserError:
        return None
