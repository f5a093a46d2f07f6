"""`source.json`: the description of a prepared source, written last and atomically.

A folder without it holds an interrupted preparation. The loader compares the files' sizes with it
instead of opening every shard.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from titan_loop.errors import UserError, seen_from
from titan_loop.storage.file_names import require_file_name
from titan_loop.storage.folder_lock import FolderLock
from titan_loop.storage.json_files import json_sha256, read_json_object, write_json
from titan_loop.text.chat_template import ChatTemplate
from titan_loop.text.text_format import TextFormat

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CARD_NAME = "source.json"
_OWN_HASH = "card_sha256"
LOCK_NAME = "source.lock"
INDEX_SUFFIX = ".index"
LOSS_SUFFIX = ".loss"
BYTES_SUFFIX = ".bytes"
TOKEN_BYTES = "<u4"
"""Type of the bytes of text behind a token, in files with this suffix."""
_TOKEN_BYTES_SIZE = 4
_DOCUMENT_END_BYTES = 8
FORMAT_VERSION = 2
SHORT_DIGEST = 16
"""Hexadecimal digits of a SHA-256 in a loader's description."""

Card = TypeVar("Card", "SourceCard", "SplitCard", "ShardCard", "PackedCard")


def lock_source(folder: Path, field: str) -> FolderLock:
    """Keep other processes from writing to a source's folder; errors as in `FolderLock`."""
    return FolderLock(folder, LOCK_NAME, called=f"{field} {folder}", user="preparation")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardCard:
    """One `.ds` file in its split's folder, with the checksums of the files beside it.

    Attributes:
        loss_sha256: Checksum of the loss mask; empty without one.
        bytes_sha256: Checksum of the bytes of its tokens; empty where the tokenizer's table holds.
    """

    file: str
    documents: int
    tokens: int
    bytes: int
    sha256: str
    index_sha256: str = ""
    loss_sha256: str = ""
    bytes_sha256: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedCard:
    """One packed index of a split for windows of `seq_len`; `data/prepare/packing.py` writes it.

    Attributes:
        tokens: Number of tokens in all windows, without padding.
        split_documents: Number of documents longer than a window, which were cut.
    """

    seq_len: int
    windows: int
    pieces: int
    tokens: int
    split_documents: int
    windows_sha256: str
    pieces_sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitCard:
    """One split as it was written.

    Attributes:
        loss_tokens: Number of targets in the loss masks; None without masks.
        eos_only_at_ends: Whether every document was seen to end in EOS and to have none before;
            False if it was not checked.
    """

    documents: int
    tokens: int
    text_bytes: int
    max_token_id: int
    shards: tuple[ShardCard, ...]
    loss_tokens: int | None = None
    eos_only_at_ends: bool = False
    packed: tuple[PackedCard, ...] = ()

    def packed_for(self, seq_len: int) -> PackedCard | None:
        """Return the packed index for windows of `seq_len`, if there is one."""
        return next((packed for packed in self.packed if packed.seq_len == seq_len), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceCard:
    """The contents of `source.json`.

    Attributes:
        splits: Splits by name: "train" and "held_out".
        has_loss_mask: Whether the documents are conversations, with a `.ds.loss` file of a byte per
            token beside every shard.
        dropped: Number of records that were read and are in no split, by reason.
        repaired: Number of records that could be read only in part or with a change, by kind.
        chat_template: Jinja text of the conversations; None for ChatML, or without a loss mask.
        template_variables: Special tokens that the template may use, such as `bos_token`.
        turn_end: The token that ends a turn in that template.
        bos_id: Id of the token in front of every document but conversations, whose template may
            write it; None for none.
        round_trip: A sample of documents: how many were `decoded`, how many `changed` on the way
            to tokens and back, and the `first` of these; empty if none was decoded.
    """

    name: str
    tokenizer_sha256: str
    vocab_size: int
    eos_id: int
    token_bytes: int
    splits: dict[str, SplitCard]
    licence: str
    versions: dict[str, str]
    command: str
    has_loss_mask: bool = False
    dropped: dict[str, int] = field(default_factory=dict)
    repaired: dict[str, int] = field(default_factory=dict)
    cleaning: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    template_variables: dict[str, str] = field(default_factory=dict)
    turn_end: str | None = None
    bos_id: int | None = None
    round_trip: dict[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def write(self, folder: Path) -> None:
        """Write the card and its hash to `folder`, atomically: temporary file, fsync, rename."""
        record = asdict(self)
        write_json(folder / CARD_NAME, {**record, _OWN_HASH: json_sha256(record)})

    def shard_files(self, split: str) -> dict[str, int]:
        """Return the size in bytes of every file of a split's shards, by its name in the source."""
        sizes: dict[str, int] = {}
        for shard in self.splits[split].shards:
            name = f"{split}/{require_file_name(shard.file, CARD_NAME)}"
            sizes[name] = shard.tokens * self.token_bytes
            sizes[name + INDEX_SUFFIX] = shard.documents * _DOCUMENT_END_BYTES
            if self.has_loss_mask:
                sizes[name + LOSS_SUFFIX] = shard.tokens
            if shard.bytes_sha256:
                sizes[name + BYTES_SUFFIX] = shard.tokens * _TOKEN_BYTES_SIZE
        return sizes

    @classmethod
    def read(cls, folder: Path) -> "SourceCard":
        """Read the card of a prepared source; raise `UserError` if it is missing or damaged."""
        path = folder / CARD_NAME
        if not folder.is_dir():
            raise UserError(
                f"source {folder} is not a folder{seen_from(folder)}: prepare it with titan-loop "
                "data tokenize (titan-loop data demo makes the quick start's)"
            )
        if not path.is_file():
            raise UserError(
                f"source {folder} has no {CARD_NAME}: it is not a prepared source or its "
                "preparation was interrupted; run titan-loop data tokenize again with the same "
                "arguments"
            )
        return cls._parse(path)

    @classmethod
    def _parse(cls, path: Path) -> "SourceCard":
        fix = "restore it or prepare the source again"
        try:
            raw = read_json_object(path, fix="prepare it again")
            if (version := raw["format_version"]) != FORMAT_VERSION:
                raise UserError(
                    f"source {path.parent} has format {version}, this version reads "
                    f"{FORMAT_VERSION}: prepare it again"
                )
            if raw.pop(_OWN_HASH) != json_sha256(raw):
                raise UserError(f"source card {path} was changed after it was written: {fix}")
            raw.pop("given_ids", None)  # False on cards that were written shortly before 0.2.0
            for name, split in raw["splits"].items():
                split["shards"] = tuple(_typed(ShardCard, shard) for shard in split["shards"])
                split["packed"] = tuple(_typed(PackedCard, packed) for packed in split["packed"])
                raw["splits"][name] = _typed(SplitCard, split)
            card = _typed(cls, raw)
        except (AttributeError, KeyError, TypeError) as error:
            problem = f"source card {path} is unreadable ({error})"
            raise UserError(f"{problem}: prepare it again") from error
        for name, value in {"eos_id": card.eos_id, "bos_id": card.bos_id or 0}.items():
            if not 0 <= value < card.vocab_size:
                raise UserError(
                    f"source card {path}: {name} {value} is outside its vocabulary of "
                    f"{card.vocab_size}: {fix}"
                )
        if card.token_bytes not in (2, 4):
            raise UserError(
                f"source card {path}: token_bytes {card.token_bytes} is neither 2 nor 4: {fix}"
            )
        for split in card.splits:  # refuses names that lead out of the folder
            require_file_name(split, CARD_NAME)
            card.shard_files(split)
        return card


def _typed(kind: type[Card], record: Mapping[str, Any]) -> Card:
    card = kind(**record)
    for each in fields(card):
        value = getattr(card, each.name)
        if each.type in (int, str, bool) and type(value) is not each.type:
            raise TypeError(f"{each.name}={value!r:.40}")
    return card


def text_format(cards: Sequence[SourceCard], tokenizer: "Tokenizer") -> TextFormat:
    """Return the format of a mixture's text: its first text's ends, its first chats' template."""
    first = next((card for card in cards if not card.has_loss_mask), cards[0])
    end_of_text = tokenizer.id_to_token(first.eos_id)
    if end_of_text is None:
        raise UserError(
            f"source {first.name}: its EOS id {first.eos_id} is not in its tokenizer: "
            "restore source.json or prepare the source again"
        )
    begin = None if cards[0].bos_id is None else tokenizer.id_to_token(cards[0].bos_id)
    text = TextFormat(end_of_text=end_of_text, begin_of_text=begin)
    chats = next((card for card in cards if card.has_loss_mask), None)
    if chats is None:
        return text
    if chats.chat_template is None or chats.turn_end is None:
        return text.with_chatml()
    template = ChatTemplate(text=chats.chat_template, variables=chats.template_variables)
    return text.with_template(template, chats.turn_end)


def index_paths(split: Path, seq_len: int) -> tuple[Path, Path]:
    """Return the paths of the window ends and the pieces in a split's folder."""
    return split / f"packed_{seq_len}.windows", split / f"packed_{seq_len}.pieces"


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's contents, as cards record it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
