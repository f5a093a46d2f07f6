"""Writes a `tokenizer.json` as keys of a GGUF file.

llama.cpp knows pre-tokenizers by name, not by pattern. A byte-level BPE is recognised by how it
splits text; `gguf_sentencepiece.py` has the other kind.

| pre-tokenizer here | name there |
|---|---|
| GPT-2's pattern | gpt-2 |
| digits one by one, then GPT-2's pattern | smollm |
| the pattern of cl100k and Llama 3 | dbrx; with `ignore_merges` llama-bpe |
| the pattern of Qwen 2 and 3 | qwen2 |
| the three patterns of DeepSeek V3 | deepseek-v3 |

`tools/test_tokenizers.sh` compares the ids with llama.cpp's.
"""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from titan_loop.errors import UserError
from titan_loop.formats import gguf_sentencepiece
from titan_loop.formats.gguf_sentencepiece import adds_space, is_sentencepiece
from titan_loop.formats.tokenizer_export import TokenizerExport
from titan_loop.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from gguf import GGUFWriter

logger = logging.getLogger(__name__)

_ADVICE = (
    "write a folder instead, which takes every tokenizer (titan-loop convert export RUN --list "
    "names the formats); --no-tokenizer writes a file for programs that give llama.cpp's library "
    "ids, which its server and its command line cannot do"
)

_ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>")
"""Tokens that llama.cpp takes for ends of an answer by their name, whatever the file says."""
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_NAMES: dict[tuple[str, ...], str] = {
    ("ByteLevel",): "gpt-2",
    ("Digits", "ByteLevel"): "smollm",
    (_CL100K, "bytes"): "dbrx",
    (_QWEN2, "bytes"): "qwen2",
    (*_DEEPSEEK_V3, "bytes"): "deepseek-v3",
}
"""llama.cpp's name of each sequence of steps, as `_step` writes them."""


class Vocabulary(NamedTuple):
    """A tokenizer that llama.cpp can read.

    Attributes:
        record: Its tokenizer.json.
        pre: llama.cpp's name of its pre-tokenizer; None for SentencePiece's kind.
    """

    record: dict[str, Any]
    pre: str | None


def open_vocabulary(tokenizer: TokenizerExport) -> Vocabulary:
    """Read a tokenizer; warn of texts that get other ids in llama.cpp.

    Raises:
        UserError: llama.cpp has no such tokenizer, or reads many texts otherwise.
    """
    path = tokenizer.path
    record = _record(path)
    for problem in _problems(record):
        raise UserError(f"tokenizer {path} {problem}; {_ADVICE}")
    if is_sentencepiece(record):
        pre = None
    elif record["model"].get("ignore_merges"):
        pre = "llama-bpe"
    else:
        pre = _NAMES[_steps(record["pre_tokenizer"])]
    for difference in _differences(record):
        logger.warning(f"tokenizer {path} {difference}")
    return Vocabulary(record, pre)


def tokenizer_problem(path: Path) -> str | None:
    """Return why llama.cpp cannot have a tokenizer, as the end of a sentence about it."""
    return next(_problems(_record(path)), None)


