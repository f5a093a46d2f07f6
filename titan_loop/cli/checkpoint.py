"""`titan-loop checkpoint VERB`: look at, check, compare, name and delete checkpoints."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from titan_loop.cli.parser import Parser
from titan_loop.cli.verbs import Verb, run_verb
from titan_loop.errors import EXIT_OK, UserError

if TYPE_CHECKING:
    from titan_loop.checkpoint.listing import ListedCheckpoint

EXIT_FOUND = 1
"""Damage, or a difference, was found; as `diff` and `cmp` have it."""


def run(arguments: Sequence[str]) -> int:
    """Run one of the checkpoint verbs."""
    try:
        return run_verb("checkpoint", VERBS, arguments)
    except BrokenPipeError:  # `| head` is no mistake
        raise
    except OSError as error:
        raise UserError(
            f"checkpoint {arguments[0]}: {error.filename or ''} {error.strerror or error}; check "
            "the path and its permissions"
        ) from error


def ls(arguments: Sequence[str]) -> int:
    """List the checkpoints of a run."""
    parser = Parser("checkpoint ls", "List the checkpoints of a run, oldest first.")
    parser.add_argument("run", type=Path, help="the run directory, or its folder of checkpoints")
    parser.add_argument(
        "--verify", action="store_true", help="read every file, instead of comparing sizes"
    )
    given = parser.parse(arguments)

    from titan_loop.checkpoint.listing import list_checkpoints

    folder, keep_every = _folder_of(given.run)
    listed = list_checkpoints(folder, hashes=given.verify, keep_every=keep_every)
    rows = [("step", "tokens", "R", "size", "when", "kept", "state")]
    for checkpoint in listed:
        manifest = checkpoint.manifest or {}
        trainer = manifest.get("trainer", {})
        rows.append(
            (
                str(checkpoint.step),
                f"{trainer['tokens']:,}" if "tokens" in trainer else "-",
                str(trainer.get("recurrent_steps", "-")),
                _size(checkpoint.size_bytes),
                str(manifest.get("created", "-")),
                ", ".join(checkpoint.kept) or "-",
                _state(checkpoint),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print("  ".join([*cells, row[-1]]))
    return EXIT_OK


def verify(arguments: Sequence[str]) -> int:
    """Read every file and name every fault; exit code 1 if there is one."""
    parser = Parser(
        "checkpoint verify",
        "Compare sizes and hashes of all files with the commit record. Exit code 1 if anything is "
        "damaged; a save that never finished is mentioned, but is no damage.",
    )
    parser.add_argument("path", type=Path, help="a run directory, or one checkpoint")
    given = parser.parse(arguments)

    from titan_loop.checkpoint.listing import list_checkpoints, look_at

    if _is_checkpoint(given.path):
        listed = [look_at(given.path, hashes=True)]
    else:
        listed = list_checkpoints(_folder_of(given.path)[0], hashes=True)
    for checkpoint in listed:
        print(f"{checkpoint.path.name}: {_state(checkpoint)}")
    damaged = [checkpoint for checkpoint in listed if checkpoint.faults]
    print(f"{len(listed)} looked at, {len(damaged)} damaged")
    return EXIT_FOUND if damaged else EXIT_OK


def diff(arguments: Sequence[str]) -> int:
    """Compare two checkpoints; exit code 1 if they differ."""
    parser = Parser(
        "checkpoint diff",
        "Compare commit records, entries, shapes and values of two checkpoints. Exit code 1 if "
        "anything differs.",
    )
    parser.add_argument("a", type=Path, help="a checkpoint, or a run for its newest whole one")
    parser.add_argument("b", type=Path, help="another")
    _add_skip_hashes(parser)
    given = parser.parse(arguments)

    from titan_loop.checkpoint.difference import differences
    from titan_loop.checkpoint.tensors import CheckpointReader

    look_at = "sizes" if given.skip_hashes else "hashes"
    a, b = (CheckpointReader(_checkpoint_of(path), look_at=look_at) for path in (given.a, given.b))
    count = 0
    for count, difference in enumerate(differences(a, b), start=1):  # noqa: B007
        print(f"{difference.where}: {difference.how}")
    print(f"{count} differences, {len({*a.keys()} & {*b.keys()})} entries in both")
    return EXIT_FOUND if count else EXIT_OK


def rm(arguments: Sequence[str]) -> int:
    """Delete checkpoints, the commit record of each first."""
    parser = Parser(
        "checkpoint rm",
        "Delete checkpoints. Without --force, those that are kept for ever and the newest good one "
        "are refused, and then nothing is deleted.",
    )
    parser.add_argument("checkpoints", type=Path, nargs="+", help="folders step-N")
    parser.add_argument("--force", action="store_true", help="delete these, too")
    given = parser.parse(arguments)

    from titan_loop.checkpoint.listing import look_at, why_not_delete
    from titan_loop.checkpoint.lock import LOCK, lock_run
    from titan_loop.checkpoint.retention import discard

    with contextlib.ExitStack() as locks:
        locked: set[Path] = set()
        for path in given.checkpoints:
            run = path.absolute().parent.parent
            if not look_at(path).committed and run not in locked and (run / LOCK).exists():
                # Refuses if a job may be writing this one now, and keeps one from beginning to.
                locks.enter_context(lock_run(run))
                locked.add(run)
            reasons = [] if given.force else why_not_delete(path, keep_every=_keep_every(run))
            if reasons:
                raise UserError(
                    f"{path} is kept ({', '.join(reasons)}); nothing was deleted, --force deletes "
                    "it"
                )
        for path in given.checkpoints:
            discard(path)
            print(f"Deleted {path}")
    return EXIT_OK


def tag(arguments: Sequence[str]) -> int:
    """Name a checkpoint, which keeps it for ever."""
    parser = Parser("checkpoint tag", "Name a checkpoint; as long as it has a name it is kept.")
    parser.add_argument("checkpoint", type=Path, help="folder step-N")
    parser.add_argument("name", help="any word")
    parser.add_argument("--remove", action="store_true", help="take the name away")
    given = parser.parse(arguments)

    from titan_loop.checkpoint.manifest import read_manifest
    from titan_loop.checkpoint.retention import add_tag, read_tags, remove_tag

    read_manifest(given.checkpoint)
    if not given.name.strip():
        raise UserError("checkpoint tag: the name is empty; give it a word")
    (remove_tag if given.remove else add_tag)(given.checkpoint, given.name)
    print(f"{given.checkpoint}: {', '.join(read_tags(given.checkpoint)) or 'no tags'}")
    return EXIT_OK


def consolidate(arguments: Sequence[str]) -> int:
    """Write the full tensors to one safetensors file."""
    parser = Parser(
        "checkpoint consolidate",
        "Write a checkpoint's full tensors, and where it comes from, to one safetensors file.",
    )
    parser.add_argument(
        "checkpoint", type=Path, help="folder step-N, or a run for its newest whole checkpoint"
    )
    parser.add_argument("--output", type=Path, required=True, help="the new file")
    parser.add_argument("--optimizer", action="store_true", help="optimiser tensors, too")
    _add_skip_hashes(parser)
    given = parser.parse(arguments)

    from titan_loop.checkpoint import consolidate as consolidation
    from titan_loop.checkpoint.tensors import CheckpointReader

    look_at = "sizes" if given.skip_hashes else "hashes"
    reader = CheckpointReader(_checkpoint_of(given.checkpoint), look_at=look_at)
    keys = consolidation.consolidate(reader, given.output, optimizer=given.optimizer)
    print(f"{given.output}: {len(keys)} tensors, {_size(given.output.stat().st_size)}")
    return EXIT_OK


def _add_skip_hashes(parser: Parser) -> None:
    parser.add_argument(
        "--skip-hashes", action="store_true", help="compare sizes only before reading"
    )


def _is_checkpoint(path: Path) -> bool:
    from titan_loop.checkpoint.manifest import MANIFEST

    return (path / MANIFEST).exists() or (path / ".metadata").exists()


def _checkpoint_of(path: Path) -> Path:
    """Return a checkpoint's folder; a run stands for its newest whole checkpoint."""
    from titan_loop.runs.run_directory import RunDirectory
    from titan_loop.runs.saved_run import SavedRun

    return SavedRun(path).checkpoint().path if RunDirectory(path).run_json.exists() else path


