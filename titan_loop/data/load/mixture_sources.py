"""The sources of a mixture: their names, cards and windows."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from titan_loop.data.keyed import keyed_integer
from titan_loop.data.load.mixture import MixtureEntry
from titan_loop.data.load.windows import CutWindows, PackedWindows, SourceWindows
from titan_loop.data.open_files import OpenFiles
from titan_loop.data.shards import TokenShards
from titan_loop.data.source_card import SourceCard, file_sha256
from titan_loop.errors import UserError
from titan_loop.text.tokenizer import TOKENIZER_NAME, same_ids


def named_sources(paths: Sequence[str]) -> dict[str, str]:
    """Return name → path: the folders' own names, or the whole paths if two share a name."""
    names = [Path(path).name for path in paths]
    if len(set(names)) < len(names):
        names = [*paths]
    return dict(zip(names, paths, strict=True))


def _share_ids(cards: Mapping[str, SourceCard]) -> bool:
    hashes = {Path(path) / TOKENIZER_NAME: card.tokenizer_sha256 for path, card in cards.items()}
    if len({*hashes.values()}) == 1:
        return True
    # The files decide only where they are still the ones of the preparations.
    there = all(file.is_file() and file_sha256(file) == known for file, known in hashes.items())
    return there and same_ids(*hashes)


def read_cards(mixture: Sequence[MixtureEntry]) -> list[SourceCard]:
    """Read the cards of a mixture's sources; raise `UserError` if they cannot be mixed."""
    cards = [SourceCard.read(Path(entry.path)) for entry in mixture]
    chats: list[tuple[str, str | None]] = []
    texts: list[tuple[str, int]] = []
    for entry, card in zip(mixture, cards, strict=True):
        if not _share_ids({mixture[0].path: cards[0], entry.path: card}):
            raise UserError(
                f"dataloader.mixture: {entry.path} was tokenised with another tokenizer than "
                f"{mixture[0].path}: prepare both with the same tokenizer.json"
            )
        if card.bos_id != cards[0].bos_id:
            paths = (mixture[0].path, entry.path)
            with_bos, without = paths[:: 1 if card.bos_id is None else -1]
            raise UserError(
                f"dataloader.mixture: documents of {with_bos} begin with BOS, those of {without} "
                "do not: prepare both alike, with or without --no-bos"
            )
        if card.has_loss_mask:
            chats.append((entry.path, card.chat_template))
        else:  # the answers of chats have an end of their own
            texts.append((entry.path, card.eos_id))
    for path, eos_id in texts[1:]:
        if eos_id != texts[0][1]:
            raise UserError(
                f"dataloader.mixture: the EOS of {path} is token {eos_id}, that of "
                f"{texts[0][0]} token {texts[0][1]}: prepare both with the same --eos-token"
            )
    for path, template in chats[1:]:
        if template != chats[0][1]:
            raise UserError(
                f"dataloader.mixture: {path} has another chat template than {chats[0][0]}: "
                "prepare both with the same --chat-template"
            )
    return cards


def open_source(
    entry: MixtureEntry, card: SourceCard, files: OpenFiles, seq_len: int, seed: int
) -> SourceWindows:
    """Open the training split of a source as windows of `seq_len` tokens."""
    shards = TokenShards(entry.path, "train", card=card, files=files)
    # Keyed by its contents, so that a change of another source leaves this one's order alone.
    key = keyed_integer("source", seed, shards.contents())
    return (PackedWindows if entry.packed else CutWindows)(shards, seq_len, key)


def require_whole_prompts(entry: MixtureEntry, card: SourceCard, seq_len: int) -> None:
    """Raise `UserError` for windows that cut the prompts of a source with prompts and answers."""
    if not card.has_loss_mask:
        return
    if not entry.packed:
        raise UserError(
            f"dataloader.prefix=True: windows would cut prompts of {entry.path}; write "
            f"{entry.path}={entry.weight:g}:packed in dataloader.mixture"
        )
    packed = card.splits["train"].packed_for(seq_len)
    if packed is not None and packed.split_documents:
        raise UserError(
            f"dataloader.prefix=True: {packed.split_documents} documents of {entry.path} are "
            f"longer than training.seq_len={seq_len}; raise it, or drop them and pack again"
        )
