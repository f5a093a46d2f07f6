"""The documents to prepare: an explicit list of files with their kinds.

With the list, every step, task and restart reads the same files in the same order. `file_kinds.py`
says what one file holds; this module says which files of a folder are read, and which of them are
held out. `SHAPES.md` lists examples.
"""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args

from tyro.constructors import PrimitiveConstructorSpec

from titan_loop.data.prepare.file_kinds import (
    ABOUT,
    OTHER,
    RECORDS,
    SIDE,
    TEXT,
    InputFile,
    by_ending,
    contents_of,
    kind_of,
)
from titan_loop.errors import UserError, listed, require_known
from titan_loop.storage.file_names import require_local

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
"""Files or folders; several on the command line."""

Format = Literal["auto", "jsonl", "json", "csv", "tsv", "parquet", "arrow", "text"]

_NAMES = {
    "held_out": r"h[eo]ld[-_. ]?out|validation",
    "test": r"tests?|testing|devtest|val|valid|dev|eval|evaluation",
    "train": r"train(?:ing)?",
}
# A name counts where it is a whole part: in `test.jsonl` and `dev/a.txt`, not in `latest.jsonl`.
# Where a part of a path has two of them, the first counts: nothing held out is trained on.
_PATTERNS = {
    role: re.compile(rf"(?<![^\W_])(?:{names})(?:set|data)?\d*(?![^\W_])")
    for role, names in _NAMES.items()
}
_SHOWN = 3


class Documents(NamedTuple):
    """Files to read; without `held_out_files`, a hash of each document decides its split."""

    files: tuple[InputFile, ...]
    held_out_files: tuple[InputFile, ...] = ()

    def all_files(self) -> tuple[InputFile, ...]:
        """Return the files of both splits."""
        return self.files + self.held_out_files


def find_documents(
    inputs: Inputs,
    held_out_inputs: Inputs = (),
    *,
    format: Format = "auto",
    pattern: Sequence[str] = (),
    ours: Sequence[Path] = (),
) -> Documents:
    """Resolve the inputs of `tokenize_source` to files.

    A folder gives its files of records; if it has none, each of its texts is a document. With a
    format and patterns, it gives every file that matches a pattern. Of a folder with files called
    train, files called held_out or validation are held out, and files called test, valid, val, dev
    or eval are left out. `ours` are files and folders written by an earlier run, to be skipped.
    Raises `UserError` for inputs that are missing, mixed or ambiguous.
    """
    require_known("format", format, get_args(Format))

    def found_in(path: Path) -> list[InputFile]:
        return _expand(path, format, pattern, ours)

    held_out = [file for path in _as_list(held_out_inputs) for file in found_in(path)]
    given = {_real(file) for file in held_out}
    files: list[InputFile] = []
    singles: list[InputFile] = []
    for path in _as_list(inputs):
        found = found_in(path)
        if path.is_dir():
            found = [file for file in found if _real(file) not in given]
            found, by_name = _split_by_name(path, found, held_out_given=bool(given))
            held_out += by_name
        else:
            singles += found
        files += found
    tests = [file for file in singles if _role_of(Path(Path(file.path).name)) not in ("", "train")]
    if len(tests) < len(singles):
        _warn_of_tests(tests)
    if not files:
        raise UserError("no input: give at least one file or folder")
    for path, _ in [*files, *held_out]:
        # A name that is not UTF-8 has halves of surrogate pairs, which encode to "?".
        not_utf8 = path.encode(errors="replace").decode() != path
        if path != path.strip() or set(path) & {"\n", "\r"} or not_utf8:
            raise UserError(
                f"input {path!r} has a name that a list of files cannot hold (a line break, a "
                "space at its end, or not UTF-8): rename it"
            )
    counts = Counter(map(_real, files)) + Counter(map(_real, held_out))
    if twice := [path for path, count in counts.items() if count > 1]:
        raise UserError(
            f"input {twice[0]} is given twice: its documents would be stored twice, or be both "
            "trained on and held out"
        )
    return Documents(tuple(files), tuple(held_out))


