"""LoopCoder's own cache: step 1's keys of all tokens, later steps' of the latest W tokens.

Later tokens see nothing else, so it holds what `full` holds and forgets what no token reads. With R
steps and L tokens it is 1 + (R − 1) min(W, L) / L times one loop's keys and values. A later step's
entry at position p stands at index p modulo W.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from titan_loop.inference.cache import CacheShape, EntryPair, LoopCache, Pair, Places


class WindowCache(LoopCache):
    """Step 1 is kept whole, in the base class's memory; every later step has a ring of W places."""

    def __init__(self, shape: CacheShape, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, dtype=dtype, device=device)
        self._places = self._window(shape)
        size = (2, shape.steps - 1, shape.layers, shape.rows, self._places, *shape[5:7])
        self._near = torch.zeros(size, dtype=dtype, device=device)
        self.allocated_bytes += self._near.nbytes

    @staticmethod
    def _window(shape: CacheShape) -> int:
        assert shape.window is not None, "its models have a window"
        return min(shape.window, shape.capacity)

    @classmethod
    def entries(cls, shape: CacheShape) -> int:
        return shape.layers * (shape.capacity + (shape.steps - 1) * cls._window(shape))

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self._near[:, :, :, : len(rows)] = self._near[:, :, :, list(rows)]

    def write_prompt(self, step: int, layer: int, first_row: int, new_2BLNH: Tensor) -> None:
        """Store a step's entries; of a later step each row's latest W."""
        if step == 1:
            super().write_prompt(step, layer, first_row, new_2BLNH)
        else:
            for near, new_BLNH in zip(self._near, new_2BLNH, strict=True):
                newest = self.newest(new_BLNH, self._places)
                near[step - 2, layer, first_row : self.rows] = newest

    def write_tokens(
        self, step: int | Tensor, layer: int, new: Pair, places: Places
    ) -> Pair | EntryPair:
        """Store; return step 1's keys, or each row's ring as far as it was written.

        With rows at different steps, a row at step 1 has its entry in step 2's ring, too, until it
        comes there, and is given that ring.
        """
        if isinstance(step, int) and step == 1:
            return self._write_slot(0, layer, new, places)
        assert new[0].shape[1] == 1, "a ring has no place for what earlier tokens of a pass see"
        ring_B = step - 2 if isinstance(step, int) else (step - 2).clamp_min(0)
        row_B, place_B = self._row[:, 0], places.positions_BL[:, 0] % self._places
        near = self._near[:, :, layer, : self.rows]
        near[:, ring_B, row_B, place_B] = torch.stack(new)[:, :, 0]
        keys_BWNH, values_BWNH = near[:, ring_B, row_B, : places.seen]
        return keys_BWNH, values_BWNH

    def leave_prompt(self, first_row: int, length: int, step: int) -> None:
        for deeper in range(step + 1, self.shape.steps + 1):
            for layer in range(self.shape.layers):
                ring = self._near[:, deeper - 2, layer, first_row : self.rows]
                if deeper > 2:
                    ring.copy_(self._near[:, deeper - 3, layer, first_row : self.rows])
                else:
                    whole = self._kept[:, 0, layer, first_row:]
                    for near, entries in zip(ring, whole, strict=True):
                        near.copy_(self.newest(entries, self._places))

    def leave(self, rows: Tensor, positions: Tensor, steps: Tensor) -> None:
        """Copy the last step that ran to every deeper one."""
        for deeper in range(2, self.shape.steps + 1):
            row, position = rows[steps < deeper], positions[steps < deeper]
            place = position % self._places
            if deeper == 2:
                last = self._kept[:, 0, :, row, position]
            else:
                last = self._near[:, deeper - 3, :, row, place]
            self._near[:, deeper - 2, :, row, place] = last
