"""The counts of dropped documents, and the card of files that pipelines have written."""

import logging
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from titan_loop.data.prepare import finish
from titan_loop.data.prepare.executors import Pipeline
from titan_loop.data.prepare.finish import _dropped, write_card
from titan_loop.data.prepare.pipelines import READ, TOKENIZE
from titan_loop.errors import UserError


def test_reasons_of_the_same_name_add_up(tmp_path):
    preparation: Any = SimpleNamespace(
        logs=lambda name: tmp_path, max_malformed=0.5, output=tmp_path
    )
    counted = {
        READ: Counter(records=10, empty=2, malformed=1),
        "gopher repetition": Counter(dropped=3, dropped_empty=1, dropped_top_2_gram=2),
        "language": Counter(dropped=1),
        TOKENIZE: Counter(dropped=4),
    }
    expected = {"empty": 3, "malformed": 1, "top_2_gram": 2, "language": 1}
    assert _dropped(preparation, counted) == expected


def test_nothing_dropped_is_an_empty_record(tmp_path):
    preparation: Any = SimpleNamespace(logs=lambda name: tmp_path)
    assert _dropped(preparation, {READ: Counter(records=10), TOKENIZE: Counter()}) == {}


def test_as_many_records_may_be_malformed_as_was_asked_for(tmp_path):
    def dropped(most: float) -> dict[str, int]:
        preparation: Any = SimpleNamespace(
            logs=lambda name: tmp_path, max_malformed=most, output=tmp_path
        )
        return _dropped(
            preparation, {READ: Counter(records=100, malformed=2, missing_text=1, empty=40)}
        )

    assert dropped(0.03) == {"malformed": 2, "missing_text": 1, "empty": 40}
    with pytest.raises(UserError, match="3 of 100 records are malformed or lack their text"):
        dropped(0.029)


class Written:
    """A preparation whose pipelines have ended; token 0 is the end of a document."""

    eos_token, chat, licence, command, max_malformed = "<|endoftext|>", None, "test", "test", 0.1
    bos_token = None
    config = SimpleNamespace(cleaning=dict)

    def __init__(self, output: Path, tokenizer: Path) -> None:
        self.output, self.work = output, output / "work"
        self.counts: dict[str, Counter[str]] = {}
        output.mkdir()
        shutil.copyfile(tokenizer, output / "tokenizer.json")

    @property
    def holds_out(self) -> bool:
        return "held_out" in self.counts

    def versions(self) -> dict[str, str]:
        return {}

    def logs(self, name: str) -> Path:
        return self.output / "logs" / name

    def add(self, split: str, *shards: list[list[int]], loss: bool = False) -> None:
        """Write the documents of each shard, all of which end with EOS."""
        folder, written = self.output / split, 0
        folder.mkdir()
        for number, documents in enumerate(shards):
            ids = np.concatenate(documents).astype("<u2")
            path = folder / f"0000{number}_doc_shuffled.ds"
            ids.tofile(path)
            np.cumsum([len(each) for each in documents]).astype("<u8").tofile(f"{path}.index")
            if loss:
                (ids > 0).astype("u1").tofile(f"{path}.loss")
            written += len(ids)
        self.counts[split] = Counter(tokens=written, text_bytes=3 * written)

    def finish(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        def counted(logs: Path, steps: Any) -> dict[str, Counter[str]]:
            return {READ: Counter(records=9), TOKENIZE: self.counts[logs.name]}

        monkeypatch.setattr(finish, "statistics", counted)
        itself: Any = self
        return write_card(
            itself,
            [Pipeline(name=name, steps={}, tasks=0, logs=self.logs(name)) for name in self.counts],
        )


def test_a_card_counts_every_shard(tmp_path, small_tokenizer, monkeypatch, caplog):
    written = Written(tmp_path / "out", small_tokenizer)
    written.add("train", [[5, 299, 0], [7, 0]], [[8, 9, 9, 0]], loss=True)
    written.add("held_out", [[5] * 2047 + [0]])
    note = tmp_path / "out" / "train" / "1.ds.metadata"
    note.touch()
    written.work.mkdir()
    with caplog.at_level(logging.WARNING):
        card = written.finish(monkeypatch)
    assert not caplog.records
    train, held_out = card.splits["train"], card.splits["held_out"]
    assert (train.documents, train.tokens, train.text_bytes) == (3, 9, 27)
    assert (train.max_token_id, train.loss_tokens) == (299, 6)
    assert [(each.documents, each.tokens, each.bytes) for each in train.shards] == [
        (2, 5, 10),
        (1, 4, 8),
    ]
    assert all(each.loss_sha256 for each in train.shards)
    assert (held_out.tokens, held_out.loss_tokens, held_out.max_token_id) == (2048, None, 5)
    assert train.eos_only_at_ends
    assert held_out.eos_only_at_ends
    assert not note.exists()
    assert not written.work.exists()


def test_an_eos_inside_a_document_is_noted(tmp_path, small_tokenizer, monkeypatch, caplog):
    written = Written(tmp_path / "out", small_tokenizer)
    written.add("train", [[5, 0, 0]])
    split = written.finish(monkeypatch).splits["train"]
    assert not split.eos_only_at_ends
    assert "document ends and EOS id 0 disagree in 1 places" in caplog.text
    assert (split.max_token_id, "held_out" in caplog.text) == (5, False)


@pytest.mark.parametrize(
    ("documents", "warned"),
    [
        ([[5] * 254 + [0]], "255 tokens, which score only runs with a smaller training.seq_len"),
        ([], "holds out no document, so that no run can be scored on it"),
    ],
)
def test_few_held_out_tokens_are_a_warning(
    documents, warned, tmp_path, small_tokenizer, monkeypatch, caplog
):
    written = Written(tmp_path / "out", small_tokenizer)
    written.add("train", [[5, 0]])
    written.add("held_out", *[documents] if documents else [])
    assert written.finish(monkeypatch).splits["held_out"].tokens == sum(map(len, documents))
    assert warned in caplog.text


def test_files_that_do_not_agree_are_refused(tmp_path, small_tokenizer, monkeypatch):
    written = Written(tmp_path / "out", small_tokenizer)
    written.add("train", [[5, 0], [7, 0]])
    written.counts["train"]["tokens"] = 6
    with pytest.raises(UserError, match="holds 4 tokens, 6 were written: a shard is missing"):
        written.finish(monkeypatch)
    for ends in ([2, 3], []):
        index = tmp_path / "out" / "train" / "00000_doc_shuffled.ds.index"
        np.array(ends, dtype="<u8").tofile(index)
        with pytest.raises(UserError, match="does not agree with its index: prepare it again"):
            written.finish(monkeypatch)


def test_a_source_without_a_document_is_refused(tmp_path, small_tokenizer, monkeypatch):
    written = Written(tmp_path / "out", small_tokenizer)
    written.add("train")
    with pytest.raises(UserError, match=r"no document is left to train on \(records read: 9"):
        written.finish(monkeypatch)
