"""Streaming raw text: upstream's loader behind our interface, and honest about it."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from titan_loop.data.labels import IGNORED
from titan_loop.data.load.text_stream import StreamTokenizer, TextStreamLoader
from titan_loop.errors import UserError

L = 16

# `datasets` hashes what it is given with dill, which touches every name of torch.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


@pytest.fixture
def config(tmp_path: Path, small_tokenizer: Path) -> TextStreamLoader.Config:
    folder = tmp_path / "text"
    folder.mkdir()
    lines = [json.dumps({"text": f"document {n} says {n * n}"}) for n in range(40)]
    (folder / "part.jsonl").write_text("\n".join(lines))
    return TextStreamLoader.Config(dataset_path=str(folder), tokenizer=str(small_tokenizer))


def build(config: TextStreamLoader.Config) -> TextStreamLoader:
    return config.build(dp_world_size=1, dp_rank=0, seq_len=L, local_batch_size=2)


def test_it_streams_documents_in_order(
    config: TextStreamLoader.Config, small_tokenizer: Path
) -> None:
    loader = build(config)
    batches = loader.read_step(4) + loader.read_step(2)
    assert [tuple(labels.shape) for _, labels in batches] == [(2, L)] * 3
    assert loader.windows_consumed == 6
    tokenizer = StreamTokenizer(str(small_tokenizer), "<|endoftext|>")
    stream: list[int] = []
    for number in range(40):
        # Inputs are a document without its EOS, which is only ever a label.
        stream += tokenizer.encode(f"document {number} says {number**2}", add_eos=False)
    read = torch.cat([inputs["input"].flatten() for inputs, _ in batches]).tolist()
    assert read == stream[: 6 * L]
    labels = torch.cat([labels.flatten() for _, labels in batches]).numpy()
    assert (labels == tokenizer.eos_id).any()
    assert not (labels == IGNORED).any()
    positions = torch.cat([inputs["positions"].flatten() for inputs, _ in batches]).numpy()
    assert (np.diff(positions)[np.diff(positions) != 1] <= 0).all()


def test_it_says_what_it_cannot_guarantee(
    config: TextStreamLoader.Config, caplog: pytest.LogCaptureFixture
) -> None:
    loader = build(config)
    with caplog.at_level(logging.WARNING):
        loader.log_sources(100)
    assert "resuming starts the text again" in caplog.text
    before = loader.data_hash
    first = loader.read_step(2)
    assert loader.data_hash == before
    resumed = build(config)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert resumed.windows_consumed == 2
    again = resumed.read_step(2)
    assert torch.equal(first[0][0]["input"], again[0][0]["input"])


def test_vocabulary_and_mistakes(config: TextStreamLoader.Config, small_tokenizer: Path) -> None:
    assert config.vocabulary()[:2] == (300, 299)
    assert config.source_paths() == []
    with pytest.raises(UserError, match=r"eos_token=</s> is not in the tokenizer"):
        StreamTokenizer(str(small_tokenizer), "</s>")
    for path in ("s3://bucket/text", None):
        with pytest.raises(UserError, match=r"dataset_path=.* must be a local folder"):
            build(TextStreamLoader.Config(dataset_path=path))
    with pytest.raises(UserError, match=r"dataset_path=/missing is not a folder"):
        build(TextStreamLoader.Config(dataset_path="/missing"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x"}', r"^\S+/text: a record has no text in its field 'text', only body: set"),
        ('{"text": null}', r"^\S+/text: a record has no text in its field 'text', only text: set"),
        ('{"text": "cut', r"dataset_path=.*/text cannot be read \(.+\): repair its files"),
        (None, r"dataset_path=.*/text cannot be read \(.+\): repair its files"),
    ],
)
def test_text_that_cannot_be_read_is_named(
    config: TextStreamLoader.Config, line: str | None, message: str
) -> None:
    assert config.dataset_path is not None
    part = Path(config.dataset_path) / "part.jsonl"
    if line is None:
        part.unlink()
    else:
        part.write_text(f"{line}\n")
    loader = build(config)
    with pytest.raises(UserError, match=message) as refused:
        loader.read_step(2)
    assert "\n" not in str(refused.value)
    assert loader.windows_consumed == 0
