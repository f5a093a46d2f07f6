"""The tokenizer of an exported folder: the same `tokenizer.json`, and the files of transformers.

Transformers is told to load it with the generic fast class: a model family's own class rebuilds the
pre-tokenizer in transformers 5 and would lose the splitting of digits.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_loop.errors import UserError
from titan_loop.storage.json_files import read_small, write_json
from titan_loop.text.chatml import CHAT_TEMPLATE
from titan_loop.text.template_files import TEMPLATE, TOKENIZER_CONFIG
from titan_loop.text.text_format import TextFormat
from titan_loop.text.tokenizer import (
    TOKENIZER_NAME,
    TURN_START,
    check_vocabulary,
    encode_prompt,
    load_tokenizer,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

GENERATION_CONFIG = "generation_config.json"

PADDING_ROWS = 127
"""Largest number of padding rows that an embedding may have after the tokenizer's last id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerExport:
    """A checked tokenizer, and the ids that end a document, a turn of a chat, and generation.

    `bos_id` begins a document; in most tokenizers here, the end of the one before does.
    `approximate` allows a format to write it although some texts get other ids there.
    """

    path: Path
    text: TextFormat
    end_of_text_id: int
    turn_end_id: int | None
    bos_id: int
    end_ids: tuple[int, ...]
    approximate: bool = False

    @property
    def eos_id(self) -> int:
        """Id that ends an answer: the end of a turn in chats, else the end of a document."""
        return self.end_of_text_id if self.turn_end_id is None else self.turn_end_id

    @property
    def eos(self) -> int | list[int]:
        """The `eos_token_id` of a model's configuration: every id that ends generation."""
        return self.end_ids[0] if len(self.end_ids) == 1 else [*self.end_ids]

    def write(self, folder: Path, *, max_positions: int) -> None:
        """Write the tokenizer's files and `generation_config.json`."""
        self._write_tokenizer(folder / TOKENIZER_NAME)
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_positions,
            "model_input_names": ["input_ids", "attention_mask"],
            "padding_side": "left",
            "clean_up_tokenization_spaces": False,
            "bos_token": self.text.begin_of_text or self.text.end_of_text,
            "eos_token": self.text.turn_end or self.text.end_of_text,
            "pad_token": self.text.end_of_text,
            **self.text.template_variables,
        }
        write_json(folder / TOKENIZER_CONFIG, config)
        if self.text.chat_template is not None:
            (folder / TEMPLATE).write_bytes(self.text.chat_template.encode())
        end = self.end_of_text_id
        generation = {
            "bos_token_id": self.bos_id,
            "do_sample": False,
            "eos_token_id": self.eos,
            "pad_token_id": end,
        }
        write_json(folder / GENERATION_CONFIG, generation)

    def _write_tokenizer(self, path: Path) -> None:
        """Copy the tokenizer, but with a template that adds what the model has seen and no more."""
        from tokenizers.processors import TemplateProcessing

        tokenizer = load_tokenizer(self.path)
        begin, template = self.text.begin_of_text, None
        bos_id = None if begin is None else self.bos_id
        if tokenizer.encode("a").ids == encode_prompt(tokenizer, "a", bos_id):
            shutil.copyfile(self.path, path)
            return
        if begin is not None:
            added = [(begin, self.bos_id)]
            tokenizer.post_processor = TemplateProcessing(
                single=[begin, "$0"], special_tokens=added
            )  # type: ignore[assignment]
            template = json.loads(tokenizer.to_str())["post_processor"]
        record = json.loads(read_small(self.path, fix="give another"))
        write_json(path, {**record, "post_processor": template})


def open_tokenizer(
    path: Path, *, vocab_size: int, text: TextFormat, is_known: bool
) -> TokenizerExport:
    """Check that a tokenizer belongs to a model.

    Unless the model is known to be trained with it, the size of its vocabulary must fit closely.
    """
    tokenizer = load_tokenizer(path)
    spare = None if is_known else PADDING_ROWS
    check_vocabulary(tokenizer, vocab_size, str(path), most_spare_rows=spare)
    turn_end_id = None
    if text.turn_end is not None:
        hint = "use --no-chatml, or give the tokenizer of the chat stage"
        if text.chat_template == CHAT_TEMPLATE:
            _require(tokenizer, path, TURN_START, hint)
        turn_end_id = _require(tokenizer, path, text.turn_end, hint)
    end_of_text_id = _require(tokenizer, path, text.end_of_text, "name it with --eos-token")
    ends = [each for each in (turn_end_id, end_of_text_id) if each is not None]
    hint = "use --no-chatml"
    named = [_require(tokenizer, path, token, hint) for token in text.end_tokens]
    return TokenizerExport(
        path=path,
        text=text,
        end_of_text_id=end_of_text_id,
        turn_end_id=turn_end_id,
        bos_id=_require(
            tokenizer, path, text.begin_of_text or text.end_of_text, "name it with --eos-token"
        ),
        end_ids=tuple(named or ends),
    )


def _require(tokenizer: "Tokenizer", path: Path, token: str, hint: str) -> int:
    found = tokenizer.token_to_id(token)
    if found is None:
        raise UserError(f"tokenizer {path} has no token {token!r}; {hint}")
    return found
