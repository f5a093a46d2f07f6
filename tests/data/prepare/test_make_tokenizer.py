import gzip
import json
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from titan_loop.data.prepare.make_tokenizer import LEARNT, train_tokenizer, without_long_words
from titan_loop.errors import UserError


def test_training_reads_every_format(jsonl, tmp_path):
    texts = [json.loads(line)["text"] for line in jsonl.read_text().splitlines()]
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number}.md").write_text(text)
    (folder / "other.py").write_text("looped " * 99)
    archive = tmp_path / "a.jsonl.gz"
    archive.write_bytes(gzip.compress(jsonl.read_bytes()))
    expected = train_tokenizer(jsonl, vocab_size=300, output=tmp_path / "0").read_bytes()
    for inputs in (archive, folder):
        output = tmp_path / f"{inputs.name}.json"
        path = train_tokenizer(inputs, vocab_size=300, output=output, pattern=["*.md"])
        assert path.read_bytes() == expected
    other = train_tokenizer(folder, vocab_size=300, output=tmp_path / "2")
    assert other.read_bytes() != expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 258}, "vocab_size 258 is below 259"),
        ({"vocab_size": 9000}, "vocab_size 9000 cannot be filled"),
        ({"text_key": "body"}, r"4 of 4 records .* lack their text.*line 1: no field 'b"),
        ({"max_malformed": 2}, r"max_malformed 2 must lie in \[0, 1\]"),
        ({"output": "s3://bucket/out"}, "output s3://bucket/out is in an object store"),
        ({"output": Path("/dev/null/t")}, r"output .*/t cannot be written \("),
    ],
)
def test_training_mistakes(jsonl, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        train_tokenizer(**{"inputs": jsonl, "vocab_size": 300, "output": tmp_path, **options})


def test_a_few_bad_records_are_dropped_and_counted(jsonl, tmp_path, caplog):
    expected = train_tokenizer(jsonl, vocab_size=300, output=tmp_path / "0").read_bytes()
    bad = tmp_path / "bad.jsonl"
    bad.write_text(jsonl.read_text() + '\n{"text": 3}\n')
    made = train_tokenizer(bad, vocab_size=300, output=tmp_path / "1", max_malformed=0.5)
    assert made.read_bytes() == expected
    assert "dropped 1 malformed of 5 records" in caplog.text
    with pytest.raises(UserError, match=r"1 of 5 records are malformed .* --max-malformed 0.1 all"):
        train_tokenizer(bad, vocab_size=300, output=tmp_path / "2", max_malformed=0.1)
    with pytest.raises(UserError, match=r"output .*1 exists already: give another path"):
        train_tokenizer(jsonl, vocab_size=259, output=tmp_path / "1")


WORDS = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])


@pytest.mark.parametrize("letters", ["a", "漢", " ", "a\u0301b"])
@pytest.mark.parametrize("before", ["", "a b\n" * 999])
def test_long_words_are_cut(letters, before):
    word = letters * (LEARNT // len(letters) + 999)
    text = f"{before}{word}1 and the rest\n"
    parts = without_long_words(text, WORDS)
    if letters == "a\u0301b":  # the accent is no letter: words of one each
        assert parts == [text]
        return
    kept = "".join(parts)
    assert kept.startswith(before)
    assert kept.endswith("1 and the rest\n" if letters != " " else "and the rest\n")
    assert abs(len(text) - len(kept) - 999) < 9
    longest = max(
        last - first for part in parts for _, (first, last) in WORDS.pre_tokenize_str(part)
    )
    assert longest <= 128
