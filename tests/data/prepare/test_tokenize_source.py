import gzip
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.data.shapes.shape import jsonl, stored
from titan_loop.data.inspect_source import verify_source
from titan_loop.data.prepare.tokenize_source import tokenize_source
from titan_loop.data.shards import TokenShards
from titan_loop.data.source_card import CARD_NAME, SourceCard
from titan_loop.errors import UserError
from titan_loop.text.tokenizer import load_tokenizer


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(jsonl(texts))
    return path


@pytest.fixture
def texts() -> list[str]:
    return [f"document number {n} says {n * n}: naïve 🙂" for n in range(60)]


def test_given_splits_are_kept_and_documents_shuffled(texts, small_tokenizer, tmp_path):
    write_jsonl(tmp_path / "in" / "train.jsonl", texts[:50])
    write_jsonl(tmp_path / "in" / "held_out.jsonl", texts[50:])
    card = tokenize_source(tmp_path / "in", output=tmp_path / "out", tokenizer=small_tokenizer)
    assert card == SourceCard.read(tmp_path / "out")
    assert sorted(stored(tmp_path / "out", "train")) == sorted(texts[:50])
    assert stored(tmp_path / "out", "train") != texts[:50]
    assert sorted(stored(tmp_path / "out", "held_out")) == sorted(texts[50:])

    tokenizer = load_tokenizer(small_tokenizer)
    split = card.splits["train"]
    assert split.tokens == sum(len(tokenizer.encode(text).ids) + 1 for text in texts[:50])
    assert split.text_bytes == sum(len(text.encode()) for text in texts[:50])
    assert (split.documents, split.loss_tokens, card.dropped) == (50, None, {})
    assert (card.vocab_size, card.eos_id, card.token_bytes) == (300, 0, 2)
    ids, ends = TokenShards(tmp_path / "out").read(0, split.tokens)
    assert split.max_token_id == ids.max()
    assert np.array_equal(ends - 1, np.nonzero(ids == card.eos_id)[0])
    assert all(split.eos_only_at_ends for split in card.splits.values())
    assert not list((tmp_path / "out").rglob("*.metadata")), "nothing would notice its damage"


def test_an_eos_inside_documents_is_seen_and_said(small_tokenizer, tmp_path, caplog):
    ordinary = json.loads(small_tokenizer.read_text())
    ordinary["added_tokens"][0]["special"] = False  # then it is found in texts
    (tmp_path / "tokenizer.json").write_text(json.dumps(ordinary))
    path = write_jsonl(tmp_path / "a.jsonl", ["before <|endoftext|> after"])
    card = tokenize_source(
        path, output=tmp_path / "out", tokenizer=tmp_path / "tokenizer.json", held_out_fraction=0
    )
    assert not card.splits["train"].eos_only_at_ends
    assert "not every document ends in EOS id 0 and has none before" in caplog.text
    ids, ends = TokenShards(tmp_path / "out").read(0, card.splits["train"].tokens)
    assert (ids == 0).sum() == 2
    assert ends.tolist() == [len(ids)]
    assert "1 places where document ends and EOS" in next(verify_source(tmp_path / "out"))


