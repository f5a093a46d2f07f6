"""Writes a `tokenizer.json` as keys of a GGUF file.

llama.cpp knows pre-tokenizers by name, not by pattern: `gguf_pretokenizers.py` finds the name of a
byte-level BPE's by how it splits text. `gguf_sentencepiece.py` has the other kind. Where llama.cpp
is installed as a wheel, its ids of the built-in texts are compared with the tokenizer's.
"""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from titan_loop.errors import UserError
from titan_loop.formats import gguf_sentencepiece, llama_cpp
from titan_loop.formats.gguf_pretokenizers import (
    PRE_TOKENIZERS,
    as_in_llama_cpp,
    encode_all,
    nearest,
    opened,
    unequal,
)
from titan_loop.formats.gguf_sentencepiece import adds_space, is_sentencepiece
from titan_loop.formats.stress_texts import stress_texts
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


class Vocabulary(NamedTuple):
    """A tokenizer that llama.cpp can read.

    Attributes:
        record: Its tokenizer.json.
        pre: llama.cpp's name of its pre-tokenizer; None for SentencePiece's kind.
        warned: Built-in texts that the export has said to get other ids in llama.cpp.
    """

    record: dict[str, Any]
    pre: str | None
    warned: frozenset[str] = frozenset()


def open_vocabulary(tokenizer: TokenizerExport) -> Vocabulary:
    """Read a tokenizer; warn of texts that get other ids in llama.cpp, `UserError` for many."""
    path = tokenizer.path
    record = _record(path)
    for problem in _problems(record, approximate=tokenizer.approximate):
        raise UserError(f"tokenizer {path} {problem}; {_ADVICE}")
    for difference in _differences(record):
        logger.warning(f"tokenizer {path} {difference}")
    if is_sentencepiece(record):
        return Vocabulary(record, None)
    name, others = nearest(record)
    reasons = ["its normalizer NFC is not applied there"] if _normalizers(record) else []
    if others:
        reasons.append(f"the pre-tokenizer {name} there splits other words")
    if not reasons:
        return Vocabulary(record, name)
    theirs = encode_all(as_in_llama_cpp(record, name))
    differ = unequal(encode_all(opened(record)), theirs)
    logger.warning(f"tokenizer {path}: {_told(differ)}: {', and '.join(reasons)}")
    return Vocabulary(record, name, frozenset(differ))


def check_ids(file: Path, vocabulary: Vocabulary) -> None:
    """Warn of built-in texts with unexpected ids in llama.cpp, where its wheel is installed."""
    if llama_cpp.library() is None:
        return
    found = llama_cpp.encode(file, [*stress_texts()])
    differ = [
        text
        for text in unequal(encode_all(opened(vocabulary.record)), found)
        if text not in vocabulary.warned
    ]
    if differ:
        logger.warning(f"{file.name}: {_told(differ)}, which nothing above explains")


def _told(differ: Sequence[str]) -> str:
    return (
        f"{len(differ)} of the {len(stress_texts())} built-in texts get other ids in llama.cpp, "
        f"the first of them {differ[0]!r:.80}"
    )


def tokenizer_problem(path: Path) -> str | None:
    """Return why llama.cpp cannot have a tokenizer, as the end of a sentence about it."""
    return next(_problems(_record(path), approximate=False), None)


def write_tokenizer(
    writer: "GGUFWriter", vocabulary: Vocabulary, tokenizer: TokenizerExport, *, rows: int
) -> None:
    """Add tokens, merges, special ids and chat template; rows without a token become unused."""
    from gguf import TokenType

    record, pre, _ = vocabulary
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
    writer.add_pad_token_id(tokenizer.end_of_text_id)
    # Each of the three ends an answer; a fourth does if llama.cpp knows its name.
    ends = dict.fromkeys([tokenizer.eos_id, *tokenizer.end_ids, tokenizer.end_of_text_id])
    adders = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    for add, end in zip(adders, ends, strict=False):
        add(end)
    # Always: some names, llama-bpe among them, turn BOS on where the file does not say.
    writer.add_add_bos_token(tokenizer.text.begin_of_text is not None)
    if tokenizer.text.chat_template is not None:
        writer.add_chat_template(tokenizer.text.chat_template)


def _record(path: Path) -> dict[str, Any]:
    return json.loads(load_tokenizer(path).to_str())


def _problems(record: dict[str, Any], *, approximate: bool) -> Iterator[str]:
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
    kinds = [part["type"] for part in _parts(record["pre_tokenizer"], "pretokenizers")]
    if "ByteLevel" not in kinds:
        yield f"splits text by {', '.join(kinds) or 'nothing'}, and llama.cpp's BPE is of bytes"
        return
    name, others = nearest(record)
    if others and not approximate:
        yield (
            f"splits text as none of llama.cpp's pre-tokenizers does: by the nearest, {name}, "
            f"{others} of {len(stress_texts())} built-in texts get other ids; "
            "--approximate-tokenizer writes it"
        )
    if others:
        return
    ignores = PRE_TOKENIZERS[name].ignores_merges
    if bool(model.get("ignore_merges")) != ignores and not _merges_reach_all(record):
        yield f"has ignore_merges={not ignores}, and llama.cpp's {name} is the other way"


def _merges_reach_all(record: dict[str, Any]) -> bool:
    """Return whether merges make every token of a text: then to ignore them changes none."""
    added = {each["content"] for each in record["added_tokens"]}
    texts = [token for token in record["model"]["vocab"] if token not in added]
    found = opened({"model": {**record["model"], "ignore_merges": False}}).encode_batch(texts)
    return all(len(each.ids) == 1 for each in found)


def _differences(record: dict[str, Any]) -> Iterator[str]:
    """Yield which texts get other ids in llama.cpp."""
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


def _parts(top: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    return [] if top is None else top.get(name, [top])
