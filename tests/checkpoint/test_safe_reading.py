"""Nothing in a checkpoint runs when it is read, and what is wrong with one is said in one line."""

import io
import os
import pathlib
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from titan_loop.checkpoint.loading import KeyPolicy, load_checkpoint
from titan_loop.checkpoint.manifest import DamagedCheckpointError
from titan_loop.checkpoint.safe_reading import read_metadata
from titan_loop.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Payload:
    """Creates a file where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self.marker}",)


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "weight": torch.randn(6, 4, generator=generator),
        "half": torch.randn(3, 5, generator=generator).bfloat16(),
        "last": torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "optimizer": {"param_groups": [{"lr": 0.25, "betas": (0.9, 0.95)}], "step": 7},
        "text": "plain",
    }


def zeros() -> dict[str, Any]:
    def empty(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: empty(item) for key, item in value.items()}
        if isinstance(value, list):
            return [empty(item) for item in value]
        return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None

    return empty(state())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "step-1"
    save(state(), checkpoint_id=path, no_dist=True)
    return path


def rewrite(checkpoint: Path, change: Callable[[dcp.Metadata], None]) -> None:
    path = checkpoint / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def assert_one_line(error: BaseException, *parts: str) -> None:
    assert "\n" not in str(error)
    for part in parts:
        assert part in str(error)


def test_whatever_dcp_writes_is_read_back(checkpoint):
    loaded = zeros()
    load_checkpoint(loaded, checkpoint, group=None)
    expected = state()
    for key in ("weight", "half", "last", "scalar"):
        assert torch.equal(loaded.pop(key), expected.pop(key)), key
    assert loaded == expected


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
    with pytest.raises(UserError, match="outside the checkpoint") as caught:
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


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes()[:100]),
        lambda path: path.write_bytes(b"\0" * path.stat().st_size),
    ],
    ids=["missing", "truncated", "zeroed"],
)
def test_a_damaged_shard_is_named(checkpoint, harm):
    harm(checkpoint / "__0_0.distcp")
    with pytest.raises(DamagedCheckpointError) as caught:
        load_checkpoint({"weight": torch.zeros(6, 4)}, checkpoint, group=None, policy=ANY_SAVED)
    assert_one_line(caught.value, "__0_0.distcp")


ANY_SAVED = KeyPolicy(ignore_saved=("*",))


def test_all_differences_of_keys_are_listed(checkpoint):
    wanted = zeros()
    del wanted["text"]
    wanted |= {"weight": torch.zeros(6, 5), **{f"new{i:02}": torch.zeros(1) for i in range(12)}}
    with pytest.raises(UserError) as caught:
        load_checkpoint(wanted, checkpoint, group=None)
    names = ", ".join(f"new{i:02}" for i in range(10))
    assert_one_line(
        caught.value,
        f"12 entries are missing: {names}, …;",
        "1 entries are not wanted: text",
        "1 tensors have another shape: weight is [6, 4] and should be [6, 5]",
    )


def test_a_tensor_where_an_object_was_saved_is_refused(checkpoint):
    with pytest.raises(UserError, match="text is no tensor and should be \\[3\\]"):
        load_checkpoint({**zeros(), "text": torch.zeros(3)}, checkpoint, group=None)


def test_a_policy_allows_what_it_names_and_says_so(checkpoint, caplog):
    caplog.set_level("INFO")
    wanted = {"weight": torch.zeros(6, 4), "exit_gate.bias": torch.ones(1)}
    policy = KeyPolicy(ignore_saved=("optimizer.*", "text", "[hls]*"), keep_initial=("exit_*",))
    load_checkpoint(wanted, checkpoint, group=None, policy=policy)
    assert torch.equal(wanted["weight"], state()["weight"])
    assert torch.equal(wanted["exit_gate.bias"], torch.ones(1))
    assert "1 entries are not in" in caplog.text
    assert "exit_gate.bias" in caplog.text
    with pytest.raises(UserError, match="1 entries are not wanted: text"):
        load_checkpoint(
            wanted,
            checkpoint,
            group=None,
            policy=replace(policy, ignore_saved=("optimizer.*", "[hls]*")),
        )


def sharded_state() -> dict[str, Any]:
    """Return model and optimiser under FSDP 2 and tensor parallelism 2, after one step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8, bias=False))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    model.set_gradient_divide_factor(1.0)  # pyright: ignore
    model.set_force_sum_reduction_for_comms(True)  # pyright: ignore
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return {
        **get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def full(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: full(item) for key, item in value.items()}
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def save_sharded(checkpoint: Path) -> dict[str, Any]:
    content = sharded_state()
    save(content, checkpoint_id=checkpoint)
    return full(content)


def load_on_all_ranks(checkpoint: Path) -> tuple[str, str]:
    group = dist.new_group(backend="gloo")
    wanted = sharded_state()
    try:
        load_checkpoint(wanted, checkpoint, group=group)
    except UserError as error:
        return type(error).__name__, str(error)
    return "loaded", ""


def test_all_ranks_refuse_together(gloo_pool, tmp_path):
    pool, checkpoint = gloo_pool(4), tmp_path / "step-1"
    expected = pool.run(save_sharded, checkpoint)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = {
            key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
            for key, value in expected.items()
            if key != "optimizer"
        }
        load_checkpoint(loaded, checkpoint, group=None, policy=KeyPolicy(("optimizer.*",)))
    for key, value in loaded.items():
        assert torch.equal(value, expected[key])
    assert pool.run(load_on_all_ranks, checkpoint) == [("loaded", "")] * 4

    # Only the ranks that read rank 3's file would notice by themselves.
    shard = checkpoint / "__3_0.distcp"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:100])
    kinds = pool.run(load_on_all_ranks, checkpoint)
    assert {kind for kind, _ in kinds} == {"DamagedCheckpointError"}
    assert all("__3_0.distcp" in text for _, text in kinds), kinds
    shard.write_bytes(whole)

    marker = tmp_path / "ran"
    rewrite(checkpoint, lambda metadata: setattr(metadata, "planner_data", Payload(marker)))
    kinds = pool.run(load_on_all_ranks, checkpoint)
    assert {kind for kind, _ in kinds} == {"UserError"}
    assert not marker.exists()
