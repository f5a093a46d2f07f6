"""Finish a preparation: check the pipelines' files, count dropped documents, commit the card."""

import hashlib
import logging
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from titan_loop.data.prepare.pipelines import HOLD_OUT, READ, TOKENIZE, Pipeline
from titan_loop.data.prepare.preparation import SPLITS, Preparation
from titan_loop.data.prepare.readers import (
    DROPPED_BY_READERS,
    REPAIRED_BY_READERS,
    SPELT_CHATML,
    report_dropped,
)
from titan_loop.data.prepare.steps import CHANGED
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
from titan_loop.storage.json_files import read_json
from titan_loop.text.tokenizer import (
    TOKENIZER_NAME,
    TURN_START,
    load_tokenizer,
    token_bytes,
    vocab_size,
)

logger = logging.getLogger(__name__)

_SHARDS = "*_doc_shuffled.ds"
_SHORT_WINDOW = 256  # of the quick start; fewer held-out tokens are a warning


def write_card(preparation: Preparation, pipelines: Sequence[Pipeline]) -> SourceCard:
    """Check the files of the pipelines and commit them as a source."""
    for pipeline in pipelines:
        pipeline.require_finished()
    output = preparation.output
    # MinHash's pipelines come first; the last ones write the splits.
    counted = {each.name: _statistics(each) for each in pipelines if each.name in SPLITS}
    read = counted["train"][READ]
    dropped = _dropped(preparation, counted["train"])
    repaired = {kind: read[kind] for kind in REPAIRED_BY_READERS if read[kind]}
    if repaired:
        logger.info("%s: repaired %s of %d records", output, repaired, read["records"])
    tokenizer = load_tokenizer(output / TOKENIZER_NAME)
    eos_id = tokenizer.token_to_id(preparation.eos_token)
    assert eos_id is not None
    bos = preparation.bos_token
    bos_id = None if bos is None else tokenizer.token_to_id(bos)
    splits: dict[str, SplitCard] = {}
    for name, steps in counted.items():
        split = splits[name] = _split_card(output / name, tokenizer, eos_id, steps[TOKENIZE])
        # BOS may be the same token, and a template may end every turn with it.
        if not (split.eos_only_at_ends or eos_id == bos_id or preparation.chat is not None):
            logger.warning(
                f"{output / name}: not every document ends in EOS id {eos_id} and has none before: "
                "use a tokenizer whose EOS is a special token"
            )
        logger.info(
            f"{output}/{name}: {split.documents} documents, {split.tokens} tokens, "
            f"{split.text_bytes} bytes of text"
        )
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
    if "held_out" in splits and (held_out := splits["held_out"].tokens) < _SHORT_WINDOW:
        logger.warning(
            f"{output} holds out {held_out} tokens, too few to score runs with as large a "
            "training.seq_len: raise --held-out-fraction, or give --held-out-inputs"
        )
    if preparation.documents.held_out_files:  # otherwise equal texts are on the same side
        held_out_texts = {*_text_hashes(output / "held_out", tokenizer)}
        shared = held_out_texts.intersection(_text_hashes(output / "train", tokenizer))
        if shared:
            logger.warning(
                f"{output}: {len(shared)} of {len(held_out_texts)} different held-out texts are "
                "trained on, too, so that scores on them say little: remove them from one side"
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
        repaired=repaired,
        cleaning=preparation.config.cleaning(),
        bos_id=bos_id,
        round_trip=_round_trip(output, [steps[TOKENIZE] for steps in counted.values()]),
        **({} if preparation.chat is None else preparation.chat.on_card(tokenizer)),
    )
    for note in output.glob("*/*.ds.metadata"):
        note.unlink()  # datatrove's, with a path of this machine; nothing reads it
    card.write(output)
    shutil.rmtree(preparation.work, ignore_errors=True)
    return card


def _statistics(pipeline: Pipeline) -> dict[str, Counter[str]]:
    """Return the counts of each step, summed over the tasks."""
    totals: dict[str, Counter[str]] = {name: Counter() for name in pipeline.steps}
    for path in sorted((pipeline.logs / "stats").glob("*.json")):
        counted = read_json(path, fix="pass --overwrite to start over")
        for name, step in zip(pipeline.steps, counted, strict=True):
            for statistic, value in step["stats"].items():
                total = value["total"] if isinstance(value, dict) else value
                totals[name][statistic] += int(total)
    return totals


def _text_hashes(folder: Path, tokenizer: Tokenizer) -> Iterator[bytes]:
    for path in folder.glob(_SHARDS):
        ids = np.memmap(path, dtype=f"<u{token_bytes(tokenizer)}", mode="r")
        ends = np.fromfile(index_path(path), dtype="<u8").astype(np.int64)
        for start, end in pairwise([0, *ends.tolist()]):
            yield hashlib.blake2b(ids[start:end].tobytes(), digest_size=8).digest()


def _round_trip(output: Path, counts: Sequence[Counter[str]]) -> dict[str, Any]:
    """Return the card's record of the documents that were decoded; warn about changed ones."""
    decoded, changed = (sum(count[key] for count in counts) for key in ("decoded", "changed"))
    record: dict[str, Any] = {"decoded": decoded, "changed": changed}
    if changed:
        examples = sorted(name for count in counts for name in count if name.startswith(CHANGED))
        record["first"] = examples[0].removeprefix(CHANGED)
        logger.warning(
            f"{output}: {changed} of {decoded} documents, a sample, do not come back from their "
            f"tokens; first {record['first']}"
        )
    return record if decoded else {}


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


def _split_card(folder: Path, tokenizer: Tokenizer, eos_id: int, counts: Counter[str]) -> SplitCard:
    shards: list[ShardCard] = []
    id_bytes = token_bytes(tokenizer)
    max_token_id = -1
    misplaced = loss_tokens = 0
    for path in sorted(folder.glob(_SHARDS)):
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
