"""Differences between the data of a checkpoint and of this start, from their descriptions."""

from collections.abc import Mapping, Sequence
from typing import Any

SOURCES = "sources"
"""Field of a description that lists the sources."""

_NAMES = {
    "seq_len": "training.seq_len",
    "seed": "dataloader.seed",
    "when_exhausted": "dataloader.when_exhausted",
    "repeat_after_windows": "windows of dataloader.unique_tokens",
}

Fields = Mapping[str, Any]


def data_changes(saved: Fields, here: Fields) -> list[str]:
    """Return one phrase per difference, "FIELD OLD → NEW"; none if the data is the same."""
    changes = _field_changes(saved, here, ignored=(SOURCES,))
    saved_sources, here_sources = saved.get(SOURCES, []), here.get(SOURCES, [])
    matches = match_sources(saved_sources, here_sources)
    for source, match in zip(here_sources, matches, strict=True):
        if match is None:
            changes.append(f"source {source['path']} is new (share {source['share']:g})")
        elif found := _field_changes(saved_sources[match], source, ignored=("path",)):
            changes.append(f"source {source['path']}: {', '.join(found)}")
    changes += [
        f"source {source['path']} is gone"
        for index, source in enumerate(saved_sources)
        if index not in matches
    ]
    known = [match for match in matches if match is not None]
    if known != sorted(known):
        changes.append("the sources are in another order")
    return changes


def match_sources(saved: Sequence[Fields], here: Sequence[Fields]) -> list[int | None]:
    """Return the number in `saved` of each source of `here`, by path or contents; None if new."""
    matches: list[int | None] = [None] * len(here)
    for field in ("path", "contents"):
        for index, source in enumerate(here):
            if matches[index] is None:
                candidates = (
                    number
                    for number, known in enumerate(saved)
                    if number not in matches and known[field] == source[field]
                )
                matches[index] = next(candidates, None)
    return matches


def _field_changes(saved: Fields, here: Fields, ignored: Sequence[str]) -> list[str]:
    return [
        f"{_NAMES.get(key, key)} {saved.get(key)} → {here.get(key)}"
        for key in {**saved, **here}
        if key not in ignored and saved.get(key) != here.get(key)
    ]
