"""Files that are called train, held_out or test: which are trained on, and which never are.

A name counts where it is a whole part of a file's path below its folder: `test.jsonl`,
`data/validation-00000.parquet` and `dev/a.txt`, but not `latest.jsonl` or `contest/a.txt`.
"""

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from titan_loop.data.prepare.file_kinds import InputFile
from titan_loop.errors import listed

logger = logging.getLogger(__name__)

_NAMES = {
    "held_out": r"held[-_. ]?out\d*|validation(?:set)?\d*",
    "test": r"(?:tests?|testing|val|valid|dev|eval)(?:set)?\d*",
    "train": r"train(?:ing)?(?:set)?\d*",
}
"""Where a part of a path has two of them, the first counts: nothing held out is trained on."""

_PATTERNS = {
    role: re.compile(rf"(?<![^\W_])(?:{names})(?![^\W_])") for role, names in _NAMES.items()
}
NEVER_TRAINED = ("held_out", "test")
_SHOWN = 3


def role_of(path: Path) -> str:
    """Return "train", "held_out", "test" or "": what the last part with such a name says."""
    for part in reversed(path.parts):
        for role, pattern in _PATTERNS.items():
            if pattern.search(part.lower()):
                return role
    return ""


def split_by_name(
    folder: Path, files: Sequence[InputFile], *, held_out_given: bool
) -> tuple[list[InputFile], list[InputFile]]:
    """Return a folder's files to train on, and its held-out files.

    Without a file called train all files are trained on, with a warning if one is called test. In a
    folder of texts a `train.py` says nothing: there every file must have such a name, or a
    subfolder be called train.

    Args:
        held_out_given: Whether held-out files were given apart; then files of the folder that are
            called held_out are left out, too.
    """
    root = folder.resolve()
    roles = {file: role_of(Path(file.path).relative_to(root)) for file in files}
    split = "train" in roles.values()
    if all(file.kind == "text" for file in files) and not all(roles.values()):
        split = any(role_of(Path(file.path).relative_to(root).parent) == "train" for file in files)
    held_out = [file for file, role in roles.items() if role == "held_out"]
    tests = [file for file, role in roles.items() if role == "test"]
    if not split:
        warn_of_tests([*held_out, *tests], root)
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


def warn_of_tests(files: Sequence[InputFile], root: Path | None = None) -> None:
    """Warn about files that are called held_out or test and are trained on."""
    if files:
        logger.warning(
            f"{_named(files, root)} will be trained on; if they are tests, leave them out with "
            "--pattern or give them to --held-out-inputs"
        )


def _named(files: Sequence[InputFile], root: Path | None) -> str:
    paths = [Path(file.path) for file in files]
    names = [path.name if root is None else str(path.relative_to(root)) for path in paths]
    return f"{len(names)} {'file' if len(names) == 1 else 'files'} ({listed(names, _SHOWN)})"
