"""Every shape of data: prepared, printed, and read as a batch, against an own count."""

import logging
import re
from collections import Counter
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

import titan_loop.data
from tests.data.shapes import chats, files, records, tokenizers
from tests.data.shapes.shape import Rows, Shape, jsonl
from titan_loop.data.inspect_source import show_source, verify_source
from titan_loop.data.labels import IGNORED
from titan_loop.data.load.held_out_windows import held_out_windows
from titan_loop.data.load.loader import WindowLoader
from titan_loop.data.prepare.packing import pack_source
from titan_loop.data.prepare.tokenize_source import tokenize_source
from titan_loop.data.shards import TokenShards
from titan_loop.data.source_card import SourceCard
from titan_loop.errors import UserError
from titan_loop.text.conversation import parse_conversation

ROWS: Rows = {**files.ROWS, **records.ROWS, **chats.ROWS, **tokenizers.ROWS}
PAGE = Path(titan_loop.data.__file__).with_name("SHAPES.md")
END = "<|endoftext|>"
SMALL = "too few to score runs with as large a training.seq_len"  # of every held-out split here


def documents_of(batch: dict[str, torch.Tensor], labels: torch.Tensor) -> list[tuple[Any, Any]]:
    """Return the ids and labels of each document of one window that holds them all."""
    starts = [*(batch["positions"][0] == 0).nonzero().flatten().tolist(), labels.shape[1]]
    return [
        (batch["input"][0, start:stop].tolist(), labels[0, start:stop].tolist())
        for start, stop in pairwise(starts)
    ]


def whole_source(out: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the one window that holds every document of a source."""
    length = SourceCard.read(out).splits["train"].tokens
    pack_source(out, seq_len=length, long_documents="split")  # of the held-out split alone
    config = WindowLoader.Config(mixture=[f"{out}=1:packed"], prefetch=False)
    loader = config.build(dp_world_size=1, dp_rank=0, seq_len=length, local_batch_size=1)
    ((batch, labels),) = loader.read_step(1)
    return batch, labels


def check_tokens(row: Shape, out: Path, tokenizer: Tokenizer) -> None:
    """Compare one training batch with the row's texts, tokenised here."""
    batch, labels = whole_source(out)
    seen = documents_of(batch, labels)
    texts = row.train if row.stored is None else row.stored
    assert len(seen) == len(texts)
    decoded = [tokenizer.decode(ids, skip_special_tokens=False) for ids, _ in seen]
    assert Counter(decoded) == Counter(text + END for text in texts)
    if row.targets is None:
        tokenizer.encode_special_tokens = True
        end = tokenizer.token_to_id(END)
        bos = not row.options.get("no_bos", False)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        own = [[*tokenizer.encode(text, add_special_tokens=bos).ids, end] for text in row.train]
        assert sorted(ids for ids, _ in seen) == sorted(own)
        assert all(targets == [*ids[1:], IGNORED] for ids, targets in seen)
    else:
        assert all(t in (i, IGNORED) for ids, ts in seen for i, t in zip(ids[1:], ts, strict=False))
        taught = [[t for t in targets if t != IGNORED] for _, targets in seen]
        taught = [tokenizer.decode(ids, skip_special_tokens=False) for ids in taught]
        pairs = zip(row.train, row.targets, strict=True)
        assert Counter(zip(decoded, taught, strict=True)) == Counter((t + END, y) for t, y in pairs)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_shape(row, small_tokenizer, tmp_path, monkeypatch, caplog):
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    row.write(folder)
    tokenizer = small_tokenizer if row.tokenizer is None else row.tokenizer(tmp_path)
    options = {"tokenizer": tokenizer, "held_out_fraction": 0, **row.options}
    if {"malformed", "missing_text"} & {*row.dropped}:
        options.setdefault("max_malformed", 0.5)
    monkeypatch.chdir(folder)
    if row.refused:
        with pytest.raises(UserError, match=row.refused) as refusal:
            tokenize_source(row.inputs, output=out, **options)
        assert "\n" not in str(refusal.value)
        return
    with caplog.at_level(logging.WARNING):
        card = tokenize_source(row.inputs, output=out, **options)
    # Other tests may have left a logger that lets less than warnings through.
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    warnings = [record.getMessage() for record in warned]
    said = [*row.warned]
    if row.dropped:
        said += ["dropped " + ", ".join(f"{count} {kind}" for kind, count in row.dropped.items())]
    for part in said:
        assert any(part in warning for warning in warnings), (part, warnings)
    known = (*said, SMALL, f"dropped {folder}")  # the latter: examples of dropped records
    assert [w for w in warnings if not any(part in w for part in known)] == []
    assert card.dropped == row.dropped
    assert getattr(card, "repaired", {}) == row.repaired
    assert list(verify_source(out)) == []
    texts = row.train if row.stored is None else row.stored
    printed = [shown.text for shown in show_source(out, count=999)]
    marks = r"[⟦⟧]|\\(?=<\|)"  # of targets, and of control tokens that a text spells
    plain = [re.sub(marks, "", text) for text in printed]
    assert sorted(plain) == sorted(text + END for text in texts)
    if row.held_out:
        printed = [shown.text for shown in show_source(out, count=999, split="held_out")]
        assert sorted(printed) == sorted(text + END for text in row.held_out)
    else:
        assert "held_out" not in card.splits
    check_tokens(row, out, Tokenizer.from_file(str(tokenizer)))


@pytest.mark.parametrize(("record", "words"), chats.FAULTY)
def test_a_faulty_chat_is_named(record, words):
    with pytest.raises((KeyError, TypeError), match=words):
        parse_conversation(record)


@pytest.mark.parametrize("row", [row for row in tokenizers.ROWS.values() if not row.refused])
def test_the_bytes_of_tokens_are_the_documents(row, tmp_path):
    row.write(tmp_path)
    options = {"tokenizer": row.tokenizer(tmp_path), **row.options}
    held_out = tmp_path / "a.jsonl"
    (tmp_path / "b.jsonl").write_bytes(jsonl(["to train on"]))
    source = tmp_path / "out"
    tokenize_source(tmp_path / "b.jsonl", output=source, held_out_inputs=held_out, **options)
    shards = TokenShards(source, "held_out")
    assert list(verify_source(source)) == []
    assert shards.split.text_bytes == sum(len(text.encode()) for text in row.train)
    lengths = [len(shards.document(number)) for number in range(shards.split.documents)]
    starts = [0, *accumulate(lengths)]
    found = [shards.read_bytes(*part).sum() for part in zip(starts, lengths, strict=False)]
    assert sorted(found) == sorted(len(text.encode()) for text in row.train)
    seq_len = min(shards.tokens - 1, 24)
    windows = held_out_windows(source, seq_len=seq_len, count=1)
    assert 0 < windows.label_bytes.sum() <= shards.split.text_bytes
    (shard,) = shards.split.shards
    name = f"held_out/{shard.file}.bytes"
    (source / name).write_bytes(bytes(4 * shard.tokens))
    (fault,) = verify_source(source)
    assert f"{name}: SHA-256" in fault


def test_the_page_says_every_row():
    rows = re.findall(r"^\| (.+?) \| ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [name for name in rows if name != "row"] == [*ROWS]
