"""The documents to prepare: an explicit list of files and their kinds, or a Hugging Face dataset.

With the list, every step, task and restart reads the same files in the same order. `file_kinds.py`
says what one file holds; this module says which files of a folder are read, and which of them are
held out. `SHAPES.md` lists examples.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from tyro.constructors import PrimitiveConstructorSpec

from titan_loop.data.prepare.file_kinds import OTHER, InputFile, contents_of
from titan_loop.data.prepare.folder_files import files_of
from titan_loop.data.prepare.split_names import NEVER_TRAINED, role_of, split_by_name, warn_of_tests
from titan_loop.errors import UserError, nearest
from titan_loop.storage.local_path import require_local

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

Format = Literal["auto", "jsonl", "json", "csv", "tsv", "parquet", "arrow", "text", "huggingface"]
FORMATS: tuple[str, ...] = get_args(Format)


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """Files to read, a dataset, or a pipeline.

    Attributes:
        held_out_files: Files of the held-out split; without any, a hash of each document decides.
        dataset: Name of a Hugging Face dataset, or a folder that `datasets` loads.
        pipeline: Function that makes a torchdata pipeline.
    """

    files: tuple[InputFile, ...] = ()
    held_out_files: tuple[InputFile, ...] = ()
    dataset: str = ""
    dataset_config: str | None = None
    dataset_split: str = "train"
    pipeline: str = ""

    def all_files(self) -> tuple[InputFile, ...]:
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

    A folder gives its files of records; if it has none, each of its texts is a document. With a
    format and patterns, it gives every file that matches a pattern. Of a folder with files called
    train, files called held_out or validation are held out, and files called test, valid, val, dev
    or eval are left out. `ours` are files and folders written by an earlier run, to be skipped.

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
        folder = Path(names[0])
        name = str(folder.resolve()) if folder.is_dir() else names[0]
        return Documents(dataset=name, dataset_config=dataset_config, dataset_split=dataset_split)
    if dataset_config is not None or dataset_split != "train":
        raise UserError(
            "dataset_config and dataset_split have no effect on files: give --format huggingface "
            "or drop them"
        )
    held_out: list[InputFile] = []
    for path in _as_list(held_out_inputs):
        held_out += _expand(path, format, pattern, ours)
    files, by_name = _to_train_on(_as_list(inputs), held_out, format, pattern, ours)
    held_out += by_name
    if not files:
        raise UserError("no input: give at least one file or folder")
    for given in (files, held_out):
        _require_distinct(given)
        _require_listable(given)
    resolved = [{Path(file.path).resolve() for file in given} for given in (files, held_out)]
    if shared := resolved[0] & resolved[1]:
        raise UserError(f"input {min(shared)} is given for training and held out: choose one")
    return Documents(files=tuple(files), held_out_files=tuple(held_out))


def _as_list(inputs: Inputs) -> list[Path]:
    paths = [inputs] if isinstance(inputs, str | Path) else inputs
    for path in paths:
        require_local(path, "input")
    return [Path(path) for path in paths]


def _to_train_on(
    paths: Sequence[Path],
    held_out: Sequence[InputFile],
    format: str,
    patterns: Sequence[str],
    ours: Sequence[Path],
) -> tuple[list[InputFile], list[InputFile]]:
    """Return the files to train on, and those that their names hold out."""
    given = {Path(file.path).resolve() for file in held_out}
    files: list[InputFile] = []
    by_name: list[InputFile] = []
    singles: list[InputFile] = []
    for path in paths:
        found = _expand(path, format, patterns, ours)
        if path.is_dir():
            found = [file for file in found if Path(file.path).resolve() not in given]
            found, more = split_by_name(path, found, held_out_given=bool(held_out))
            by_name += more
        else:
            singles += found
        files += found
    tests = [file for file in singles if role_of(Path(Path(file.path).name)) in NEVER_TRAINED]
    if len(tests) < len(singles):
        warn_of_tests(tests)
    return files, by_name


def _expand(
    path: Path, format: str, patterns: Sequence[str], ours: Sequence[Path]
) -> list[InputFile]:
    if path.is_dir():
        found = files_of(path, format, patterns, ours)
    elif path.is_file():
        found = [(path, contents_of(path) if format == "auto" else format)]
    else:
        raise UserError(
            f"input {path} does not exist: build or download the documents first (a Hugging Face "
            "dataset needs --format huggingface)"
        )
    if found[0][1] == OTHER:
        raise UserError(
            f"input {path} is neither text nor in a format that its name and first bytes tell: "
            "unpack or rename it, or give --format"
        )
    # A link keeps its own name, which gives the format: download caches link to nameless files.
    return [InputFile(str(each.parent.resolve() / each.name), kind) for each, kind in found]


def _require_distinct(files: Iterable[InputFile]) -> None:
    counts = Counter(Path(file.path).resolve() for file in files)
    if counts and max(counts.values()) > 1:
        twice = max(counts, key=counts.__getitem__)
        raise UserError(f"input {twice} is given twice: its documents would be stored twice")


def _require_listable(files: Iterable[InputFile]) -> None:
    for path, _ in files:
        broken = path != path.strip() or set(path) & {"\n", "\r"}
        # A name that is not UTF-8 has halves of surrogate pairs, which encode to "?".
        if broken or path.encode(errors="replace").decode() != path:
            raise UserError(
                f"input {path!r} has a name that a list of files cannot hold (a line break, a "
                "space at its end, or not UTF-8): rename it"
            )