def _as_list(inputs: Inputs) -> list[Path]:
    paths = [inputs] if isinstance(inputs, str | Path) else inputs
    for path in paths:
        require_local(path, "input")
    return [Path(path) for path in paths]


def _real(file: InputFile) -> Path:
    return Path(file.path).resolve()


def _expand(
    path: Path, format: str, patterns: Sequence[str], ours: Sequence[Path]
) -> list[InputFile]:
    if path.is_dir():
        found = _files_of(path, format, patterns, ours)
    elif path.is_file():
        found = [(path, contents_of(path) if format == "auto" else format)]
    else:
        raise UserError(
            f"input {path} does not exist: build or download the documents first (hf download "
            "NAME --repo-type dataset downloads data sets from the Hugging Face Hub)"
        )
    if found[0][1] == OTHER:
        raise UserError(
            f"input {path} is neither text nor in a format that its name and first bytes tell: "
            "unpack or rename it, or give --format"
        )
    # A link keeps its own name, which gives the format: download caches link to nameless files.
    return [InputFile(str(each.parent.resolve() / each.name), kind) for each, kind in found]


# The files of a folder that hold its documents; the others are left out and counted.


def _files_of(
    folder: Path, format: str, patterns: Sequence[str], ours: Sequence[Path]
) -> list[tuple[Path, str]]:
    """Return path and kind of each file to read, by name.

    Records (JSON lines, tables, …) are read and texts beside them are left out; a folder without
    records is read as texts. `format` and `patterns` decide otherwise.
    """
    visible = _visible_files(folder, ours)
    deep = {path for glob in patterns if "**" in Path(glob).parts for path in _deep(folder, glob)}
    matching = [
        path
        for path in visible
        if not patterns or path in deep or any(path.match(glob) for glob in patterns)
    ]
    if format != "auto" and patterns:
        found = [(path, format) for path in matching]
    else:
        # A file that a pattern chooses is data, whatever it is called.
        kinds = [
            (path, contents_of(path) if patterns else kind_of(path, folder)) for path in matching
        ]
        if format == "auto":
            found = _records_or_texts(folder, kinds)
        elif format == TEXT:
            found = [(path, format) for path, kind in kinds if kind not in (SIDE, OTHER)]
        else:
            found = [(path, kind) for path, kind in kinds if kind == format]
        if others := [path for path, kind in kinds if kind == OTHER]:
            logger.warning(f"{folder}: left out {by_ending(others)}, which cannot be read as text")
    if not found:
        wanted = "document" if format == "auto" else format
        rest = f" that matches {', '.join(patterns)}" if patterns else ""
        if format != "auto" and not patterns:
            rest = ": choose by name with --pattern"
        raise UserError(f"input folder {folder} has no {wanted} file{rest}")
    if len(found) < len(visible):
        read = ", ".join(sorted({kind for _, kind in found}))
        logger.info("%s: %d of %d files are %s", folder, len(found), len(visible), read)
    originals = {path.resolve() for path, _ in found if not path.is_symlink()}
    once = [
        each for each in found if not each[0].is_symlink() or each[0].resolve() not in originals
    ]
    if len(once) < len(found):
        logger.warning("%s: left out %d links to other files of it", folder, len(found) - len(once))
    return once


def _deep(folder: Path, glob: str) -> Iterable[Path]:
    """Return the paths that match a pattern with **, which `Path.match` takes for one folder."""
    # `rglob` refuses ** inside a name, and takes one at the end for folders alone.
    parts = [part if part == "**" else re.sub(r"\*+", "*", part) for part in Path(glob).parts]
    return folder.rglob("/".join([*parts, *["*"] * (parts[-1] == "**")]).lstrip("/"))


