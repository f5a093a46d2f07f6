"""The table of entries: what DCP described, checked, and written for checkpoints without one."""

import os
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp

from tests.checkpoint.small_checkpoint import (
    Payload,
    assert_one_line,
    rewrite,
    state,
    write,
    zeros,
)
from titan_loop.checkpoint.loading import load_checkpoint
from titan_loop.checkpoint.manifest import (
    TABLE,
    DamagedCheckpointError,
    file_records,
    read_manifest,
    write_manifest,
)
from titan_loop.checkpoint.tensor_table import convert_checkpoint, read_table
from titan_loop.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

TRAINER = {"step": 1, "tokens": 8, "recurrent_steps": 4, "architecture": {}}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write(tmp_path / "step-1")


def old_checkpoint(checkpoint: Path) -> Path:
    """Make of a checkpoint what versions without a table wrote."""
    content = {"step": 1, "trainer": TRAINER, "data": {}, "lineage": {}}
    files = file_records(checkpoint)
    del files[TABLE]
    (checkpoint / TABLE).unlink()
    write_manifest(checkpoint, {**content, "files": files})
    return checkpoint


def assert_equals_dcps(checkpoint: Path) -> None:
    stock, ours = pickle.loads((checkpoint / ".metadata").read_bytes()), read_table(checkpoint)
    assert ours.storage_data == stock.storage_data
    for key, entry in stock.state_dict_metadata.items():
        if isinstance(entry, dcp.TensorStorageMetadata):
            # Whatever else DCP notes, such as pinned memory, it calls deprecated.
            entry = replace(entry, properties=dcp.TensorProperties(dtype=entry.properties.dtype))
        assert ours.state_dict_metadata[key] == entry
    assert ours.state_dict_metadata.keys() == stock.state_dict_metadata.keys()


def test_the_table_says_what_dcps_own_metadata_says(checkpoint):
    assert_equals_dcps(checkpoint)


def test_a_checkpoint_of_an_older_version_is_converted_once_and_keeps_its_identity(checkpoint):
    manifest = read_manifest(old_checkpoint(checkpoint))
    with pytest.raises(UserError, match=f"titan-loop checkpoint convert {checkpoint}$") as caught:
        load_checkpoint(zeros(), checkpoint, group=None)
    assert not isinstance(caught.value, DamagedCheckpointError)
    assert convert_checkpoint(checkpoint)
    assert not convert_checkpoint(checkpoint)
    assert_equals_dcps(checkpoint)
    assert read_manifest(checkpoint) == manifest
    loaded = zeros()
    load_checkpoint(loaded, checkpoint, group=None)
    assert torch.equal(loaded["last"], state()["last"])


def test_metadata_as_early_python_3_11_wrote_it_is_converted(tmp_path, monkeypatch):
    """Its enumerations were pickled as a call of getattr."""

    def reduce_by_name(self: Any, _: int) -> tuple[Any, ...]:
        return getattr, (type(self), self._name_)

    monkeypatch.setattr(dcp._MEM_FORMAT_ENCODING, "__reduce_ex__", reduce_by_name)
    checkpoint = old_checkpoint(write(tmp_path / "step-1"))
    monkeypatch.undo()
    assert b"getattr" in (checkpoint / ".metadata").read_bytes()
    assert convert_checkpoint(checkpoint)
    assert_equals_dcps(checkpoint)


BUILD_ON_A_CLASS = b"\x80\x02cpathlib\nPosixPath\nN}X\x06\x00\x00\x00exists\x88s\x86b."


@pytest.mark.parametrize("kind", ["instead", "within", "on a class"])
def test_nothing_in_a_pickle_runs_when_it_is_converted(checkpoint, tmp_path, kind):
    marker, path = tmp_path / "ran", checkpoint / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.state_dict_metadata["weight"] = Payload(marker)
    programs = {
        "instead": pickle.dumps(Payload(marker)),
        "within": pickle.dumps(metadata),
        "on a class": BUILD_ON_A_CLASS,
    }
    path.write_bytes(programs[kind])
    old_checkpoint(checkpoint)
    with pytest.raises(DamagedCheckpointError, match="not DCP's metadata") as caught:
        convert_checkpoint(checkpoint)
    assert_one_line(caught.value)
    assert not marker.exists()
    assert not (checkpoint / TABLE).exists()
    assert Path.exists is not True
    pickle.loads(programs["instead"])
    assert marker.exists(), "pickle itself should have run it, or this test shows nothing"


