"""Finish a preparation: check the pipelines' files, count dropped documents, commit the card."""

import logging
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titan_loop.data.prepare.executors import Pipeline, statistics
from titan_loop.data.prepare.pipelines import HASH_TEXTS, HOLD_OUT, READ, TOKENIZE
from titan_loop.data.prepare.preparation import SPLITS, Preparation
from titan_loop.data.prepare.readers import (
    DROPPED_BY_READERS,
    REPAIRED_BY_READERS,
    SPELT_CHATML,
    report_dropped,
)
from titan_loop.data.prepare.steps import CHANGED, TextHashes
from titan_loop.data.shards import file_chunks, index_path, misplaced_eos
from titan_loop.data.source_card import (
    BYTES_SUFFIX,
    INDEX_SUFFIX,
    LOSS_SUFFIX,
    ShardCard,
    SourceCard,
    SplitCard,
    file_sha256,
)
from titan_loop.errors import UserError
from titan_loop.text.tokenizer import (
    TOKENIZER_NAME,
    TURN_START,
    load_tokenizer,
    token_bytes,
    vocab_size,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

_SHORT_WINDOW = 256  # of the quick start; fewer held-out tokens are a warning


def write_card(preparation: Preparation, pipelines: Sequence[Pipeline]) -> SourceCard:
    """Check the files of the pipelines and commit them as a source."""
    for pipeline in pipelines:
        pipeline.require_finished()
    output = preparation.output
    names = SPLITS if preparation.holds_out else SPLITS[:1]
    steps = {pipeline.name: [*pipeline.steps] for pipeline in pipelines}
    counted = {name: statistics(preparation.logs(name), steps[name]) for name in names}
    read = counted["train"][READ]
    dropped = _dropped(preparation, counted["train"])
    tokenizer = load_tokenizer(output / TOKENIZER_NAME)
    eos_id = tokenizer.token_to_id(preparation.eos_token)
    assert eos_id is not None
    bos = preparation.bos_token
    bos_id = None if bos is None else tokenizer.token_to_id(bos)
    splits: dict[str, SplitCard] = {}
    for name in names:
        split = _split_card(output / name, tokenizer, eos_id, counted[name][TOKENIZE])
        if not split.eos_only_at_ends and eos_id != bos_id:  # else one token is in both places
            logger.warning(
                f"{output / name}: not every document ends in EOS id {eos_id} and has none before: "
                "use a tokenizer whose EOS is a special token"
            )
        logger.info(
            f"{output}/{name}: {split.documents} documents, {split.tokens} tokens, "
            f"{split.text_bytes} bytes of text"
        )
        splits[name] = split
    if spelt := read[SPELT_CHATML]:
        logger.warning(
            f"{output}: {spelt} documents spell {TURN_START}, which stays text, and all of their "
            "tokens are trained on: give records of messages with --chat to prepare conversations"
        )
    if not splits["train"].tokens:
        raise UserError(
            f"source {output}: no document is left to train on (records read: {read['records']}, "
            f"dropped: {dropped})"
        )
    held_out = splits["held_out"].tokens if preparation.holds_out else _SHORT_WINDOW
    if held_out < _SHORT_WINDOW:
        effect = "no document, so that no run can be scored on it"
        if held_out:
            effect = f"{held_out} tokens, which score only runs with a smaller training.seq_len"
        fix = "raise --held-out-fraction, or give --held-out-inputs"
        logger.warning("%s holds out %s: %s", output, effect, fix)
    shared, texts = TextHashes.count_shared(preparation.work / HASH_TEXTS)
    if shared:
        logger.warning(
            f"{output}: {shared} of {texts} different held-out texts are trained on, too, so that "
            "scores on them say little: remove them from one side"
        )
    card = SourceCard(
        name=output.name,
        tokenizer_sha256=file_sha256(output / TOKENIZER_NAME),
        vocab_size=vocab_size(tokenizer),
        eos_id=eos_id,
        token_bytes=token_bytes(tokenizer),
        splits=splits,
        licence=preparation.licence,
        versions=preparation.versions(),
        command=preparation.command,
        has_loss_mask=preparation.chat is not None,
        dropped=dropped,
        repaired=_repaired(output, read),
        cleaning=preparation.config.cleaning(),
        bos_id=bos_id,
        round_trip=_round_trip(preparation, [counted[name][TOKENIZE] for name in names]),
        **({} if preparation.chat is None else preparation.chat.on_card(tokenizer)),
    )
    for name in names:
        for note in (output / name).glob("*.ds.metadata"):
            note.unlink()  # datatrove's, with a path of this machine; nothing reads it
    card.write(output)
    shutil.rmtree(preparation.work, ignore_errors=True)
    return card


def _repaired(output: Path, counts: Counter[str]) -> dict[str, int]:
    repaired = {kind: counts[kind] for kind in REPAIRED_BY_READERS if counts[kind]}
    if repaired:
        shown = ", ".join(f"{count} {kind}" for kind, count in repaired.items())
        logger.info("%s: repaired %s of %d records", output, shown, counts["records"])
    return repaired


def _round_trip(preparation: Preparation, counts: Sequence[Counter[str]]) -> dict[str, Any]:
    """Return the card's record of the documents that were decoded; warn about changed ones."""
    decoded, changed = (sum(count[key] for count in counts) for key in ("decoded", "changed"))
    if not decoded:
        return {}
    record: dict[str, Any] = {"decoded": decoded, "changed": changed}
    if changed:
        examples = (name for count in counts for name in count if name.startswith(CHANGED))
        record["first"] = next(examples, "").removeprefix(CHANGED)
        logger.warning(
            f"{preparation.output}: {changed} of {decoded} documents, a sample, do not come back "
            f"from their tokens; first {record['first']}"
        )
    return record


def _dropped(preparation: Preparation, counted: Mapping[str, Counter[str]]) -> dict[str, int]:
    reader = counted[READ]
    dropped = Counter({kind: reader[kind] for kind in DROPPED_BY_READERS if reader[kind]})
    for name, counts in counted.items():
        if name in (READ, HOLD_OUT, TOKENIZE):
            continue
        reasons = {key: count for key, count in counts.items() if key.startswith("dropped_")}
        if not reasons and counts["dropped"]:
            reasons = {name: counts["dropped"]}
        # Adds: a filter's reason may have the name of a reader's, such as "empty".
        dropped.update({key.removeprefix("dropped_"): n for key, n in reasons.items()})
    report_dropped(str(preparation.output), reader, preparation.max_malformed, dropped)
    return dict(dropped)


def _split_card(
    folder: Path, tokenizer: "Tokenizer", eos_id: int, counts: Counter[str]
) -> SplitCard:
    shards: list[ShardCard] = []
    id_bytes = token_bytes(tokenizer)
    max_token_id = -1
    misplaced = loss_tokens = 0
    for path in sorted(folder.glob("*_doc_shuffled.ds")):
        tokens = path.stat().st_size // id_bytes
        ends = np.fromfile(index_path(path), dtype="<u8").astype(np.int64)
        if not len(ends) or int(ends[-1]) != tokens:
            raise UserError(f"shard {path} does not agree with its index: prepare it again")
        first = 0
        for chunk in file_chunks(path, f"<u{id_bytes}"):
            max_token_id = max(max_token_id, int(chunk.max()))
            misplaced += misplaced_eos(chunk, first, ends, eos_id)
            first += len(chunk)
        hashes: dict[str, str] = {}
        for suffix in (INDEX_SUFFIX, LOSS_SUFFIX, BYTES_SUFFIX):
            file = path.with_name(path.name + suffix)
            hashes[suffix] = file_sha256(file) if file.exists() else ""
        if hashes[LOSS_SUFFIX]:
            chunks = file_chunks(path.with_name(path.name + LOSS_SUFFIX), "u1")
            loss_tokens += sum(int(chunk.sum(dtype=np.int64)) for chunk in chunks)
        shard = ShardCard(
            file=path.name,
            documents=len(ends),
            tokens=tokens,
            bytes=path.stat().st_size,
            sha256=file_sha256(path),
            index_sha256=hashes[INDEX_SUFFIX],
            loss_sha256=hashes[LOSS_SUFFIX],
            bytes_sha256=hashes[BYTES_SUFFIX],
        )
        shards.append(shard)
    card = SplitCard(
        documents=sum(shard.documents for shard in shards),
        tokens=sum(shard.tokens for shard in shards),
        text_bytes=counts["text_bytes"],
        max_token_id=max_token_id,
        shards=tuple(shards),
        loss_tokens=loss_tokens if any(shard.loss_sha256 for shard in shards) else None,
        eos_only_at_ends=not misplaced,
    )
    if card.tokens != counts["tokens"]:
        raise UserError(
            f"{folder} holds {card.tokens} tokens, {counts['tokens']} were written: a shard is "
            "missing or cut off; remove the source and prepare it again"
        )
    return card
