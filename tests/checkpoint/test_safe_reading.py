"""Nothing in a checkpoint runs when it is read, and what is wrong with one is said in one line."""

import io
import os
import pathlib
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tests.checkpoint.small_checkpoint import Payload, assert_one_line, rewrite, state, zeros
from titan_loop.checkpoint.loading import load_checkpoint
from titan_loop.checkpoint.manifest import DamagedCheckpointError
from titan_loop.checkpoint.safe_reading import read_metadata
from titan_loop.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "step-1"
    save(state(), checkpoint_id=path, no_dist=True)
    return path


def test_metadata_equals_what_stock_dcp_reads(checkpoint):
    stock = pickle.loads((checkpoint / ".metadata").read_bytes())
    ours = read_metadata(checkpoint)
    assert ours.storage_meta == replace(stock.storage_meta, checkpoint_id=checkpoint)
    assert replace(ours, storage_meta=None) == replace(stock, storage_meta=None)


def test_a_payload_in_the_metadata_does_not_run(checkpoint, tmp_path):
    marker = tmp_path / "ran"
    rewrite(checkpoint, lambda metadata: setattr(metadata, "planner_data", Payload(marker)))
    with pytest.raises(UserError) as caught:
        load_checkpoint(zeros(), checkpoint, group=None)
    assert not marker.exists()
    assert not isinstance(caught.value, DamagedCheckpointError)
    assert_one_line(caught.value, str(checkpoint / ".metadata"), "'posix.system'", "do not use")
    load(zeros(), checkpoint_id=checkpoint, no_dist=True)
    assert marker.exists(), "stock DCP should have run it, or this test shows nothing"


def test_a_payload_in_a_byte_entry_does_not_run(tmp_path):
    marker, checkpoint = tmp_path / "ran", tmp_path / "step-1"
    save({**state(), "text": Payload(marker)}, checkpoint_id=checkpoint, no_dist=True)
    with pytest.raises(UserError) as caught:
        load_checkpoint(zeros(), checkpoint, group=None)
    assert not marker.exists()
    assert not isinstance(caught.value, DamagedCheckpointError)
    assert_one_line(caught.value, "entry 'text'", str(checkpoint), "do not use")
    load(zeros(), checkpoint_id=checkpoint, no_dist=True)
    assert marker.exists(), "stock DCP should have run it, or this test shows nothing"


def test_a_payload_in_a_tensor_does_not_run(checkpoint, tmp_path):
    marker, shard = tmp_path / "ran", checkpoint / "__0_0.distcp"
    content = io.BytesIO()
    torch.save(Payload(marker), content)

    def point_at_the_end(metadata: dcp.Metadata) -> None:
        (info,) = [info for index, info in metadata.storage_data.items() if index.fqn == "weight"]
        info.offset, info.length = shard.stat().st_size, len(content.getvalue())

    rewrite(checkpoint, point_at_the_end)
    with shard.open("ab") as file:
        file.write(content.getvalue())
    with pytest.raises(UserError) as caught:
        load_checkpoint(zeros(), checkpoint, group=None)
    assert not marker.exists()
    assert_one_line(caught.value, str(shard), "do not use")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("pathlib", "PosixPath"),
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.serialization", "_get_layout"),
    ],
)
def test_a_pickle_cannot_change_the_classes_it_names(checkpoint, module, name):
    # GLOBAL, then BUILD with the state (None, {"exists": True}): that of an object with slots.
    program = b"c" + f"{module}\n{name}\n".encode() + b"N}X\x06\x00\x00\x00exists\x88s\x86b."
    (checkpoint / ".metadata").write_bytes(b"\x80\x02" + program)
    with pytest.raises(DamagedCheckpointError, match="set on a class"):
        read_metadata(checkpoint)
    assert pathlib.PosixPath.exists is not True
    assert "exists" not in vars(dcp.Metadata)


def test_metadata_as_early_python_3_11_wrote_it(tmp_path, monkeypatch):
    """Its enumerations were pickled as a call of getattr; nothing else may be."""

    def reduce_by_name(self: Any, _: int) -> tuple[Any, ...]:
        return getattr, (type(self), self._name_)

    monkeypatch.setattr(dcp._MEM_FORMAT_ENCODING, "__reduce_ex__", reduce_by_name)
    save(state(), checkpoint_id=tmp_path / "step-1", no_dist=True)
    monkeypatch.undo()
    path = tmp_path / "step-1" / ".metadata"
    content = path.read_bytes()
    assert b"getattr" in content
    assert "weight" in read_metadata(tmp_path / "step-1").state_dict_metadata
    named = b"TORCH_CONTIGUOUS_FORMAT"
    path.write_bytes(content.replace(named, b"__class__".ljust(len(named), b"_")))
    with pytest.raises(DamagedCheckpointError):
        read_metadata(tmp_path / "step-1")
    program = b"cbuiltins\ngetattr\n(ctorch\nSize\nX\x07\x00\x00\x00__new__tR."
    path.write_bytes(b"\x80\x02" + program)
    with pytest.raises(DamagedCheckpointError, match=r"attribute __new__ of .* is read"):
        read_metadata(tmp_path / "step-1")


def nested_key() -> bytes:
    """A dictionary whose key is a tuple in a tuple, a million deep: hashing it overflows C."""
    return b"\x80\x02}N" + b"\x85" * 1_000_000 + b"Ns."


def shared_key() -> bytes:
    """A dictionary whose key takes 2^60 steps to hash: each tuple holds the last one twice."""
    twice = b"".join(b"q" + bytes([n]) + b"h" + bytes([n]) + b"\x86" for n in range(60))
    return b"\x80\x02}N" + twice + b"Ns."


