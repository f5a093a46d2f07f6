"""Checkpoints tensor by tensor: the same content as DCP's, in the memory of one tensor."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.state_dict_loader import load

from titan_loop.checkpoint.choosing import newest_good
from titan_loop.checkpoint.manifest import read_manifest
from titan_loop.checkpoint.model import load_model
from titan_loop.checkpoint.tensors import CheckpointReader, LazyTensor, write_checkpoint
from titan_loop.errors import RunFailedError, UserError
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.family import build_decoder
from titan_loop.storage import transient

CONTENT: dict[str, Any] = {
    "step": 3,
    "trainer": {"step": 3, "tokens": 24, "recurrent_steps": 4, "architecture": {}},
    "data": {},
    "lineage": {},
}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "layers.0.w": torch.randn(8, 6, generator=generator),
        "layers.1.w": torch.randn(4, 2, 6, generator=generator).bfloat16(),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "optimizer.state.layers.0.w.step": torch.tensor(7, dtype=torch.int64),
    }


OBJECTS = {"optimizer.param_groups.layers.0.w.betas": (0.9, 0.95), "text": "plain"}


def written(folder: Path) -> Path:
    checkpoint = folder / "step-3"
    entries = {
        key: LazyTensor(tuple(tensor.shape), tensor.dtype, lambda tensor=tensor: tensor)
        for key, tensor in tensors().items()
    }
    write_checkpoint(checkpoint, {**entries, **OBJECTS}, CONTENT)
    return checkpoint


def test_what_is_written_is_read(tmp_path):
    reader = CheckpointReader(written(tmp_path))
    assert reader.tensor_keys() == sorted(tensors())
    assert reader.keys() == sorted([*tensors(), *OBJECTS])
    for key, tensor in tensors().items():
        assert (reader.shape(key), reader.dtype(key)) == (tensor.shape, tensor.dtype)
        torch.testing.assert_close(reader.read(key), tensor, rtol=0, atol=0)
    assert {key: reader.read_object(key) for key in OBJECTS} == OBJECTS
    assert reader.manifest["step"] == 3
    assert newest_good(tmp_path, look_at="hashes") == (3, read_manifest(tmp_path / "step-3"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_stock_dcp_reads_what_is_written(tmp_path):
    state: dict[str, Any] = {key: torch.zeros_like(tensor) for key, tensor in tensors().items()}
    state |= dict.fromkeys(OBJECTS)
    load(state, checkpoint_id=written(tmp_path), no_dist=True)
    assert {key: state.pop(key) for key in OBJECTS} == OBJECTS
    torch.testing.assert_close(state, tensors(), rtol=0, atol=0)


@pytest.mark.parametrize("made", [torch.zeros(4), torch.zeros(3, dtype=torch.float64)])
def test_another_tensor_than_announced_leaves_nothing(tmp_path, made):
    entries = {"first": torch.zeros(2), "w": LazyTensor((3,), torch.float32, lambda: made)}
    with pytest.raises(ValueError, match=r"w was announced as torch.float32 \[3\]"):
        write_checkpoint(tmp_path / "new", entries, CONTENT)
    assert not (tmp_path / "new").exists()


def test_a_committed_checkpoint_is_not_overwritten(tmp_path):
    checkpoint = written(tmp_path)
    with pytest.raises(UserError, match="already holds a checkpoint"):
        write_checkpoint(checkpoint, {}, CONTENT)
    (checkpoint / "manifest.json").unlink()
    (checkpoint / "__7_0.distcp").write_bytes(b"of another attempt")
    written(tmp_path)
    assert not (checkpoint / "__7_0.distcp").exists()


def test_a_model_is_loaded_strictly(tmp_path):
    options = OuroOptions(size="debugmodel", attention="sdpa")
    torch.manual_seed(1)
    saved = build_decoder(options, max_seq_len=32).state_dict()
    entries: dict[str, Any] = {**saved, "optimizer.state.x.step": torch.tensor(1.0)}
    write_checkpoint(tmp_path / "model", entries, CONTENT)
    loaded = load_model(tmp_path / "model", OuroOptions(), max_seq_len=32).state_dict()
    torch.testing.assert_close(loaded, saved, rtol=0, atol=0)

    first = next(iter(saved))
    write_checkpoint(tmp_path / "less", {k: v for k, v in saved.items() if k != first}, CONTENT)
    with pytest.raises(UserError, match=f"1 entries are missing: {first}"):
        load_model(tmp_path / "less", OuroOptions(), max_seq_len=32)
    write_checkpoint(tmp_path / "more", {**saved, "adapter.w": torch.zeros(1)}, CONTENT)
    with pytest.raises(UserError, match=r"1 entries are not wanted: adapter\.w"):
        load_model(tmp_path / "more", OuroOptions(), max_seq_len=32)


@pytest.mark.parametrize("faults", [2, 100])
def test_a_disk_that_fails_for_a_moment_fails_no_read(tmp_path, monkeypatch, faults):
    reader = CheckpointReader(written(tmp_path))
    real, left = filesystem.FileSystemReader.read_data, [errno.EIO] * faults

    def flaky(*arguments):
        if left:
            raise OSError(fault := left.pop(), os.strerror(fault))
        return real(*arguments)

    monkeypatch.setattr(filesystem.FileSystemReader, "read_data", flaky)
    if faults > transient.ATTEMPTS:
        with pytest.raises(RunFailedError, match=r"cannot be read \(Input/output error\)"):
            reader.read("scalar")
    else:
        assert reader.read("scalar") == 2.5
