"""The demo's pipeline: all documents of a folder in every epoch, and a state to resume from."""

import json
from itertools import islice
from pathlib import Path

import pytest
from torchdata.nodes import Loader

from titan_loop.data.demo.folder_pipeline import endless, once

TEXTS = [f"document {number}" for number in range(20)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in (0, 1):
        lines = [json.dumps({"text": text}) + "\n" for text in TEXTS[part * 10 : part * 10 + 10]]
        (tmp_path / f"{part}.jsonl").write_text("".join(lines))
    monkeypatch.setenv("PIPELINE_FOLDER", str(tmp_path))


def test_ranks_share_the_documents_of_every_epoch() -> None:
    assert [*once(0, 1)] == TEXTS
    epochs = [[], []]
    for rank in (0, 1):
        read = [*islice(Loader(endless(rank, 2)), 20)]
        epochs[0] += read[:10]
        epochs[1] += read[10:]
    for epoch in epochs:
        assert sorted(epoch) == sorted(TEXTS)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("read", [1, 19, 20, 27])
def test_it_goes_on_where_it_was(read: int) -> None:
    whole = [*islice(Loader(endless(0, 1)), 45)]
    loader = Loader(endless(0, 1))
    assert [*islice(loader, read)] == whole[:read]
    resumed = Loader(endless(0, 1))
    resumed.load_state_dict(loader.state_dict())
    assert [*islice(resumed, 45 - read)] == whole[read:]