def test_altered_metadata_is_not_converted(checkpoint):
    old_checkpoint(checkpoint)
    path = checkpoint / ".metadata"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpointError, match=r"\.metadata has .* bytes instead of"):
        convert_checkpoint(checkpoint)


def test_a_missing_table_and_a_fifo_are_damage(checkpoint):
    (checkpoint / TABLE).unlink()
    os.mkfifo(checkpoint / TABLE)
    with pytest.raises(DamagedCheckpointError, match="not a regular file"):
        read_table(checkpoint)
    (checkpoint / TABLE).unlink()
    (checkpoint / ".metadata").unlink()
    with pytest.raises(DamagedCheckpointError, match="it is missing"):
        read_table(checkpoint)


def resize(entries: dict[str, Any], rows: Any, stored: int | None = None) -> None:
    weight = entries["weight"]
    weight["shape"] = weight["chunks"][0][1] = [rows, 4]
    if stored is not None:
        weight["chunks"][0][4] = stored


@pytest.mark.parametrize(
    "change",
    [
        partial(resize, rows=10**13),
        partial(resize, rows=10**13, stored=10**15),
        partial(resize, rows=10**30),
        partial(resize, rows=-1),
        lambda entries: entries["weight"].update(shape=[7, 4]),
        partial(resize, rows="a"),
        partial(resize, rows=6, stored=-1),
        lambda entries: entries["weight"].update(shape=[1] * 70),
        lambda entries: entries["weight"].update(dtype="nn"),
        lambda entries: entries["weight"].update(dtype="float33"),
        lambda entries: entries["weight"].update(chunks=[]),
        lambda entries: entries["weight"].update(chunks=[None]),
        lambda entries: entries["weight"]["chunks"].extend(entries["weight"]["chunks"]),
        lambda entries: entries["text"].update(place=["__0_0.distcp", 0]),
        lambda entries: entries["text"].update(place=["manifest.json", 0, 1]),
        lambda entries: entries.update({"a\x1b[31m": entries["text"]}),
        lambda entries: entries.update(text=5),
    ],
)
def test_a_table_that_cannot_be_true_is_damage(checkpoint, change):
    rewrite(checkpoint, change)
    with pytest.raises(DamagedCheckpointError) as caught:
        read_table(checkpoint)
    assert_one_line(caught.value, str(checkpoint / TABLE))


@pytest.mark.parametrize("where", ["../other/__0_0.distcp", "/etc/passwd", ".."])
def test_files_outside_the_checkpoint_are_refused(checkpoint, where):
    rewrite(checkpoint, lambda entries: entries["text"]["place"].__setitem__(0, where))
    with pytest.raises(UserError, match="may lie outside its folder") as caught:
        read_table(checkpoint)
    assert_one_line(caught.value)


def test_a_damaged_table_is_damage_wherever_it_is_damaged(checkpoint):
    path = checkpoint / TABLE
    whole = path.read_bytes()
    flipped = [
        whole[:n] + bytes([whole[n] ^ 1 << n % 8]) + whole[n + 1 :] for n in range(0, len(whole), 5)
    ]
    cut = [whole[:end] for end in range(0, len(whole), 37)]
    for content in [b"", b"[" * 100_000, b"[]", *cut]:
        path.write_bytes(content)
        with pytest.raises(DamagedCheckpointError) as caught:
            read_table(checkpoint)
        assert_one_line(caught.value, str(path))
    for content in flipped:
        path.write_bytes(content)
        try:
            read_table(checkpoint)
        except DamagedCheckpointError as error:
            assert_one_line(error, str(path))
        else:
            raise AssertionError(f"{content} was read")
