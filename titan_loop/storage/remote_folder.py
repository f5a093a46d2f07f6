"""A folder in an object store or on another file system, through fsspec: s3://, gs://, file://.

Credentials come from the environment (AWS_…, GOOGLE_…), never from an address, which would put them
into logs and `config.json`. Object stores cannot rename: write a commit record last.
"""

import importlib
import re
from pathlib import Path
from typing import Any

from titan_loop.errors import UserError, first_line, nearest

SCHEMES = {"s3": "s3fs", "gs": "gcsfs", "file": "", "memory": ""}
"""Scheme → the package that fsspec needs for it. `memory` is fsspec's own, for tests."""

PATTERN_CHARACTERS = frozenset("*?[")
"""What clients of object stores, and datatrove, take for a pattern in a path."""

_URL = re.compile(r"(?P<scheme>[A-Za-z][\w.+-]*)://(?P<rest>.+)")


class RemoteFolder:
    """A folder that need not exist; its bucket must exist, and the credentials must suffice."""

    def __init__(self, url: str, field: str) -> None:
        self.url = url.rstrip("/")
        try:
            self._fs, self.path = _file_system(url, field)
            if not self.names() and self._has_buckets:
                self._fs.ls(self.path.split("/")[0], detail=False)
        except UserError:
            raise
        except Exception as error:  # every store has errors of its own
            raise UserError(
                f"{field}={self.url} cannot be reached ({type(error).__name__}: "
                f"{first_line(error):.200}); check address, network, and the credentials in the "
                "environment (AWS_…, GOOGLE_…)"
            ) from error

    @property
    def _has_buckets(self) -> bool:
        return self.url.split(":")[0] in ("s3", "gs")

    def names(self, folder: str = "") -> list[str]:
        """Return the names of files and folders in a sub-folder; none if it is not there."""
        path = self._full(folder)
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(path, detail=False)
        except FileNotFoundError:
            return []
        own = path.strip("/")
        return sorted(
            {entry.rstrip("/").rpartition("/")[2] for entry in found if entry.strip("/") != own}
        )

    def read(self, name: str) -> bytes:
        """Return the content of a file; raises `FileNotFoundError` if there is none."""
        return self._fs.cat_file(self._full(name))

    def write(self, name: str, content: bytes) -> None:
        """Write a small file at once."""
        self._make_parent(name)
        self._fs.pipe_file(self._full(name), content)

    def upload(self, local: Path, name: str) -> None:
        """Copy a local file to `name`; raise `OSError` if it does not arrive whole."""
        self._make_parent(name)
        self._fs.put_file(str(local), self._full(name))
        self._fs.invalidate_cache()
        arrived, size = self._fs.info(self._full(name))["size"], local.stat().st_size
        if arrived != size:
            raise OSError(f"{self.url}/{name} has {arrived} bytes instead of {size}")

    def download(self, name: str, local: Path) -> None:
        """Copy the file `name` to a local path."""
        self._fs.get_file(self._full(name), str(local))

    def delete(self, name: str) -> None:
        """Delete a file, or a folder with all that is in it; nothing happens if there is none."""
        self._fs.invalidate_cache()
        found = self._fs.find(self._full(name), withdirs=not self._has_buckets, detail=True)
        # One by one: `rm` takes *, ? and [ in a key for a pattern and deletes other runs' files.
        for path, info in sorted(found.items(), reverse=True):  # a folder after what is in it
            (self._fs.rmdir if info["type"] == "directory" else self._fs.rm_file)(path)

    def _full(self, name: str) -> str:
        return f"{self.path}/{name}" if name else self.path

    def _make_parent(self, name: str) -> None:
        if not self._has_buckets:  # an object store has no folders, and mkdir would make buckets
            self._fs.makedirs(self._full(name).rpartition("/")[0], exist_ok=True)


def check_address(url: str, field: str) -> str:
    """Return the scheme of a remote folder's address, without looking there.

    Raises `UserError` for an unknown scheme, a pattern, or credentials in the address.
    """
    match = _URL.fullmatch(url)
    if match is None or match["scheme"] not in SCHEMES:
        scheme = match["scheme"] if match else url
        raise UserError(
            f"{field}={url if '@' not in url else '…'} is not a remote folder"
            f"{nearest(scheme, SCHEMES.keys() - {'memory'})}; write s3://BUCKET/FOLDER, gs://… or "
            "file:///FOLDER"
        )
    if "@" in match["rest"]:
        raise UserError(
            f"{field} holds credentials, which would end up in logs; set them in the environment"
        )
    if found := PATTERN_CHARACTERS.intersection(match["rest"]):
        raise UserError(
            f"{field}={url} holds {' and '.join(sorted(found))}, which object stores' clients take "
            "for a pattern; choose an address without *, ? and ["
        )
    return match["scheme"]


def _file_system(url: str, field: str) -> tuple[Any, str]:
    package = SCHEMES[check_address(url, field)]
    try:
        fsspec = importlib.import_module("fsspec")
        if package:
            importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{field}={url} needs the package {error.name}; pip install {package or 'fsspec'}"
        ) from error
    file_system, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    return file_system, str(path).rstrip("/")
