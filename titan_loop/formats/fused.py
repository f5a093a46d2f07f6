"""Folders in which one tensor holds several matrices of a layer, one below another."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from titan_loop.checkpoint.safetensors_files import SafetensorsFolder
from titan_loop.formats.llama_shape import Read, Shapes


class FusedFolder(SafetensorsFolder):
    """A folder with such tensors, or with a tensor for each matrix, read as the latter.

    Args:
        fused: A part of a stored name → the parts that take its place, in the order of the rows.
        shapes: Shapes of the separate matrices. A tensor that does not divide into them stays.
    """

    def __init__(
        self,
        folder: Path,
        fused: Mapping[str, tuple[str, ...]],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        super().__init__(folder)
        self._parts: dict[str, tuple[str, int, int]] = {}
        stored_shapes, self.shapes = self.shapes, {}
        for stored, shape in stored_shapes.items():
            part = next((each for each in fused if each in stored), "")
            own = [
                stored.replace(part, name) if part else stored for name in fused.get(part, ("",))
            ]
            rows = [shapes.get(name, (0,))[0] for name in own]
            if sum(rows) != shape[0]:
                own, rows = [stored], [shape[0]]
            for index, (name, size) in enumerate(zip(own, rows, strict=True)):
                self._parts[name] = stored, sum(rows[:index]), size
                self.shapes[name] = (size, *shape[1:])

    def read(self, name: str) -> Tensor:
        stored, start, size = self._parts[name]
        return super().read(stored)[start : start + size]


def fuse(shapes: Shapes, read: Read, fused: Mapping[str, tuple[str, ...]]) -> tuple[Shapes, Read]:
    """Return shapes and reader of the fused tensors, from the separate ones'."""
    whole = {own: name for name, parts in fused.items() for own in parts}
    stored: dict[str, list[str]] = {}
    for own in ("", *whole):  # the order of a tensor's parts
        for tensor in shapes:
            if next((each for each in whole if each in tensor), "") == own:
                name = tensor.replace(own, whole[own]) if own else tensor
                stored.setdefault(name, []).append(tensor)
    sizes = {
        name: (sum(shapes[each][0] for each in parts), *shapes[parts[0]][1:])
        for name, parts in stored.items()
    }
    return sizes, lambda name: torch.cat([read(each) for each in stored[name]])
