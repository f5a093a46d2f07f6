"""`titan-loop checkpoint VERB`: list, check, compare, name and merge checkpoints."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from titan_loop.cli.arguments import group
from titan_loop.errors import EXIT_OK, UserError
from titan_loop.tables import columns

if TYPE_CHECKING:
    from titan_loop.checkpoint.listing import ListedCheckpoint

EXIT_FOUND = 1  # damage or a difference was found; `diff` and `cmp` use the same code


def ls(run: Path, *, verify: bool = False) -> None:
    """List the checkpoints of a run, oldest first.

    Args:
        run: Run directory, or its folder of checkpoints.
        verify: Read every file instead of comparing sizes.
    """
    from titan_loop.checkpoint.listing import list_checkpoints
    from titan_loop.runs.run_checkpoints import checkpoints_folder

    folder, policy = checkpoints_folder(run)
    rows = [("step", "tokens", "R", "size", "when", "kept", "state")]
    for checkpoint in list_checkpoints(folder, hashes=verify, policy=policy):
        manifest = checkpoint.manifest or {}
        trainer = manifest.get("trainer", {})
        tokens = f"{trainer['tokens']:,}" if "tokens" in trainer else "-"
        steps, created = trainer.get("recurrent_steps", "-"), manifest.get("created", "-")
        kept = ", ".join(checkpoint.kept) or "-"
        size, state = _size(checkpoint.size_bytes), _state(checkpoint)
        rows.append((str(checkpoint.step), tokens, str(steps), size, str(created), kept, state))
    print("\n".join(columns(rows, left=range(len(rows[0])))))


def verify(path: Path) -> int:
    """Compare sizes and hashes of all files with the commit record.

    Exit code 1 if anything is damaged. A save that never finished is listed, but is not damage.

    Args:
        path: Run directory, or one checkpoint.
    """
    from titan_loop.runs.run_checkpoints import verified

    listed = verified(path)
    for checkpoint in listed:
        print(f"{checkpoint.path.name}: {_state(checkpoint)}")
    damaged = sum(bool(checkpoint.faults) for checkpoint in listed)
    print(f"{len(listed)} looked at, {damaged} damaged")
    return EXIT_FOUND if damaged else EXIT_OK


def diff(a: Path, b: Path) -> int:
    """Compare commit records, entries, shapes and values of two checkpoints.

    Exit code 1 if anything differs.

    Args:
        a: Checkpoint, or a run (its newest whole checkpoint is taken).
        b: Checkpoint or run to compare it with.
    """
    from titan_loop.checkpoint.difference import differences
    from titan_loop.checkpoint.tensors import CheckpointReader
    from titan_loop.runs.run_checkpoints import checkpoint_meant

    first, second = (CheckpointReader(checkpoint_meant(path)) for path in (a, b))
    count = 0
    for difference in differences(first, second):
        print(difference)
        count += 1
    print(f"{count} differences, {len({*first.keys()} & {*second.keys()})} entries in both")
    return EXIT_FOUND if count else EXIT_OK


def tag(checkpoint: Path, name: str, *, remove: bool = False) -> None:
    """Name a checkpoint; it is kept as long as it has a name.

    Args:
        checkpoint: Folder step-N.
        name: Any word.
        remove: Remove this name instead.
    """
    from titan_loop.checkpoint.folders import add_tag, read_tags, remove_tag
    from titan_loop.checkpoint.manifest import read_manifest

    read_manifest(checkpoint)
    if not name.strip() or not name.isprintable():
        raise UserError(f"checkpoint tag: the name {name!r} is empty or not text; give it a word")
    (remove_tag if remove else add_tag)(checkpoint, name)
    print(f"{checkpoint}: {', '.join(read_tags(checkpoint)) or 'no tags'}")


def merge(checkpoints: tuple[Path, ...], *, output: Path, weights: tuple[float, ...] = ()) -> None:
    """Write the weighted mean of checkpoints of one architecture as a new run.

    The run has one checkpoint of step 0 without the optimiser's moments. `eval`, `generate` and
    `convert export` accept it like any other; `train` starts a run from it with
    --checkpoint.carry.parent RUN --checkpoint.carry.no-optimizer.

    Args:
        checkpoints: Two or more folders step-N, or runs for their newest whole checkpoints. The
            new run has the first one's data and recurrent steps.
        output: New run directory.
        weights: Weight of each checkpoint, at least 0; divided by their sum. Equal by default.
    """
    from titan_loop.runs.conversion import merge_runs

    print(merge_runs(checkpoints, output, weights, sys.argv))


def _state(checkpoint: "ListedCheckpoint") -> str:
    aside = "" if checkpoint.path.name.startswith("step-") else " (set aside)"
    if checkpoint.faults:
        return f"damaged{aside}: {'; '.join(checkpoint.faults)}"
    return f"good{aside}" if checkpoint.committed else f"unfinished{aside}"


def _size(size_bytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.4g} TB"


VERBS = (ls, verify, diff, tag, merge)

run = group("checkpoint", {verb.__name__: verb for verb in VERBS})