def write_tokenizer(
    writer: "GGUFWriter", vocabulary: Vocabulary, tokenizer: TokenizerExport, *, rows: int
) -> None:
    """Add tokens, merges, special ids and chat template; rows without a token become unused."""
    from gguf import TokenType

    record, pre = vocabulary
    texts = {number: text for text, number in record["model"]["vocab"].items()}
    added = {each["id"]: each for each in record["added_tokens"]}
    tokens: list[str] = []
    types: list[Any] = []
    for number in range(rows):
        if number in added:
            special = added[number]["special"]
            tokens.append(added[number]["content"])
            types.append(TokenType.CONTROL if special else TokenType.USER_DEFINED)
        elif number in texts:
            tokens.append(texts[number])
            is_byte = pre is None and _BYTE.fullmatch(texts[number])
            types.append(TokenType.BYTE if is_byte else TokenType.NORMAL)
        else:
            tokens.append(f"[PAD{number}]")
            types.append(TokenType.UNUSED)
    writer.add_tokenizer_model("llama" if pre is None else "gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if pre is None:
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(gguf_sentencepiece.scores(record, tokens))
        writer.add_add_space_prefix(adds_space(record))
        unknown = record["model"].get("unk_token")
        if unknown is not None:
            writer.add_unk_token_id(record["model"]["vocab"][unknown])
    else:
        writer.add_tokenizer_pre(pre)
        merges = record["model"]["merges"]
        writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(tokenizer.bos_id)
    writer.add_eos_token_id(tokenizer.eos_id)
    writer.add_pad_token_id(tokenizer.end_of_text_id)
    if tokenizer.turn_end_id is not None:
        writer.add_eot_token_id(tokenizer.turn_end_id)
    # Always: some names, llama-bpe among them, turn BOS on where the file does not say.
    writer.add_add_bos_token(tokenizer.text.begin_of_text is not None)
    if tokenizer.text.chat_template is not None:
        writer.add_chat_template(tokenizer.text.chat_template)


def _record(path: Path) -> dict[str, Any]:
    return json.loads(load_tokenizer(path).to_str())


def _problems(record: dict[str, Any]) -> Iterator[str]:
    """Yield why llama.cpp cannot have a tokenizer, the plainest reason first."""
    model = record["model"]
    if model["type"] != "BPE":
        yield f"is of kind {model['type']}, and only BPE is written for llama.cpp"
    if not model["merges"]:
        yield "has no merges, and llama.cpp loads no byte-level BPE without one"
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            yield f"has {name}={model[name]!r}, which llama.cpp does not know"
    if is_sentencepiece(record):
        yield from gguf_sentencepiece.problems(record)
        return
    for kind in _normalizers(record):
        if kind != "NFC":
            yield f"has the normalizer {kind}, which llama.cpp does not apply"
    names = _steps(record["pre_tokenizer"])
    if names == (_O200K, "bytes"):
        yield (
            "splits text by the pattern of GPT-4o (o200k), and llama.cpp's own pattern of that "
            "name cuts before combining marks and knows upper case in ASCII alone"
        )
    if names not in _NAMES:
        kinds = [part["type"] for part in _parts(record["pre_tokenizer"], "pretokenizers")]
        yield (
            f"splits text by {', '.join(kinds) or 'nothing'} with a pattern that is none of "
            "GPT-2's, cl100k's, Qwen 2's and DeepSeek V3's, which llama.cpp has under the names "
            f"{', '.join(_NAMES.values())}"
        )
        return
    if model.get("ignore_merges") and _NAMES[names] != "dbrx":
        yield (
            "has ignore_merges=true, which llama.cpp applies to Llama 3's pattern and not to "
            f"{_NAMES[names]}"
        )


def _differences(record: dict[str, Any]) -> Iterator[str]:
    """Yield which texts get other ids in llama.cpp."""
    if "NFC" in _normalizers(record):
        yield (
            "has the normalizer NFC, which llama.cpp does not apply: text that is not in NFC, "
            "such as accents and Hangul in separate code points, gets other ids there; normalise "
            "it before, or write a folder"
        )
    plain = [
        each["content"]
        for each in record["added_tokens"]
        if each["content"] in _ENDS and not each["special"]
    ]
    if plain:
        yield (
            f"has the token {plain[0]!r} for text, which llama.cpp takes for the end of an answer: "
            "it never reads it in a text and stops where the model writes it"
        )
    stripping = ("lstrip", "rstrip", "single_word")
    added = [each for each in record["added_tokens"] if any(each[name] for name in stripping)]
    if added:
        yield (
            f"has added tokens that take white space or whole words, such as "
            f"{added[0]['content']!r}, which llama.cpp does not: text around them gets other ids"
        )


def _normalizers(record: dict[str, Any]) -> list[str]:
    """Return the kinds of the normalizers; an empty sequence is none."""
    return [part["type"] for part in _parts(record["normalizer"], "normalizers")]


def _steps(top: dict[str, Any] | None) -> tuple[str, ...]:
    """Return the steps of a pre-tokenizer in the words of `_NAMES`."""
    return tuple(map(_step, _parts(top, "pretokenizers")))


def _parts(top: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    return [] if top is None else top.get(name, [top])


def _step(step: dict[str, Any]) -> str:
    kind = step["type"]
    if kind == "ByteLevel" and not step["add_prefix_space"]:
        return "ByteLevel" if step.get("use_regex", True) else "bytes"
    if kind == "Digits" and step["individual_digits"]:
        return "Digits"
    # The patterns above match every character, so removing what lies between removes nothing.
    behaviour = (step.get("behavior"), step.get("invert"))
    if kind == "Split" and behaviour in (("Isolated", False), ("Removed", True)):
        pattern = step["pattern"].get("Regex", "")
        return pattern.replace("\r", r"\r").replace("\n", r"\n")
    return f"another {kind}"
