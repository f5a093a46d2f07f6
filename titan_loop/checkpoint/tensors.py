"""Checkpoints read and written tensor by tensor, in one process and without a process group.

    CheckpointReader    a committed checkpoint of any world size ─► one full tensor at a time
    write_checkpoint    tensors made one at a time ─► a committed checkpoint for any world size

Keys are DCP's flattened ones: the model's as in its `state_dict()`, the optimiser's as
"optimizer.state.<parameter>.exp_avg".
"""

import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titan_loop.checkpoint.folders import discard, is_committed
from titan_loop.checkpoint.loading import AVERAGE_PREFIX
from titan_loop.checkpoint.manifest import (
    DamagedCheckpointError,
    file_records,
    find_damage,
    read_manifest,
    write_manifest,
)
from titan_loop.checkpoint.safe_reading import PlainLoadPlanner, SafeFileSystemReader, root_cause
from titan_loop.checkpoint.tensor_table import TableWriter, read_table
from titan_loop.errors import UserError, nearest


class CheckpointReader:
    """The entries of a committed checkpoint, one at a time.

    Memory holds the tensor that is read and one of its shards. With `ema`, weights' averages are
    read under their names; frozen weights have none. Raises `UserError` if the checkpoint was never
    committed or `ema` finds no average, `DamagedCheckpointError` for a damaged file.
    """

    def __init__(self, checkpoint: Path, *, ema: bool = False) -> None:
        self.checkpoint = checkpoint
        self.manifest: dict[str, Any] = read_manifest(checkpoint)
        if damage := find_damage(checkpoint, self.manifest["files"]):
            raise DamagedCheckpointError(checkpoint, "; ".join(damage.values()))
        self.metadata: Metadata = read_table(checkpoint)
        self._files = SafeFileSystemReader(checkpoint, self.metadata)
        keys = self.metadata.state_dict_metadata if ema else {}
        self._averages = {
            key.removeprefix(AVERAGE_PREFIX): key for key in keys if key.startswith(AVERAGE_PREFIX)
        }
        if ema and not self._averages:
            raise UserError(
                f"{checkpoint} has no average of its weights; leave out --ema, or train with "
                "--ema.decay 0.999"
            )
        table = self._averages.get("tok_embeddings.weight")
        if table and self.manifest["trainer"]["architecture"].get("tie_weights"):
            self._averages.setdefault("lm_head.weight", table)

    def keys(self) -> list[str]:
        """Return the flattened keys of all entries, sorted."""
        return sorted(self.metadata.state_dict_metadata)

    def tensor_keys(self) -> list[str]:
        """Return the flattened keys of all tensors, sorted."""
        entries = self.metadata.state_dict_metadata
        return [key for key in self.keys() if isinstance(entries[key], TensorStorageMetadata)]

    def shape(self, key: str) -> torch.Size:
        """Return a tensor's global shape; raise `UserError` if there is no such tensor."""
        return self._tensor(key).size

    def dtype(self, key: str) -> torch.dtype:
        """Return a tensor's dtype; raise `UserError` if there is no such tensor."""
        return self._tensor(key).properties.dtype

    def read(self, key: str) -> Tensor:
        """Return a new full tensor, on the CPU, in the saved dtype; raises as `shape`."""
        target = torch.empty(self.shape(key), dtype=self.dtype(key), device="cpu")
        return self._read(self._averages.get(key, key), target)

    def read_object(self, key: str) -> Any:
        """Return the value of a byte entry; raise `UserError` unless it is there and plain data."""
        entries = self.metadata.state_dict_metadata
        if key not in entries or isinstance(entries[key], TensorStorageMetadata):
            objects = entries.keys() - set(self.tensor_keys())
            raise UserError(f"{self.checkpoint} has no object {key!r}{nearest(key, objects)}")
        return self._read(key, None)

    def _tensor(self, key: str) -> TensorStorageMetadata:
        entry = self.metadata.state_dict_metadata.get(self._averages.get(key, key))
        if not isinstance(entry, TensorStorageMetadata):
            raise UserError(
                f"{self.checkpoint} has no tensor {key!r}{nearest(key, self.tensor_keys())}"
            )
        return entry

    def _read(self, key: str, target: Tensor | None) -> Any:
        state_dict: dict[str, Any] = {key: target}
        planner = PlainLoadPlanner()
        planner.set_up_planner(state_dict, self.metadata)
        self._files.read_data(create_default_local_load_plan(state_dict, self.metadata), planner)
        return state_dict[key]


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that exists only while it is written: `produce` is called once, then it is freed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    produce: Callable[[], Tensor]


def write_checkpoint(
    checkpoint: Path,
    entries: Mapping[str, LazyTensor | Tensor | Any],
    content: Mapping[str, Any],
    *,
    copied: Sequence[Path] = (),
) -> None:
    """Write and commit a checkpoint, with one lazy tensor in memory at a time, or leave nothing.

    `entries` are tensors and plain values by flattened key, written in this order; `copied` are
    further files. Raises `UserError` if the folder already holds a checkpoint.
    """
    if is_committed(checkpoint):
        raise UserError(f"{checkpoint} already holds a checkpoint; delete it, or choose another")
    discard(checkpoint)
    announced = {
        key: torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        if isinstance(entry, LazyTensor)
        else entry
        for key, entry in entries.items()
    }
    try:
        with warnings.catch_warnings():
            # This process saves alone.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            save(
                announced,
                storage_writer=_OneByOneWriter(checkpoint),
                planner=_LazyPlanner(entries),
                no_dist=True,
            )
        for path in copied:
            shutil.copyfile(path, checkpoint / path.name)
        files = file_records(checkpoint, further=[path.name for path in copied])
        write_manifest(checkpoint, {**content, "files": files})
    except BaseException as error:
        with suppress(OSError):
            discard(checkpoint)
        if (cause := root_cause(error)) is error:
            raise
        raise cause from error


class _LazyPlanner(DefaultSavePlanner):
    """Plans with the announced shapes and produces each tensor only when it is written."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        super().__init__()
        self._entries = entries

    def lookup_object(self, index: MetadataIndex) -> Any:
        entry = self._entries.get(index.fqn)
        if not isinstance(entry, LazyTensor):
            return super().lookup_object(index)
        tensor = entry.produce()
        if tensor.shape != entry.shape or tensor.dtype != entry.dtype:
            raise ValueError(
                f"{index.fqn} was announced as {entry.dtype} {[*entry.shape]}, "
                f"but is {tensor.dtype} {[*tensor.shape]}"
            )
        return tensor


class _OneByOneWriter(TableWriter):
    # Torch 2.13's own writer keeps every tensor until its file is complete, although only its
    # safetensors format needs them.

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0{filesystem.DEFAULT_SUFFIX}"
        results = []
        with (Path(self.path) / name).open("wb") as file:
            for item in plan.items:
                start = file.tell()
                self._write(planner.resolve_data(item), file)
                info = filesystem._StorageInfo(name, start, file.tell() - start)
                results.append(WriteResult(item.index, info.length, info))
            file.flush()
            os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    @staticmethod
    def _write(data: Any, file: Any) -> None:
        if not isinstance(data, Tensor):
            file.write(data.getbuffer())
            return
        data = data.detach().cpu()
        if data.untyped_storage().nbytes() != data.nbytes:
            data = data.clone()  # torch.save writes the whole storage of a view
        torch.save(data, file)

    def storage_meta(self) -> StorageMeta:
        """Leave out the folder, which may be renamed."""
        return StorageMeta()
