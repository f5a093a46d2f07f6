"""Results of single requests on disk, so that an interrupted evaluation does not score them again.

    FOLDER/IDENTITY.jsonl     one line per request: key, value

`IDENTITY` is a hash of everything a result depends on besides the request, such as the checkpoint's
manifest and the readings. Rank 0 alone reads and writes the file; the others get its content.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_loop.evaluation.share_work import join_ranks
from titan_loop.ranks import all_ranks, from_rank_zero
from titan_loop.storage.json_files import append_jsonl, json_sha256, read_jsonl

_REQUESTS_AT_A_TIME = 512  # computed between two writes


def digest(value: Any) -> str:
    """Return a hash of JSON-like data."""
    return json_sha256(value)[:32]


class RequestCache:
    """Results of one model's requests by key, in memory alone without a folder; collective."""

    def __init__(self, folder: Path | None, identity: Mapping[str, Any]) -> None:
        self._known: dict[str, Any] = {}
        self._written: Path | None = None
        if folder is None:
            return
        path = folder / f"{digest(identity)}.jsonl"
        self._known = from_rank_zero(
            all_ranks(), lambda: {record["key"]: record["value"] for record in read_jsonl(path)}
        )
        self._written = path if join_ranks()[0] == 0 else None

    def results(
        self,
        keys: Sequence[str],
        items: Sequence[Any],
        work: Callable[[Sequence[Any]], list[Any]],
    ) -> list[Any]:
        """Return a result for each item, computing those whose key is not known.

        Args:
            work: Returns the JSON-like results of some items, in order.
        """
        items_by_key = dict(zip(keys, items, strict=True))
        missing = [key for key in items_by_key if key not in self._known]
        for start in range(0, len(missing), _REQUESTS_AT_A_TIME):
            part = missing[start : start + _REQUESTS_AT_A_TIME]
            for key, result in zip(part, work([items_by_key[key] for key in part]), strict=True):
                self._known[key] = result
                if self._written is not None:
                    append_jsonl(self._written, {"key": key, "value": result})
        return [self._known[key] for key in keys]
