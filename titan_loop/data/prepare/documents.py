"""The documents to prepare: an explicit list of files, or a Hugging Face dataset, and the format.

With the list, every step, task and restart reads the same files in the same order.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from tyro.constructors import PrimitiveConstructorSpec

from titan_loop.errors import UserError, nearest
from titan_loop.storage.local_path import require_local

logger = logging.getLogger(__name__)

Inputs = Annotated[
    str | Path | Sequence[str | Path],
    PrimitiveConstructorSpec(
        nargs="*",
        metavar="PATH ...",
        instance_from_str=tuple,
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(value)],
    ),
]
"""Files, folders, or the name of a dataset; several on the command line."""

Format = Literal["auto", "jsonl", "parquet", "text", "huggingface"]
FORMATS: tuple[str, ...] = get_args(Format)
_SUFFIXES = {"jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst"), "parquet": (".parquet",)}
_MAYBE_LINES = (".json", ".json.gz", ".json.zst", ".ndjson", ".ndjson.gz", ".ndjson.zst")
_HELD_OUT_PAIR = ("train.jsonl", "held_out.jsonl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """Files to read, or a dataset.

    Attributes:
        format: Any format but "auto".
        files: Absolute paths.
        held_out_files: Files of the held-out split; without any, a hash of each document decides.
        dataset: Name of a Hugging Face dataset, or a folder that `datasets` loads.
    """

    format: str
    files: tuple[str, ...] = ()
    held_out_files: tuple[str, ...] = ()
    dataset: str = ""
    dataset_config: str | None = None
    dataset_split: str = "train"

    def all_files(self) -> tuple[str, ...]:
        """Return the files of both splits."""
        return self.files + self.held_out_files


def find_documents(
    inputs: Inputs,
    held_out_inputs: Inputs = (),
    *,
    format: Format = "auto",
    pattern: Sequence[str] = (),
    dataset_config: str | None = None,
    dataset_split: str = "train",
    ours: Sequence[Path] = (),
) -> Documents:
    """Resolve the inputs of `tokenize_source` to files.

    A folder gives its JSONL or Parquet files; if it has neither, each of its files is a document.
    With a format and patterns, it gives every file that matches a pattern. `ours` are files and
    folders written by an earlier run, to be skipped.

    Raises:
        UserError: For inputs that are missing, mixed or ambiguous, or options without effect.
    """
    if format not in FORMATS:
        raise UserError(f"format {format!r} is not known{nearest(format, FORMATS)}")
    if format == "huggingface":
        names = [str(path) for path in _as_list(inputs)]
        if len(names) != 1:
            raise UserError(f"format 'huggingface' reads one dataset, not {len(names)}: {names}")
        if held_out_inputs or pattern:
            raise UserError(
                "held_out_inputs and patterns have no effect on a Hugging Face dataset: use "
                "--held-out-fraction"
            )
        return Documents(
            format=format,
            dataset=names[0],
            dataset_config=dataset_config,
            dataset_split=dataset_split,
        )
    if dataset_config is not None or dataset_split != "train":
        raise UserError(
            "dataset_config and dataset_split have no effect on files: give --format huggingface "
            "or drop them"
        )
    paths = _as_list(inputs)
    held_out = _as_list(held_out_inputs)
    if not held_out and len(paths) == 1 and format in ("auto", "jsonl"):
        pair = [paths[0] / name for name in _HELD_OUT_PAIR]
        if all(path.is_file() for path in pair):
            paths, held_out = [pair[0]], [pair[1]]
    kinds: set[str] = set()
    files = _expand(paths, format, pattern, ours, kinds)
    held_out_files = _expand(held_out, format, pattern, ours, kinds)
    if not files:
        raise UserError("no input: give at least one file or folder")
    if len(kinds) > 1:
        raise UserError(f"the inputs mix {' and '.join(sorted(kinds))}: prepare them separately")
    resolved = [{Path(path).resolve() for path in given} for given in (files, held_out_files)]
    if shared := resolved[0] & resolved[1]:
        raise UserError(f"input {min(shared)} is given for training and held out: choose one")
    return Documents(format=kinds.pop(), files=files, held_out_files=held_out_files)


def _as_list(inputs: Inputs) -> list[Path]:
    paths = [inputs] if isinstance(inputs, str | Path) else inputs
    for path in paths:
        require_local(path, "input")
    return [Path(path) for path in paths]


def _expand(
    paths: list[Path], format: str, patterns: Sequence[str], ours: Sequence[Path], kinds: set[str]
) -> tuple[str, ...]:
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            kind, found = _in_folder(path, format, patterns, ours)
        elif not path.is_file():
            raise UserError(
                f"input {path} does not exist: build or download the documents first (a Hugging "
                "Face dataset needs --format huggingface)"
            )
        elif format == "auto" and path.name.lower().endswith(_MAYBE_LINES):
            raise UserError(
                f"input {path} may hold JSON lines or be one document: give --format jsonl or "
                "--format text"
            )
        else:
            kind, found = (_kind(path) if format == "auto" else format), [path]
        kinds.add(kind)
        files += found
    counts = Counter(path.resolve() for path in files)
    if counts and max(counts.values()) > 1:
        twice = max(counts, key=counts.__getitem__)
        raise UserError(f"input {twice} is given twice: its documents would be stored twice")
    # A link keeps its own name, which gives the format: download caches link to nameless files.
    absolute = [str(path.parent.resolve() / path.name) for path in files]
    for path in absolute:
        broken = path != path.strip() or set(path) & {"\n", "\r"}
        # A name that is not UTF-8 has halves of surrogate pairs, which encode to "?".
        if broken or path.encode(errors="replace").decode() != path:
            raise UserError(
                f"input {path!r} has a name that a list of files cannot hold (a line break, a "
                "space at its end, or not UTF-8): rename it"
            )
    return tuple(absolute)


def _in_folder(
    folder: Path, format: str, patterns: Sequence[str], ours: Sequence[Path]
) -> tuple[str, list[Path]]:
    visible = _visible_files(folder, ours)
    matching = [
        path for path in visible if not patterns or any(path.match(glob) for glob in patterns)
    ]
    kinds = {_kind(path) for path in matching} - {"text"} if format == "auto" else {format}
    if len(kinds) > 1:
        raise UserError(f"input folder {folder} mixes {' and '.join(sorted(kinds))}: give --format")
    lines = [path for path in matching if path.name.lower().endswith(_MAYBE_LINES)]
    if format == "auto" and lines and lines == matching:
        raise UserError(
            f"input folder {folder} has files like {lines[0].name}, which may hold JSON lines or "
            "be one document each: give --format jsonl and --pattern, or --format text"
        )
    kind = kinds.pop() if kinds else "text"
    chosen = kind == "text" or (format != "auto" and patterns)
    found = [path for path in matching if chosen or _kind(path) == kind]
    if not found:
        wanted = "document" if format == "auto" else format
        rest = f" that matches {', '.join(patterns)}" if patterns else ""
        if format != "auto" and not patterns:
            rest = ": choose by name with --pattern"
        raise UserError(f"input folder {folder} has no {wanted} file{rest}")
    if len(found) < len(visible):
        logger.info("%s: %d of %d files are %s", folder, len(found), len(visible), kind)
    originals = {path.resolve() for path in found if not path.is_symlink()}
    once = [path for path in found if not path.is_symlink() or path.resolve() not in originals]
    if len(once) < len(found):
        logger.warning("%s: left out %d links to other files of it", folder, len(found) - len(once))
    return kind, once


def _visible_files(folder: Path, ours: Sequence[Path]) -> list[Path]:
    root, written = folder.resolve(), {path.resolve() for path in ours}
    files: set[Path] = set()
    shown: list[Path] = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if not written.isdisjoint((root / name, *(root / name).parents)):
            continue
        if path.is_file():
            files.add(path)
        if not any(part.startswith(".") for part in name.parts):
            shown.append(path)
    visible = [path for path in shown if path in files]
    if len(visible) < len(files):
        logger.warning("%s: left out %d hidden files", folder, len(files) - len(visible))
    if links := sum(path not in files and path.is_symlink() for path in shown):
        logger.warning(
            f"{folder}: left out {links} links to folders or to nothing; give folders as inputs "
            "of their own"
        )
    return visible


def _kind(path: Path) -> str:
    return next(
        (kind for kind, suffixes in _SUFFIXES.items() if path.name.lower().endswith(suffixes)),
        "text",
    )
