"""A committed checkpoint of N layers becomes one of k·N layers, with k copies of every layer.

    stacked       0 1 … N-1  0 1 … N-1   R/k steps visit layers in the order in which R steps did
    interleaved   0 0 1 1 … N-1 N-1      every layer is visited k times in a row

Embedding, head, norm, gate, their moments, the counters and the position in the data are copied
unchanged, and so are layers outside the loop (prelude and coda). One tensor is in memory at a time.
UPCYCLING.md explains the effect on the model's outputs and the treatment of the moments.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from titan_loop.checkpoint.manifest import new_content, reference
from titan_loop.checkpoint.tensors import CheckpointReader, LazyTensor, write_checkpoint
from titan_loop.errors import UserError

Mode = Literal["stacked", "interleaved"]
Moments = Literal["duplicate", "scale", "reset"]

_LAYER = re.compile(r"(?P<before>^|.*\.)layers\.(?P<index>\d+)\.(?P<after>.*)")
_STATE = "optimizer.state."


@dataclass(frozen=True, slots=True)
class Upcycling:
    """A way to give a model more layers.

    Attributes:
        n_layers: Layers of the new model. The looped ones are a multiple of the old model's.
        mode: Repeat the whole stack, or put every layer next to its copies.
        moments: The optimiser's moments of the copies: as they are, divided by the number of
            copies, or zero with a new bias correction. Parameters outside the layers keep theirs.
    """

    n_layers: int
    mode: Mode = "stacked"
    moments: Moments = "scale"

    def sources(self, architecture: Mapping[str, Any]) -> list[int]:
        """Return each new layer's old one; raise `UserError` unless the loop grows k ≥ 2 times."""
        if scale := architecture.get("branch_scale"):
            raise UserError(
                f"model.branch_scale={scale} gives branches a factor that depends on the number of "
                "layers, so copies would compute another function; only a model with 0.0 can grow"
            )
        n_layers, looped = architecture["n_layers"], looped_layers(architecture)
        outside = n_layers - len(looped)
        copies, rest = divmod(self.n_layers - outside, len(looped))
        if rest or copies < 2:
            beside = f" beside {outside} outside the loop" if outside else ""
            raise UserError(
                f"layers={self.n_layers} does not repeat the checkpoint's {len(looped)} layers "
                f"two or more whole times{beside}; use {outside + 2 * len(looped)}, "
                f"{outside + 3 * len(looped)} or more"
            )
        copied = [*looped] * copies
        if self.mode == "interleaved":
            copied.sort()
        return [*range(looped.start), *copied, *range(looped.stop, n_layers)]


def looped_layers(architecture: Mapping[str, Any]) -> range:
    """Return the layers that every recurrent step applies."""
    coda = architecture.get("coda_layers", 0)
    return range(architecture.get("prelude_layers", 0), architecture["n_layers"] - coda)


def with_layers(options: Mapping[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """Return a model's options with copies of `layers`, also where an option lists layers."""
    lists = {
        name: [new for new, old in enumerate(layers) if old in value]
        for name, value in options.items()
        if name.endswith("_layers") and isinstance(value, list | tuple)
    }
    return {**options, **lists, "n_layers": len(layers)}


def upcycle_checkpoint(source: Path, target: Path, upcycling: Upcycling) -> None:
    """Write and commit the upcycled copy of a committed checkpoint; the copy ends no stage.

    The largest tensor is in memory twice: as bytes of the file, and as a tensor.

    In the new manifest, `lineage.parent` is `source`. `lineage.upcycled` has `mode`, `moments`
    (None without optimiser state), the parent's `n_layers` and, for every new layer, the parent's
    (`layers`).
    """
    reader = CheckpointReader(source)
    keys, tensors, manifest = reader.keys(), set(reader.tensor_keys()), reader.manifest
    n_layers = _count_layers(reader, keys)
    architecture = manifest["trainer"]["architecture"]
    layers = upcycling.sources(architecture)
    entries: dict[str, Any] = {}
    for key in keys:
        copies = _copies(key, layers)
        if key not in tensors:
            entries.update(dict.fromkeys(copies, reader.read_object(key)))
            continue
        shape, produce = reader.shape(key), partial(reader.read, key)
        # A state that is not a single number, such as a count of steps, averages gradients; a layer
        # of k copies had the sum of theirs.
        if len(copies) > 1 and key.startswith(_STATE):
            if upcycling.moments == "reset":
                produce = partial(torch.zeros, shape, dtype=reader.dtype(key))
            elif upcycling.moments == "scale" and len(shape):
                produce = partial(_shared_out, reader, key, len(copies))
        entry = LazyTensor(shape, reader.dtype(key), produce)
        entries.update(dict.fromkeys(copies, entry))
    has_moments = any(key.startswith(_STATE) for key in keys)
    upcycled = {
        "mode": upcycling.mode,
        "moments": upcycling.moments if has_moments else None,
        "n_layers": n_layers,
        "layers": layers,
    }
    content = new_content(
        manifest["step"],
        {**manifest["trainer"], "architecture": with_layers(architecture, layers)},
        stage_end=False,
        data=manifest["data"],
        lineage={**manifest["lineage"], "parent": reference(source), "upcycled": upcycled},
    )
    # A pipeline's position. Not the answers of a reward stage: another model wrote them.
    copied = [source / name for name in manifest["files"] if name.startswith("pipeline_")]
    write_checkpoint(target, entries, content, copied=copied)


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


def _copies(key: str, layers: Sequence[int]) -> list[str]:
    """Return an entry's new names: one for each copy of its layer, or the old one."""
    match = _LAYER.fullmatch(key)
    if match is None:
        return [key]
    return [
        f"{match['before']}layers.{new}.{match['after']}"
        for new, old in enumerate(layers)
        if old == int(match["index"])
    ]


def _shared_out(reader: CheckpointReader, key: str, copies: int) -> Tensor:
    return reader.read(key).div_(copies)
