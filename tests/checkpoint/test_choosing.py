"""Which checkpoint is chosen: the newest whole one, named reasons for the others."""

import errno
import hashlib
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

from titan_loop.checkpoint import choosing, manifest
from titan_loop.checkpoint.choosing import inspect, newest_good
from titan_loop.checkpoint.manifest import MANIFEST, file_records, read_manifest, write_manifest
from titan_loop.errors import RunFailedError, UserError
from titan_loop.storage import transient
from titan_loop.storage.regular_file import open_regular

TRAINER = {"step": 1, "tokens": 8, "recurrent_steps": 4, "architecture": {}}


def committed(folder: Path, step: int) -> Path:
    checkpoint = folder / f"step-{step}"
    checkpoint.mkdir(parents=True)
    for name in (".metadata", "tensors.json", "__0_0.distcp", "__1_0.distcp"):
        (checkpoint / name).write_bytes(f"{name} of step {step}".encode() * 100)
    content = {"step": step, "trainer": TRAINER, "data": {}, "lineage": {}}
    write_manifest(checkpoint, {**content, "files": file_records(checkpoint)})
    return checkpoint


def test_nothing_was_ever_committed(tmp_path, caplog):
    assert newest_good(tmp_path / "missing") is None
    (tmp_path / "step-3").mkdir()
    assert newest_good(tmp_path) is None
    assert "step-3: its save never finished" in caplog.text


def test_the_newest_whole_one_is_chosen_silently(tmp_path, caplog):
    for step in (2, 10, 4):
        committed(tmp_path, step)
    found = newest_good(tmp_path, look_at="hashes")
    assert found is not None
    assert found[0] == 10
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", [".metadata", "__1_0.distcp"])
@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes instead of"),
        (lambda path: path.unlink(), "is missing"),
        (flip_a_bit, "has a different SHA-256"),
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


def test_without_hashes_only_sizes_are_compared(tmp_path):
    checkpoint = committed(tmp_path, 2)
    flip_a_bit(checkpoint / ".metadata")
    assert inspect(checkpoint, "sizes")[0] is not None
    assert inspect(checkpoint, "hashes")[0] is None


@pytest.mark.parametrize(
    "text",
    ["", "{ torn", "[]", '{"format_version": 2, "step": 4}', "\xff"],
)
def test_a_damaged_manifest_does_not_commit_anything(tmp_path, caplog, text):
    committed(tmp_path, 2)
    (committed(tmp_path, 4) / MANIFEST).write_text(text, encoding="latin-1")
    found = newest_good(tmp_path)
    assert found is not None
    assert found[0] == 2
    assert "Skipping checkpoint step-4" in caplog.text


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_text('{"step":' * 100_000 + "1" + "}" * 100_000),
        lambda path: path.write_text('{"format_version": 2, "step": ' + "9" * 5000 + "}"),
        lambda path: path.write_text('{"format_version": 2, "step": "\\ud800"}'),
        loop,
        fifo,
    ],
    ids=["nested", "huge integer", "surrogate", "link loop", "FIFO"],
)
def test_whatever_is_wrong_with_a_manifest_an_older_checkpoint_is_used(tmp_path, caplog, spoil):
    committed(tmp_path, 2)
    spoil(committed(tmp_path, 4) / MANIFEST)
    found = newest_good(tmp_path)
    assert found is not None
    assert found[0] == 2
    assert "Skipping checkpoint step-4: manifest.json" in caplog.text


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"step": "4"}, "step='4' is not an integer of at least 0"),
        ({"trainer": 5}, "it has no trainer"),
        ({"trainer": {**TRAINER, "tokens": 1e9}}, "trainer.tokens=1000000000.0 is not an integer"),
        ({"trainer": {**TRAINER, "recurrent_steps": -4}}, "recurrent_steps=-4 is not an integer"),
        ({"trainer": {**TRAINER, "architecture": []}}, "it has no trainer.architecture"),
        ({"lineage": {"origin": ["step-2"]}}, "lineage.origin is not a path and a hash"),
        ({"files": None}, "it has no files"),
        ({"files": {"a": 5}}, "a has no size and hash"),
        ({"files": {"../a": {"bytes": 1, "sha256": ""}}}, "is not the name of a file"),
        ({"files": {"a\0": {"bytes": 1, "sha256": ""}}}, "is not the name of a file"),
    ],
    ids=str,
)
def test_a_hashed_manifest_with_wrong_content_is_damaged(tmp_path, caplog, wrong, reason):
    committed(tmp_path, 2)
    checkpoint = committed(tmp_path, 4)
    write_manifest(checkpoint, {**read_manifest(checkpoint), **wrong})
    found = newest_good(tmp_path)
    assert found is not None
    assert found[0] == 2
    assert reason in caplog.text


def test_a_digit_that_flips_in_the_manifest_is_found(tmp_path, caplog):
    committed(tmp_path, 2)
    manifest = committed(tmp_path, 4) / MANIFEST
    manifest.write_text(manifest.read_text().replace('"step": 4', '"step": 5'))
    found = newest_good(tmp_path, look_at="manifest")
    assert found is not None
    assert found[0] == 2
    assert "manifest.json: it has a different SHA-256 than when it was written" in caplog.text