def _records_or_texts(folder: Path, kinds: Sequence[tuple[Path, str]]) -> list[tuple[Path, str]]:
    records = [(path, kind) for path, kind in kinds if kind in RECORDS]
    texts = [path for path, kind in kinds if kind == TEXT]
    if not records:
        return [(path, TEXT) for path, kind in kinds if kind in (TEXT, ABOUT)]
    held = by_ending(path for path, _ in records)
    if len(texts) > len(records):
        raise UserError(
            f"input folder {folder} holds {held} among {by_ending(texts)}: choose with --pattern, "
            f"e.g. '*{records[0][0].suffix}' or '*{texts[0].suffix}', or give --format text to "
            "train on every file as text"
        )
    if texts:
        logger.warning(
            f"{folder}: left out {by_ending(texts)} beside {held}; give texts as an input of their "
            "own"
        )
    return records


def _visible_files(folder: Path, ours: Sequence[Path]) -> list[Path]:
    root, written = folder.resolve(), {path.resolve() for path in ours}
    names = [path.relative_to(folder) for path in sorted(folder.rglob("*"))]
    names = [name for name in names if written.isdisjoint((root / name, *(root / name).parents))]
    shown = [folder / n for n in names if not any(part.startswith(".") for part in n.parts)]
    visible = [path for path in shown if path.is_file()]
    if hidden := sum((folder / name).is_file() for name in names) - len(visible):
        logger.warning("%s: left out %d hidden files", folder, hidden)
    if links := sum(path.is_symlink() and not path.is_file() for path in shown):
        logger.warning(
            f"{folder}: left out {links} links to folders or to nothing; give folders as inputs "
            "of their own"
        )
    return visible


# Files that are called train, held_out or test: which are trained on, and which never are.


def _role_of(path: Path) -> str:
    """Return "train", "held_out", "test" or "", by the last part of the path with such a name."""
    for part in reversed(path.parts):
        for role, pattern in _PATTERNS.items():
            if pattern.search(part.lower()):
                return role
    return ""


def _split_by_name(
    folder: Path, files: Sequence[InputFile], *, held_out_given: bool
) -> tuple[list[InputFile], list[InputFile]]:
    """Return a folder's files to train on, and its held-out files.

    Without a file called train all files are trained on, with a warning if one is called test. In a
    folder of texts a `train.py` says nothing: there every file must have such a name, or a
    subfolder be called train. If held-out files were given apart, files of the folder that are
    called held_out are left out, too.
    """
    root = folder.resolve()
    names = {file: Path(file.path).relative_to(root) for file in files}
    roles = {file: _role_of(name) for file, name in names.items()}
    split = "train" in roles.values()
    if all(file.kind == TEXT for file in files) and not all(roles.values()):
        split = any(_role_of(name.parent) == "train" for name in names.values())
    held_out = [file for file, role in roles.items() if role == "held_out"]
    tests = [file for file, role in roles.items() if role == "test"]
    if not split:
        _warn_of_tests([*held_out, *tests], root)
        return [*files], []
    if held_out_given:
        held_out, tests = [], [*held_out, *tests]
    if held_out:
        logger.info(
            f"{folder}: {_named(held_out, root)} held out; give files by name to train on them"
        )
    if tests:
        logger.warning(
            f"{folder}: left out {_named(tests, root)} beside files called train; give them to "
            "--held-out-inputs, or all files by name to train on them"
        )
    never = {*held_out, *tests}
    return [file for file in files if file not in never], held_out


def _warn_of_tests(files: Sequence[InputFile], root: Path | None = None) -> None:
    if files:
        logger.warning(
            f"{_named(files, root)} will be trained on; if they are tests, leave them out (in a "
            "folder with --pattern), or give them to --held-out-inputs of data tokenize"
        )


def _named(files: Sequence[InputFile], root: Path | None) -> str:
    paths = [Path(file.path) for file in files]
    names = [path.name if root is None else str(path.relative_to(root)) for path in paths]
    return f"{len(names)} {'file' if len(names) == 1 else 'files'} ({listed(names, _SHOWN)})"
