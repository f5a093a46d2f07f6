"""Paths on this machine, as opposed to addresses in an object store or on a server."""

import re
from pathlib import Path

from titan_loop.errors import UserError

_URL = re.compile(r"[A-Za-z][\w.+-]+:/")  # `Path` makes "s3:/" of "s3://"


def require_local(path: str | Path, name: str) -> None:
    """Raise `UserError` if `path`, the value of `name`, is a URL."""
    if _URL.match(str(path)):
        raise UserError(
            f"{name} {path} is in an object store or on a server, which is neither read nor "
            "written here: use a local or mounted folder, and copy between them"
        )
