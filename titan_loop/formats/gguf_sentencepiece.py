"""SentencePiece's kind of BPE (Llama 2, Mistral, Gemma) in llama.cpp's terms.

llama.cpp joins the two neighbours whose joined text has the best score, wherever that text is a
token. A `tokenizer.json` has merges, the first of which wins. Both say the same if every cut of a
token into two tokens is a merge, and the merges into one token stand together:

    score of a token = − place of its first merge

Added tokens, which are matched before any merge, need not fulfil the second (Gemma's runs of line
breaks).
"""

from collections.abc import Iterator
from typing import Any

_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_PREPEND = {"type": "Prepend", "prepend": "▁"}
# Gemma's cuts after spaces, of which the normalizer has left none.
_CUTS_NOTHING = {
    "type": "Split",
    "pattern": {"String": " "},
    "behavior": "MergedWithPrevious",
    "invert": False,
}


def is_sentencepiece(record: dict[str, Any]) -> bool:
    """Return whether a tokenizer.json falls back to bytes, as SentencePiece does."""
    return bool(record["model"].get("byte_fallback"))


def adds_space(record: dict[str, Any]) -> bool:
    """Return whether every text gets a space in front."""
    return _normalizers(record) == [_PREPEND, _REPLACE]


def problems(record: dict[str, Any]) -> Iterator[str]:
    """Yield why llama.cpp would read texts otherwise."""
    if _normalizers(record) not in ([_REPLACE], [_PREPEND, _REPLACE]) or record[
        "pre_tokenizer"
    ] not in (None, _CUTS_NOTHING):
        yield (
            "is a SentencePiece BPE with another normalizer or pre-tokenizer than Llama 2's and "
            "Gemma's, the only ones that llama.cpp has"
        )
    vocabulary = record["model"]["vocab"]
    missing = [f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary]
    if missing:
        yield f"has no token {missing[0]} for a byte, which llama.cpp's SentencePiece kind needs"
    added = {each["content"] for each in record["added_tokens"]}
    merges: dict[str, set[str]] = {}
    last = ""
    for left, right in _merges(record):
        token = left + right
        if token != last and token in merges and token not in added:
            yield (
                f"has merges into {token!r} at several places of its list, which llama.cpp's one "
                "score a token cannot say"
            )
            return
        merges.setdefault(token, set()).add(left)
        last = token
    for token in vocabulary:
        lefts = (token[:cut] for cut in range(1, len(token)) if token[cut:] in vocabulary)
        lacking = [
            each for each in lefts if each in vocabulary and each not in merges.get(token, ())
        ]
        if lacking:
            yield (
                f"never merges {lacking[0]!r} and {token.removeprefix(lacking[0])!r}, which "
                f"llama.cpp would join to its token {token!r}"
            )
            return


def scores(record: dict[str, Any], tokens: list[str]) -> list[float]:
    """Return the score of every token; tokens without a merge come last."""
    places: dict[str, int] = {}
    merges = 0
    for merges, (left, right) in enumerate(_merges(record), start=1):
        places.setdefault(left + right, merges)
    return [-float(places.get(token, merges + 1)) for token in tokens]


def _merges(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for merge in record["model"]["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        yield left, right


def _normalizers(record: dict[str, Any]) -> list[dict[str, Any]]:
    top = record["normalizer"] or {"normalizers": []}
    return top.get("normalizers", [top])