def test_bad_records_are_counted_shown_and_limited(small_tokenizer, tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    bad = [
        b'{"text": " "}',
        b'{"body": "x"}',
        b"not json",
        b'{"text": "\xff"}',
        b'{"text": 5}',
        b"[1]",
        b'{"text": null}',
    ]
    path.write_bytes(b"\n".join([b'{"text": "first"}', *bad, b"", b'{"text": "last"}']) + b"\n")
    out = tmp_path / "out"
    options = {"tokenizer": small_tokenizer, "held_out_fraction": 0}
    said = r"6 of 9 records are malformed .* --max-malformed 0.01 .*line 2: no text; .*line 3: no f"
    with pytest.raises(UserError, match=rf"{said}.*line 4: not JSON: Expecting value, column 1"):
        tokenize_source(path, output=out, **options)
    assert not (out / CARD_NAME).exists()
    # The same command with a larger tolerance goes on from the finished tasks.
    card = tokenize_source(path, output=out, max_malformed=0.7, **options)
    assert card.dropped == {"malformed": 4, "missing_text": 2, "empty": 1}
    assert card.splits["train"].documents == 2
    assert sorted(stored(out, "train")) == ["first", "last"]
    assert "dropped 4 malformed, 2 missing_text, 1 empty of 9 records" in caplog.text
    shown = [r.getMessage() for r in caplog.records if "a.jsonl, line" in r.getMessage()]
    assert [message.split(", ")[1].split(":")[0] for message in shown] == [
        f"line {number}" for number in (2, 3, 4)
    ]


def test_a_preparation_goes_on_from_its_finished_tasks(texts, small_tokenizer, tmp_path):
    files = [write_jsonl(tmp_path / f"{n}.jsonl", texts[n::3]) for n in range(3)]
    sound = gzip.compress(files[2].read_bytes())
    archive = files[2] = files[2].with_suffix(".jsonl.gz")
    archive.write_bytes(sound)
    out = tmp_path / "out"
    options = {"tokenizer": small_tokenizer, "held_out_fraction": 0.3}
    first = tokenize_source(files, output=tmp_path / "whole", tasks=5, workers=2, **options)
    train, held_out = (stored(tmp_path / "whole", split) for split in ("train", "held_out"))
    assert sorted(train + held_out) == sorted(texts)
    assert 5 <= len(held_out) <= 31  # 60 documents at 0.3, fixed by their hashes
    # The third file's archive is damaged, so its task fails; the first two are done.
    archive.write_bytes(sound[:-20] + bytes(20))
    options["tasks"] = 3
    with pytest.raises(UserError, match=r"2\.jsonl\.gz cannot be read to its end"):
        tokenize_source(files, output=out, **options)
    times = [path.stat().st_mtime_ns for path in sorted((out / "train").glob("*_shuffled.ds"))]
    assert len(times) == 2
    with pytest.raises(UserError, match=r"unfinished with other settings \(text_key\)"):
        tokenize_source(files, output=out, text_key="body", **options)
    archive.write_bytes(sound)
    text, stat = files[0].read_text(), files[0].stat()
    files[0].write_text(text.replace("says", "said"))
    with pytest.raises(UserError, match=r"input .*/0\.jsonl was modified after .* --overwrite"):
        tokenize_source(files, output=out, **options)
    files[0].write_text(text)
    os.utime(files[0], ns=(stat.st_atime_ns, stat.st_mtime_ns))
    again = tokenize_source(files, output=out, **options)
    assert again == replace(first, name="out")
    after = [path.stat().st_mtime_ns for path in sorted((out / "train").glob("*_shuffled.ds"))]
    assert after[:2] == times
    assert not (out / "work").exists()


def test_a_mistake_that_kept_no_document_does_not_block_the_next_try(small_tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    options = {"output": tmp_path / "out", "tokenizer": small_tokenizer, "held_out_fraction": 0}
    with pytest.raises(UserError, match="no field 'body'"):
        tokenize_source(path, text_key="body", **options)
    assert tokenize_source(path, **options).splits["train"].documents == 2


def test_a_complete_source_is_replaced_only_when_told(texts, small_tokenizer, tmp_path):
    path, out = write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "out"
    first = tokenize_source(path, output=out, tokenizer=small_tokenizer)
    (out / CARD_NAME).unlink()
    assert tokenize_source(path, output=out, tokenizer=small_tokenizer) == first
    with pytest.raises(UserError, match="exists already"):
        tokenize_source(path, output=out, tokenizer=small_tokenizer)
    (out / "train" / "leftover.ds").write_bytes(b"\0\0")
    again = tokenize_source(path, output=out, tokenizer=out / "tokenizer.json", overwrite=True)
    assert again == first
    assert not (out / "train" / "leftover.ds").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"held_out_fraction": 1}, r"held_out_fraction 1 must lie in \[0, 1\)"),
        ({"max_malformed": 2}, r"max_malformed 2 must lie in \[0, 1\]"),
        ({"tasks": 0}, "tasks=0 must be at least 1"),
        ({"eos_token": "<|endoftxt|>"}, r"eos_token '<\|endoftxt\|>' .* nearest: <\|endoftext\|>"),
        ({"executor": "slrum"}, "executor=slrum is unknown; nearest: slurm"),
        ({"text_key": "body", "chat": True}, "text_key 'body' has no effect on chats"),
        ({"text_key": "body"}, "60 of 60 records are malformed or lack their text"),
        ({"text_key": "body", "max_malformed": 1}, r"no document is left .*'missing_text': 60"),
        ({"output": "a.jsonl/below_a_file"}, "cannot be written"),
        ({"output": Path("s3://bucket/out")}, r"output s3:/+bucket/out is in an object store"),
        ({"output": "raw"}, r"holds a 'train' that is not a source's"),
    ],
)
def test_mistakes(texts, small_tokenizer, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    other = write_jsonl(tmp_path / "raw" / "train" / "a.jsonl", texts)
    with pytest.raises(UserError, match=message):
        tokenize_source(path, **{"output": "out", "tokenizer": small_tokenizer, **options})
    assert other.exists()
    assert not Path("out", CARD_NAME).exists()


@pytest.mark.parametrize("fraction", [1e-9, 0.1])
def test_few_held_out_tokens(texts, small_tokenizer, tmp_path, caplog, fraction):
    path, out = write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "out"
    tokenize_source(path, output=out, tokenizer=small_tokenizer, held_out_fraction=fraction)
    assert "tokens, too few to score runs with as large a training.seq_len" in caplog.text