def shared_later() -> bytes:
    """Lists that are put into each other while empty, and filled afterwards."""
    empty = b"".join(b"]q" + bytes([n]) for n in range(60))
    fill = b"".join(b"h%ch%ca" % (n, n - 1) * 2 for n in range(1, 60))
    return b"\x80\x02" + empty + fill + b"."


PROGRAMS = {
    "nested": (nested_key(), "a value of more than"),
    "shared": (shared_key(), "a value of more than"),
    "shared later": (shared_later(), "a value holds itself"),
    "far memo": (b"\x80\x02Nr\xff\xff\xff\x7f.", "memo 2147483647 at byte 3"),
    "long frame": (b"\x80\x04\x95" + b"\xff" * 7 + b"\x7fN.", "not DCP's metadata"),
    "long text": (b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7fN.", "not DCP's metadata"),
    "duplicates": (b"\x80\x02N2\x86.", "DUP in plain records"),
}


@pytest.mark.parametrize(("program", "reason"), PROGRAMS.values(), ids=PROGRAMS)
def test_metadata_that_would_crash_or_hang_the_unpickler_is_damage(checkpoint, program, reason):
    (checkpoint / ".metadata").write_bytes(program)
    with pytest.raises(DamagedCheckpointError, match=reason):
        read_metadata(checkpoint)


@pytest.mark.parametrize("program", [nested_key(), shared_key()], ids=["nested", "shared"])
def test_an_entry_that_would_crash_or_hang_the_unpickler_is_damage(checkpoint, program):
    shard = checkpoint / "__0_0.distcp"
    archive = torch._C.PyTorchFileWriter(str(checkpoint / "made"))
    archive.write_record("data.pkl", program, len(program))
    archive.write_end_of_file()
    made = (checkpoint / "made").read_bytes()

    def point_at_the_end(metadata: dcp.Metadata) -> None:
        (info,) = [info for index, info in metadata.storage_data.items() if index.fqn == "text"]
        info.offset, info.length = shard.stat().st_size, len(made)

    rewrite(checkpoint, point_at_the_end)
    with shard.open("ab") as file:
        file.write(made)
    with pytest.raises(DamagedCheckpointError, match="'text' is garbled"):
        load_checkpoint(zeros(), checkpoint, group=None)


def test_a_fifo_is_damage(checkpoint):
    (checkpoint / ".metadata").unlink()
    os.mkfifo(checkpoint / ".metadata")
    with pytest.raises(DamagedCheckpointError, match="not a regular file"):
        read_metadata(checkpoint)


def resize(metadata: dcp.Metadata, size: int, stored: int | None = None) -> None:
    for index, info in metadata.storage_data.items():
        if index.fqn == "weight" and stored is not None:
            info.length = stored
    entry = metadata.state_dict_metadata["weight"]
    assert isinstance(entry, dcp.TensorStorageMetadata)
    entry.size = entry.chunks[0].sizes = torch.Size((size, 4))


def turn_to_text(metadata: dcp.Metadata) -> None:
    entry = metadata.state_dict_metadata["weight"]
    assert isinstance(entry, dcp.TensorStorageMetadata)
    entry.size = entry.chunks[0].sizes = (1 << 33, "a")  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    "change",
    [
        partial(resize, size=10**13),
        partial(resize, size=10**13, stored=10**15),
        partial(resize, size=-1),
        partial(resize, size=7),
        turn_to_text,
        lambda metadata: setattr(next(iter(metadata.storage_data.values())), "length", -1),
    ],
    ids=["huge", "huge by its length", "negative", "a row too many", "text", "stored length"],
)
def test_a_tensor_larger_than_what_is_stored_of_it_is_damage(checkpoint, change):
    rewrite(checkpoint, change)
    with pytest.raises(DamagedCheckpointError):
        read_metadata(checkpoint)


@pytest.mark.parametrize("where", ["../other/__0_0.distcp", "/etc/passwd", ".."])
def test_files_outside_the_checkpoint_are_refused(checkpoint, where):
    def point_outside(metadata: dcp.Metadata) -> None:
        next(iter(metadata.storage_data.values())).relative_path = where

    rewrite(checkpoint, point_outside)
    with pytest.raises(UserError, match="may lie outside of its folder") as caught:
        read_metadata(checkpoint)
    assert_one_line(caught.value)


def test_truncated_metadata_is_damage_wherever_it_ends(checkpoint):
    path = checkpoint / ".metadata"
    whole = path.read_bytes()
    for end in [*range(0, len(whole), 37), len(whole) - 1]:
        path.write_bytes(whole[:end])
        with pytest.raises(DamagedCheckpointError) as caught:
            read_metadata(checkpoint)
        assert_one_line(caught.value, str(path))


def test_flipped_bits_in_metadata_raise_nothing_but_user_errors(checkpoint):
    path = checkpoint / ".metadata"
    whole = path.read_bytes()
    refused = 0
    for place in range(0, len(whole), 5):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        try:
            read_metadata(checkpoint)
        except UserError as error:
            assert_one_line(error, str(path))
            refused += 1
    assert refused


def drop_a_chunk(metadata: dcp.Metadata) -> None:
    entry = metadata.state_dict_metadata["weight"]
    assert isinstance(entry, dcp.TensorStorageMetadata)
    entry.chunks.clear()


def drop_storage(metadata: dcp.Metadata) -> None:
    metadata.storage_data = {
        index: info for index, info in metadata.storage_data.items() if index.fqn != "weight"
    }


@pytest.mark.parametrize("change", [drop_a_chunk, drop_storage])
def test_a_tensor_with_holes_is_damage(checkpoint, change):
    rewrite(checkpoint, change)
    with pytest.raises(DamagedCheckpointError, match="weight is incomplete"):
        read_metadata(checkpoint)
