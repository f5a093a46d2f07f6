"""A committed checkpoint of N layers becomes one of k·N layers, with k copies of every layer.

    stacked       0 1 … N-1  0 1 … N-1   R/k steps visit layers in the order in which R steps did
    interleaved   0 0 1 1 … N-1 N-1      every layer is visited k times in a row

Embedding, head, norm, gate, their moments, the counters and the position in the data are copied
unchanged, and so are layers outside the loop (prelude and coda). One tensor is in memory at a time.
UPCYCLING.md explains the effect on the model's outputs and the treatment of the moments.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from titan_loop.checkpoint.manifest import reference
from titan_loop.checkpoint.tensors import CheckpointReader, LazyTensor, write_checkpoint
from titan_loop.errors import UserError, nearest

Mode = Literal["stacked", "interleaved"]
Moments = Literal["duplicate", "scale", "reset"]

_LAYER = re.compile(r"(?P<before>^|.*\.)layers\.(?P<index>\d+)\.(?P<after>.*)")
_STATE = "optimizer.state."


@dataclass(frozen=True, slots=True)
class Upcycling:
    """A way to give a model more layers."""

    n_layers: int
    """Layers of the new model; of those that are looped a multiple of the old one's."""

    mode: Mode = "stacked"
    """The whole stack again and again, or every layer next to its copies."""

    moments: Moments = "scale"
    """AdamW's and Muon's moments of the copies: as they are, divided by the number of copies, or
    zero with a new bias correction. Parameters outside the layers keep theirs."""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("mode", self.mode, get_args(Mode)),
            ("moments", self.moments, get_args(Moments)),
        ):
            if value not in known:
                raise UserError(f"upcycling {name}={value} is unknown{nearest(value, known)}")

    def sources(self, architecture: Mapping[str, Any]) -> list[int]:
        """Return the old layer of every new one; the looped ones must be k·N, k ≥ 2."""
        n_layers, looped = architecture["n_layers"], looped_layers(architecture)
        outside = n_layers - len(looped)
        copies, rest = divmod(self.n_layers - outside, len(looped))
        if rest or copies < 2:
            beside = f" beside {outside} outside the loop" if outside else ""
            raise UserError(
                f"layers={self.n_layers} is not a multiple of the checkpoint's {len(looped)} "
                f"layers{beside}; use {outside + 2 * len(looped)}, {outside + 3 * len(looped)} or "
                "more"
            )
        copied = [*looped] * copies
        if self.mode == "interleaved":
            copied.sort()
        return [*range(looped.start), *copied, *range(looped.stop, n_layers)]


def looped_layers(architecture: Mapping[str, Any]) -> range:
    """Return the layers that every recurrent step applies."""
    coda = architecture.get("coda_layers", 0)
    return range(architecture.get("prelude_layers", 0), architecture["n_layers"] - coda)


def upcycle_checkpoint(source: Path, target: Path, upcycling: Upcycling) -> None:
    """Write and commit the upcycled copy of a committed checkpoint.

    Memory: the largest tensor twice, as read from the file and as a tensor, whatever their number.

    The new manifest is the old one with the new number of layers in its architecture, `source` as
    `lineage.parent` and, as `lineage.upcycled`, `mode`, `moments` (None without optimiser state),
    `n_layers` of the parent and `layers`: the parent's layer for every new one. It ends no stage.
    """
    reader = CheckpointReader(source)
    keys = reader.keys()
    n_layers = _count_layers(reader, keys)
    layers = upcycling.sources(reader.manifest["trainer"]["architecture"])
    has_moments = any(key.startswith(_STATE) for key in keys)
    entries: dict[str, Any] = {}
    tensors = set(reader.tensor_keys())
    for key in keys:
        if key not in tensors:
            value = reader.read_object(key)
            entries.update(dict.fromkeys(_new_names(key, layers), value))
            continue
        shape, dtype = tuple(reader.shape(key)), reader.dtype(key)
        change = _change(key, upcycling.moments, layers)
        for name in _new_names(key, layers):
            produce = partial(_produce, reader, key, change)
            entries[name] = LazyTensor(shape, dtype, produce)
    manifest = reader.manifest
    content = {
        "step": manifest["step"],
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "stage_end": False,
        "trainer": {
            **manifest["trainer"],
            "architecture": {**manifest["trainer"]["architecture"], "n_layers": len(layers)},
        },
        "data": manifest["data"],
        "lineage": {
            **manifest["lineage"],
            "parent": reference(source),
            "upcycled": {
                "mode": upcycling.mode,
                "moments": upcycling.moments if has_moments else None,
                "n_layers": n_layers,
                "layers": layers,
            },
        },
    }
    write_checkpoint(target, entries, content)


def _count_layers(reader: CheckpointReader, keys: Sequence[str]) -> int:
    """Return N, on which weights and manifest must agree."""
    found = {int(match["index"]) for key in keys if (match := _LAYER.fullmatch(key))}
    stated = reader.manifest["trainer"].get("architecture", {}).get("n_layers")
    if not found or found != set(range(len(found))) or len(found) != stated:
        raise UserError(
            f"{reader.checkpoint} is of another architecture: its manifest says "
            f"n_layers={stated} and it holds the layers {sorted(found) or 'none'}; upcycling needs "
            "a looped decoder's checkpoint"
        )
    return len(found)


def _new_names(key: str, layers: Sequence[int]) -> list[str]:
    """Return the names an entry gets: one for each copy of its layer, else its own."""
    match = _LAYER.fullmatch(key)
    if match is None:
        return [key]
    return [
        f"{match['before']}layers.{new}.{match['after']}"
        for new, old in enumerate(layers)
        if old == int(match["index"])
    ]


def _change(key: str, moments: Moments, layers: Sequence[int]) -> Callable[[Tensor], Tensor]:
    match = _LAYER.fullmatch(key)
    if not key.startswith(_STATE) or match is None or moments == "duplicate":
        return _keep
    copies = layers.count(int(match["index"]))
    if copies == 1:
        return _keep
    if moments == "reset":
        return torch.zero_
    field = key.rpartition(".")[2]
    if field == "step":
        return _keep
    if field in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
        return partial(Tensor.div_, other=copies)
    raise UserError(
        f"upcycling moments=scale knows the moments of AdamW and Muon, not {key}; use duplicate or "
        "reset"
    )


def _produce(reader: CheckpointReader, key: str, change: Callable[[Tensor], Tensor]) -> Tensor:
    return change(reader.read(key))


def _keep(tensor: Tensor) -> Tensor:
    return tensor
