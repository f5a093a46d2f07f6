"""Writes a byte-level BPE `tokenizer.json` as keys of a GGUF file.

llama.cpp knows pre-tokenizers by name, not by pattern, so only these can be exported:

| pre-tokenizer here | name there |
|---|---|
| ByteLevel with GPT-2's pattern | gpt-2 |
| Digits, one by one, then ByteLevel with GPT-2's pattern | smollm |
"""

import json
from typing import TYPE_CHECKING, Any

from titan_loop.errors import UserError
from titan_loop.formats.tokenizer_export import TokenizerExport
from titan_loop.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from gguf import GGUFWriter

_ADVICE = "write the model without it with --no-tokenizer, and give ids to the engine"


def write_tokenizer(writer: "GGUFWriter", tokenizer: TokenizerExport, *, rows: int) -> None:
    """Add tokens, merges, special ids and chat template; rows without a token become unused."""
    from gguf import TokenType

    record = json.loads(load_tokenizer(tokenizer.path).to_str())
    pre = _pre_tokenizer(record, str(tokenizer.path))
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
            types.append(TokenType.NORMAL)
        else:
            tokens.append(f"[PAD{number}]")
            types.append(TokenType.UNUSED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = record["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(tokenizer.bos_id)
    writer.add_eos_token_id(tokenizer.eos_id)
    writer.add_pad_token_id(tokenizer.end_of_text_id)
    if tokenizer.turn_end_id is not None:
        writer.add_eot_token_id(tokenizer.turn_end_id)
    writer.add_add_bos_token(tokenizer.text.begin_of_text is not None)
    if tokenizer.text.chat_template is not None:
        writer.add_chat_template(tokenizer.text.chat_template)


def _pre_tokenizer(record: dict[str, Any], path: str) -> str:
    model = record["model"]
    if model["type"] != "BPE" or model.get("byte_fallback") or model.get("ignore_merges"):
        raise UserError(f"tokenizer {path} is not the byte-level BPE llama.cpp needs; {_ADVICE}")
    if record["normalizer"] is not None:
        raise UserError(
            f"tokenizer {path} has the normalizer {record['normalizer']['type']}, which llama.cpp "
            f"does not apply; {_ADVICE}"
        )
    steps: dict[str, Any] = record["pre_tokenizer"] or {"type": "none"}
    parts: list[dict[str, Any]] = steps["pretokenizers"] if steps["type"] == "Sequence" else [steps]
    kinds = [part["type"] for part in parts]
    usual = all(
        not part["add_prefix_space"] and part.get("use_regex", True)
        if part["type"] == "ByteLevel"
        else part.get("individual_digits", False)
        for part in parts
        if part["type"] in ("ByteLevel", "Digits")
    )
    if usual and kinds == ["ByteLevel"]:
        return "gpt-2"
    if usual and kinds == ["Digits", "ByteLevel"]:
        return "smollm"
    raise UserError(
        f"tokenizer {path} splits text by {', '.join(kinds)}, which has no name in llama.cpp; "
        f"{_ADVICE}"
    )