def test_a_folder_that_was_renamed_is_not_another_step(tmp_path, caplog):
    committed(tmp_path, 2)
    committed(tmp_path, 4).rename(tmp_path / "step-40")
    found = newest_good(tmp_path)
    assert found is not None
    assert found[0] == 2
    assert "manifest.json belongs to step 4" in caplog.text


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


class FlakyOpen:
    """Stands in for a disk whose first reads fail, as that of a server that fails over."""

    def __init__(self, faults: list[int]) -> None:
        self.faults = list(faults)

    def __call__(self, *arguments, **keywords):
        if self.faults:
            raise OSError(fault := self.faults.pop(0), os.strerror(fault))
        return open_regular(*arguments, **keywords)


def test_a_read_that_fails_for_a_moment_is_tried_again_and_counted(tmp_path, monkeypatch, caplog):
    committed(tmp_path, 2)
    before = transient.retries()
    monkeypatch.setattr(
        manifest, "open_regular", FlakyOpen([errno.EIO, errno.ESTALE, errno.EIO, errno.EIO])
    )
    found = newest_good(tmp_path, look_at="hashes")
    assert found is not None
    assert transient.retries() == before + 4
    assert "Stale file handle (attempt 2 of 5)" in caplog.text


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


def newest_good_once_it_is_back(folder: Path, suspect: Path, content: bytes) -> int | None:
    """Choose a checkpoint while a file of the newest comes back between two looks."""
    back = folder / f"back_on_rank_{dist.get_rank()}"

    def come_back(_: float) -> None:  # at once: another rank may be reading it
        back.write_bytes(content)
        back.replace(suspect)

    with mock.patch.object(choosing, "time", SimpleNamespace(sleep=come_back)):
        found = newest_good(folder, look_at="hashes", group=dist.group.WORLD)
    return None if found is None else found[0]


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", [MANIFEST, ".metadata"])
def test_damage_that_a_second_look_does_not_see_is_none(gloo_pool, tmp_path, name):
    committed(tmp_path, 2)
    suspect = committed(tmp_path, 4) / name
    content = suspect.read_bytes()
    suspect.write_bytes(content[:-20])
    pool = gloo_pool(2)
    assert pool.run(newest_good_once_it_is_back, tmp_path, suspect, content) == [4, 4]


def newest_good_with_a_stale_rank(folder: Path, stays: bool) -> int | str:
    """Let rank 1 miss a file that is there, once or for good."""
    choosing.SECOND_LOOK_SECONDS = 0.0
    look, looks = choosing.find_damage, []

    def stale(checkpoint, records, *, hashes):
        looks.append(1)
        if dist.get_rank() == 1 and records and (stays or len(looks) == 1):
            return {name: f"{name} is missing" for name in records}
        return look(checkpoint, records, hashes=hashes)

    choosing.find_damage = stale
    try:
        found = newest_good(folder, look_at="hashes", group=dist.group.WORLD)
        assert found is not None
        return found[0]
    except RunFailedError as error:
        return str(error)
    finally:
        choosing.find_damage = look


@pytest.mark.multiprocess
def test_the_stale_view_of_one_node_sets_no_checkpoint_aside(gloo_pool, tmp_path):
    committed(tmp_path, 2)
    committed(tmp_path, 4)
    pool = gloo_pool(2)
    assert pool.run(newest_good_with_a_stale_rank, tmp_path, False) == [4, 4]
    for answer in pool.run(newest_good_with_a_stale_rank, tmp_path, True):
        assert "rank 1 finds that" in answer
        assert "rank 0 finds it whole" in answer


def test_if_none_is_whole_it_stops_and_names_every_reason(tmp_path):
    (committed(tmp_path, 2) / ".metadata").unlink()
    (committed(tmp_path, 4) / MANIFEST).write_text("")
    with pytest.raises(UserError, match=r"no checkpoint in .* is usable") as caught:
        newest_good(tmp_path)
    message = str(caught.value)
    assert "step-4" in message
    assert ".metadata is missing" in message
    assert "\n" not in message


def test_a_run_whose_checkpoints_were_all_renamed_does_not_start_from_scratch(tmp_path):
    committed(tmp_path, 6).rename(tmp_path / "step-006")
    with pytest.raises(UserError, match=r"only renamed checkpoints \(step-006\); rename each"):
        newest_good(tmp_path)
    committed(tmp_path, 2)
    found = newest_good(tmp_path)
    assert found is not None
    assert found[0] == 2


def test_an_unfinished_older_save_is_not_worth_a_warning(tmp_path, caplog):
    (tmp_path / "step-1").mkdir()
    committed(tmp_path, 2)
    assert newest_good(tmp_path) is not None
    assert "step-1" not in caplog.text


def test_the_manifest_comes_back_as_it_was_written(tmp_path):
    manifest = read_manifest(committed(tmp_path, 2))
    assert manifest["step"] == 2
    files = {"__0_0.distcp", "__1_0.distcp", ".metadata", "tensors.json"}
    assert manifest["files"].keys() == files
