"""Every kind of damage is named, and all of it in one run."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from titan_loop.cli.main import main
from titan_loop.data.inspect_source import verify_source
from titan_loop.data.prepare.packing import pack_source
from titan_loop.data.prepare.tokenize_source import tokenize_source
from titan_loop.data.shards import index_path
from titan_loop.data.source_card import SourceCard, index_paths
from titan_loop.errors import EXIT_OK, EXIT_USER_ERROR


@pytest.fixture(scope="module")
def made(small_tokenizer, tmp_path_factory) -> Path:
    """Return a source with two shards, one chat mask each, and a packed index."""
    chats = tmp_path_factory.mktemp("in")
    for name in "ab":
        (chats / f"{name}.jsonl").write_text('{"question": "12?", "answer": "3."}\n' * 3)
    out = chats / "source"
    tokenize_source(
        chats, output=out, tokenizer=small_tokenizer, chat=True, tasks=2, held_out_fraction=0
    )
    pack_source(out, seq_len=64)
    return out


@pytest.fixture
def source(made, tmp_path) -> Path:
    return shutil.copytree(made, tmp_path / "source")


def shard(source: Path, number: int) -> Path:
    return source / "train" / SourceCard.read(source).splits["train"].shards[number].file


def change(path: Path, at: int, value: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] = value
    path.write_bytes(bytes(content))


def test_every_fault_of_every_file_is_named(source):
    first, second = shard(source, 0), shard(source, 1)
    first.write_bytes(first.read_bytes()[:-2])
    index_path(second).unlink()
    mask = second.with_name(second.name + ".loss")
    change(mask, 0, 1)
    windows, pieces = index_paths(source / "train", 64)
    change(pieces, 0, 9)
    windows.write_bytes(windows.read_bytes() + bytes(8))
    change(source / "tokenizer.json", 10, ord(" "))
    faults = list(verify_source(source))
    assert [fault.partition(": ")[0] for fault in faults] == [
        str(path)
        for path in (source / "tokenizer.json", first, index_path(second), mask, windows, pieces)
    ]
    said = ["SHA-256", "bytes, the card says", "missing", "SHA-256", "bytes, the", "SHA-256"]
    assert all(message in fault for fault, message in zip(faults, said, strict=True))


def test_ids_document_ends_and_masks_are_looked_at(source):
    first, second = shard(source, 0), shard(source, 1)
    card = SourceCard.read(source)
    ids = np.fromfile(first, "<u2")
    ids[[0, 2]] = card.vocab_size + 5
    ids[1] = card.eos_id
    ids.tofile(first)
    change(second.with_name(second.name + ".loss"), 3, 7)
    faults = [fault for fault in verify_source(source) if "SHA-256" not in fault]
    assert len(faults) == 3
    assert "2 token ids outside the vocabulary of 300" in faults[0]
    assert "1 places where document ends and EOS id 0 disagree" in faults[1]
    assert "1 bytes are neither 0 nor 1" in faults[2]
    ends = np.fromfile(index_path(second), "<u8")
    ends[::-1].tofile(index_path(second))
    assert any("document ends do not ascend" in fault for fault in verify_source(source))


def test_turns_may_end_in_the_token_of_documents(small_tokenizer, tmp_path, caplog):
    (tmp_path / "a.jsonl").write_text('{"question": "12?", "answer": "3."}\n')
    options = {"tokenizer": small_tokenizer, "chat": True, "eos_token": "<|im_end|>"}
    tokenize_source(tmp_path, output=tmp_path / "out", held_out_fraction=0, **options)
    assert "EOS" not in caplog.text
    assert list(verify_source(tmp_path / "out")) == []


def test_the_verbs(source, capsys):
    assert main(["data", "verify", str(source)]) == EXIT_OK
    assert capsys.readouterr().out == f"{source}: sound\n"
    change(shard(source, 0), 0, 9)
    assert main(["data", "verify", str(source)]) == EXIT_USER_ERROR
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{shard(source, 0)}: SHA-256")
    assert "is damaged (faults: 1); restore" in captured.err
    change(shard(source, 0), 0, 1)
    assert main(["data", "show", str(source), "--count", "1"]) == EXIT_OK
    assert capsys.readouterr().out == (
        "--- document 0: 26 tokens from token 0 on, 3 targets\n"
        "<|im_start|>user\n12?<|im_end|>\n<|im_start|>assistant\n⟦3.<|im_end|>⟧\n<|endoftext|>\n"
    )
    assert main(["data", "pack", str(source), "--seq-len", "8"]) == EXIT_USER_ERROR
    assert "6 documents of 'train' have more than 8 + 1 tokens" in capsys.readouterr().err
    pack = ["data", "pack", str(source), "--seq-len", "8", "--long-documents", "split"]
    assert main(pack) == EXIT_OK
    assert [card.seq_len for card in SourceCard.read(source).splits["train"].packed] == [64, 8]
