"""Results of single requests on disk, so that an interrupted evaluation does not score them again.

    FOLDER/IDENTITY.jsonl     a line a request: key, value

`IDENTITY` is a hash of everything a result depends on besides the request: the checkpoint's
manifest, the readings, dtype, context and cache strategy. Another checkpoint or depth never finds
these entries. Rank 0 alone touches the file and tells the others what it holds.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_loop.evaluation.ranks import join_ranks
from titan_loop.ranks import all_ranks, from_rank_zero
from titan_loop.storage.json_files import append_jsonl, read_jsonl


def digest(value: Any) -> str:
    """Return a hash of JSON-like data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


class RequestCache:
    """Keys and JSON values of one model's requests; opening one is collective.

    Args:
        folder: Of all caches.
        identity: What results depend on; JSON-like.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        rank, _ = join_ranks()
        self._writes = rank == 0
        self._path = folder / f"{digest(identity)}.jsonl"
        self._known: dict[str, Any] = from_rank_zero(
            all_ranks(),
            lambda: {record["key"]: record["value"] for record in read_jsonl(self._path)},
        )

    def get(self, key: str) -> Any | None:
        """Return what is stored under `key`, None if nothing is."""
        return self._known.get(key)

    def put(self, key: str, value: Any) -> None:
        """Store a value."""
        if key in self._known:
            return
        self._known[key] = value
        if self._writes:
            append_jsonl(self._path, {"key": key, "value": value})
