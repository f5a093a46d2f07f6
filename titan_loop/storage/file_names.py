"""Names that others wrote, as paths inside a folder; local paths as opposed to addresses."""

import re
from pathlib import Path

from titan_loop.errors import UserError

_MOST_BYTES = 255  # on Linux
_URL = re.compile(r"[A-Za-z][\w.+-]+:/")  # `Path` makes "s3:/" of "s3://"


def is_file_name(name: object) -> bool:
    """Return whether `name` is a valid file name, without folders or drives."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and name.isprintable()  # no NUL, no escape sequence, no half of a surrogate pair
        and not set(name) & set("/\\:")
        and len(name.encode()) <= _MOST_BYTES
    )


def require_file_name(name: object, named_in: str | Path) -> str:
    """Return `name` if it is a file name; otherwise raise a `UserError` that cites `named_in`."""
    if not is_file_name(name):
        raise UserError(
            f"{named_in} names the file {name!r:.80}, which may lie outside its folder; do not use "
            "this data"
        )
    return str(name)


def require_local(path: str | Path, name: str) -> None:
    """Raise `UserError` if `path`, the value of `name`, is an address in an object store."""
    if _URL.match(str(path)):
        raise UserError(
            f"{name} {path} is in an object store or on a server, which is neither read nor "
            "written here: use a local or mounted folder, and copy between them"
        )
