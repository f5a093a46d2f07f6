"""Which checkpoint is chosen: the newest whole one, named reasons for the others."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.small_checkpoint import flip_a_bit
from titan_loop.checkpoint import choosing, manifest
from titan_loop.checkpoint.choosing import inspect, newest_good
from titan_loop.checkpoint.manifest import MANIFEST, file_records, read_manifest, write_manifest
from titan_loop.errors import RunFailedError, UserError

TRAINER = {"step": 1, "tokens": 8, "recurrent_steps": 4, "architecture": {}}


def committed(folder: Path, step: int) -> Path:
    checkpoint = folder / f"step-{step}"
    checkpoint.mkdir(parents=True)
    for name in (".metadata", "tensors.json", "__0_0.distcp", "__1_0.distcp"):
        (checkpoint / name).write_bytes(f"{name} of step {step}".encode() * 100)
    content = {"step": step, "trainer": TRAINER, "data": {}, "lineage": {}}
    write_manifest(checkpoint, {**content, "files": file_records(checkpoint)})
    return checkpoint


def test_what_was_never_committed_does_not_count(tmp_path, caplog):
    assert newest_good(tmp_path / "missing") is None
    (tmp_path / "step-3").mkdir()
    assert newest_good(tmp_path) is None
    assert "step-3: its save never finished" in caplog.text
    caplog.clear()
    for step in (4, 10, 6):
        committed(tmp_path, step)
    found = newest_good(tmp_path, look_at="hashes")
    assert found == (10, read_manifest(tmp_path / "step-10"))
    assert not caplog.text  # an older save that never finished is not worth a warning


@pytest.mark.parametrize(
    ("name", "harm", "reason"),
    [
        ("__1_0.distcp", lambda path: path.write_bytes(b"x"), "has 1 bytes instead of"),
        (".metadata", lambda path: path.unlink(), "is missing"),
        ("__1_0.distcp", flip_a_bit, "has a different SHA-256"),
    ],
    ids=["truncated", "missing", "bit-flipped"],
)
def test_a_damaged_file_is_named_and_the_older_one_chosen(tmp_path, caplog, name, harm, reason):
    committed(tmp_path, 2)
    harm(committed(tmp_path, 4) / name)
    found = newest_good(tmp_path, look_at="hashes")
    assert found is not None
    assert found[0] == 2
    assert f"Skipping checkpoint step-4: {name}" in caplog.text
    assert reason in caplog.text


def content(**wrong: object) -> Callable[[Path], object]:
    """Give a manifest other content, with a hash that fits."""
    return lambda path: write_manifest(path.parent, {**read_manifest(path.parent), **wrong})


def text(value: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(value, encoding="latin-1")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (text("{ torn"), "manifest.json: "),
        (text('{"format_version": 2, "step": 4}'), "it has a different SHA-256"),
        (lambda path: path.write_text(path.read_text().replace('"step": 4', '"step": 5')),
         "it has a different SHA-256 than when it was written"),
        (lambda path: path.parent.rename(path.parent.with_name("step-40")), "belongs to step 4"),
        (content(step="4"), "step='4' is not an integer of at least 0"),
        (content(trainer={**TRAINER, "tokens": 1e9}), "trainer.tokens=1000000000.0 is not an"),
        (content(lineage={"origin": ["step-2"]}), "lineage.origin is not a path and a hash"),
        (content(best={"step": "2", "held_out_loss": 1.0}), "is not a step with its loss"),
        (content(files={"a": 5}), "a has no size and hash"),
        (content(files={"../a": {"bytes": 1, "sha256": ""}}), "is not the name of a file"),
    ],
)  # fmt: skip
def test_whatever_is_wrong_with_a_manifest_an_older_checkpoint_is_used(
    tmp_path, caplog, spoil, reason
):
    committed(tmp_path, 2)
    spoil(committed(tmp_path, 4) / MANIFEST)
    found = newest_good(tmp_path, look_at="manifest")
    assert found is not None
    assert found[0] == 2
    assert reason in caplog.text


def test_what_another_version_wrote_stops_the_run(tmp_path):
    """It is not damage: renaming and repeating its steps would throw work away."""
    committed(tmp_path, 2)
    (committed(tmp_path, 4) / MANIFEST).write_text('{"format_version": 99}')
    with pytest.raises(UserError, match="format version 99, this titan_loop reads 2"):
        newest_good(tmp_path)


def test_what_cannot_be_read_stops_the_run(tmp_path, monkeypatch):
    committed(tmp_path, 2)
    committed(tmp_path, 4)

    def fail(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(manifest, "_record", fail)
    with pytest.raises(RunFailedError, match=r"cannot be read \(Input/output error\); check its"):
        newest_good(tmp_path, look_at="hashes")


def test_a_file_read_short_is_read_again(tmp_path, monkeypatch):
    committed(tmp_path, 2)
    digest, calls = hashlib.file_digest, []

    def short_once(file, name):
        calls.append(1)
        if len(calls) == 1:
            file.read(10)
            return hashlib.new(name, b"")
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", short_once)
    assert newest_good(tmp_path, look_at="hashes") is not None


def test_if_none_is_whole_it_stops_and_names_every_reason(tmp_path):
    (committed(tmp_path, 2) / ".metadata").unlink()
    (committed(tmp_path, 4) / MANIFEST).write_text("")
    with pytest.raises(UserError, match=r"no checkpoint in .* is usable") as caught:
        newest_good(tmp_path)
    message = str(caught.value)
    assert "step-4" in message
    assert ".metadata is missing" in message


def test_one_rank_s_stale_view_of_the_disk_gives_no_checkpoint_up(tmp_path, monkeypatch):
    """Two ranks, of which the second misses a file; rank 0 is this process."""
    checkpoint, name = committed(tmp_path, 4), "__1_0.distcp"
    monkeypatch.setattr(choosing, "place_in", lambda group: (0, 2))
    monkeypatch.setattr(choosing, "from_rank_zero", lambda group, look: look())
    stale = {name: f"{name} is missing"}
    monkeypatch.setattr(choosing, "from_all_ranks", lambda group, look: [look(), stale])
    with pytest.raises(RunFailedError, match=r"finds that __1_0\.distcp is missing, and rank 0"):
        inspect(checkpoint, "sizes")
    (checkpoint / name).unlink()
    assert inspect(checkpoint, "sizes") == (None, f"{name} is missing")