def _folder_of(path: Path) -> tuple[Path, int]:
    """Return the folder of a run's checkpoints, and which multiples the run keeps."""
    from titan_loop.runs.run_directory import RunDirectory

    run_directory = RunDirectory(path)
    if run_directory.run_json.exists():
        return run_directory.checkpoints, _keep_every(path)
    if not any(path.glob("*step-*")):
        stages = sorted(run.parent.name for run in path.glob("*/run.json"))
        which = f"one of {', '.join(stages)} in it" if stages else "a run directory"
        raise UserError(f"{path} has no checkpoints; give {which}")
    return path, _keep_every(path.absolute().parent)


def _keep_every(run: Path) -> int:
    from titan_loop.runs.run_directory import RunDirectory
    from titan_loop.runs.saved_run import SavedRun

    return SavedRun(run).keep_every if RunDirectory(run).config_json.exists() else 0


def _state(checkpoint: "ListedCheckpoint") -> str:
    aside = "" if checkpoint.path.name.startswith("step-") else " (set aside)"
    if not checkpoint.committed:
        return f"unfinished{aside}"
    if not checkpoint.faults:
        return f"good{aside}"
    return f"damaged{aside}: {'; '.join(checkpoint.faults)}"


def _size(size_bytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.4g} TB"


VERBS: dict[str, Verb] = {
    "ls": ls,
    "verify": verify,
    "diff": diff,
    "rm": rm,
    "tag": tag,
    "consolidate": consolidate,
}
