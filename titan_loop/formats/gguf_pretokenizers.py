"""llama.cpp's pre-tokenizers by name, as patterns of `tokenizers`, and which a tokenizer has.

Two pre-tokenizers are one if they split every built-in text (`stress_texts.py`) alike; their
patterns may be written differently. Of several that are not, the nearest gives fewest texts other
ids. Each pattern here is what llama.cpp *does*, which for `gpt-4o`
and `tekken` is not the pattern of the tokenizers behind these names: there, a word ends before a
combining mark, and upper case is ASCII's alone.

Source: llama.cpp's `llama-vocab.cpp`, tried with b11549: no built-in text differs.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from titan_loop.formats.stress_texts import stress_texts

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_BREAKS = r"\s*[\r\n]+"
_SPACES = r"\s+(?!\S)|\s+"
_REST = f"{_SIGNS}|{_BREAKS}|{_SPACES}"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_HALVING = "|".join(rf"\s{{{size}}}(?!\S)" for size in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))


def _cases(letters: str, short: str, digits: str) -> str:
    """Return a pattern of words that end where lower case goes over into upper case, of ASCII."""
    upper, lower = f"(?:(?={letters})[^a-z])", f"(?:(?={letters})[^A-Z])"
    before = r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}{upper}*{lower}+{short}|{before}{upper}+{lower}*{short}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BREAKS}|{_SPACES}"


class _Splits(NamedTuple):
    """Patterns, one after the other, and whether whole words are looked up before any merge."""

    patterns: tuple[str, ...]
    ignores_merges: bool = False


_LLAMA3 = (rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_REST}",)
PRE_TOKENIZERS: Mapping[str, _Splits] = {
    "gpt-2": _Splits((_GPT2,)),
    "smollm": _Splits((r"\p{N}", _GPT2)),
    "dbrx": _Splits(_LLAMA3),
    "llama-bpe": _Splits(_LLAMA3, True),
    "qwen2": _Splits((rf"{_SHORT}|{_WORD}|\p{{N}}|{_REST}",)),
    "qwen35": _Splits(
        (
            rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BREAKS}|{_SPACES}",
        )
    ),
    "deepseek-v3": _Splits(
        (
            r"\p{N}{1,3}",
            "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
            r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BREAKS}|{_SPACES}",
        )
    ),
    "falcon": _Splits((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "bloom": _Splits((_BLOOM,)),
    "viking": _Splits((_BLOOM, r"\p{N}")),
    "seed-coder": _Splits(
        (rf"{_SHORT}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BREAKS}|{_SPACES}",)
    ),
    "minicpm5": _Splits((r"\p{N}{1,3}", rf"{_SHORT}|{_WORD}|\p{{N}}+|{_REST}"), True),
    "jais-2": _Splits((rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_BREAKS}|{_HALVING}|\s{{1}}",)),
    "ufakzeka": _Splits((rf"{_WORD}|\p{{N}}|{_REST}",)),
    "exaone-moe": _Splits(
        (
            rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_SPACES}",
        )
    ),
    "gpt-4o": _Splits((_cases(r"\p{L}", f"{_SHORT}?", r"\p{N}{1,3}"),)),
    "tekken": _Splits((_cases(r"\p{L}", "", r"\p{N}"),), True),
    "granite-embed-multi-97m": _Splits(
        (_cases(r"[\p{L}\p{M}]", f"{_SHORT}?", r"\p{N}{1,3}"),), True
    ),
}
"""llama.cpp's name → what it does."""


_EMPTY = {"model": {"type": "BPE", "vocab": {}, "merges": []}}


@cache
def pre_tokenizer(name: str) -> "PreTokenizer":
    """Return the pre-tokenizer that does what llama.cpp's of this name does."""
    from tokenizers import Regex, pre_tokenizers

    patterns = PRE_TOKENIZERS[name].patterns
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, bytes_])  # type: ignore[return-value]


class Match(NamedTuple):
    """llama.cpp's pre-tokenizer that is nearest to a tokenizer's.

    Attributes:
        others: Built-in texts that get other ids by it; 0 if the two are one.
    """

    name: str
    others: int


def nearest(record: dict[str, Any]) -> Match:
    """Return the pre-tokenizer that a tokenizer.json has, or else the nearest."""
    ignores = bool(record["model"].get("ignore_merges"))
    # Of two that split alike, the one that treats merges as the tokenizer does.
    names = sorted(PRE_TOKENIZERS, key=lambda name: PRE_TOKENIZERS[name].ignores_merges != ignores)
    own = [*_splits(opened({**_EMPTY, "pre_tokenizer": record["pre_tokenizer"]}).pre_tokenizer)]
    for name in names:
        theirs = _splits(pre_tokenizer(name))
        if all(a == b for a, b in zip(own, theirs, strict=True)):
            return Match(name, 0)
    ids = encode_all(opened(record))
    bases = {flag: opened(_with_merges(record, ignored=flag)) for flag in (False, True)}
    matches = []
    for name in names:
        base = bases[PRE_TOKENIZERS[name].ignores_merges]
        base.pre_tokenizer = pre_tokenizer(name)
        matches.append(Match(name, len(unequal(ids, encode_all(base)))))
    return min(matches, key=lambda match: match.others)


def opened(record: dict[str, Any]) -> "Tokenizer":
    """Return the tokenizer of a tokenizer.json; special tokens in a text are text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(json.dumps(record))
    tokenizer.encode_special_tokens = True
    return tokenizer


def as_in_llama_cpp(record: dict[str, Any], name: str) -> "Tokenizer":
    """Return a tokenizer that does what llama.cpp does by a pre-tokenizer's name."""
    ignored = PRE_TOKENIZERS[name].ignores_merges
    tokenizer = opened({**_with_merges(record, ignored=ignored), "normalizer": None})
    tokenizer.pre_tokenizer = pre_tokenizer(name)
    return tokenizer


def _with_merges(record: dict[str, Any], *, ignored: bool) -> dict[str, Any]:
    return {**record, "model": {**record["model"], "ignore_merges": ignored}}


def encode_all(tokenizer: "Tokenizer") -> list[list[int]]:
    """Return the ids of the built-in texts."""
    found = tokenizer.encode_batch([*stress_texts()], add_special_tokens=False)
    return [each.ids for each in found]


def unequal(ours: list[list[int]], theirs: list[list[int]]) -> list[str]:
    """Return the built-in texts with different ids."""
    texts = zip(stress_texts(), ours, theirs, strict=True)
    return [text for text, mine, found in texts if mine != found]


def _splits(step: "PreTokenizer | None") -> Iterator[list[str]]:
    for text in stress_texts():
        pieces = [(text, (0, 0))] if step is None else step.pre_tokenize_str(text)
        yield [piece for piece, _ in pieces]
