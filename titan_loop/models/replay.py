"""Keys of answers that were written with exits, as one pass over all their tokens sees them.

    K_r[j] = k_r[j] where token j ran step r, else K_{r−1}[j];   V likewise

The engine's cache `full` (`titan_loop/inference/cache.py`) keeps a token's keys of the steps that
it ran, and its last step stands for every deeper one. A training pass runs all R steps of every
token; with these keys it computes at each step what the engine computed when the answer was
written. Layers before the loop run once and are not affected. Layers after it are: a later token
sees the keys of the state that was read last, which may be of a deeper step than its own, so that
no pass over all tokens at once computes them.
"""

import torch
from torch import Tensor

from titan_loop.errors import UserError
from titan_loop.models.context import CacheSlot

EXIT_STEP = "exit_step"
"""Column (B, L): the last step that each token ran when it was written; R for a prompt's."""


class ReplayedKeys:
    """The `KeyValueCache` of a training pass.

    Args:
        exit_step_BL: The column `EXIT_STEP`.
    """

    def __init__(self, exit_step_BL: Tensor) -> None:
        self._exit_step_BL11 = exit_step_BL[..., None, None]
        # By step and layer, not the latest alone: a step that is recomputed in the backward pass
        # needs the keys of the step before it.
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def update(self, slot: CacheSlot, k_BLNH: Tensor, v_BLNH: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values as seen at a step."""
        step, layer = slot
        if step is None:
            return k_BLNH, v_BLNH
        assert isinstance(step, int), "all tokens of a training pass are at the same step"
        if step > 1:
            ran = self._exit_step_BL11 >= step
            before = self._kept[step - 1, layer]
            k_BLNH = torch.where(ran, k_BLNH, before[0])
            v_BLNH = torch.where(ran, v_BLNH, before[1])
        self._kept[step, layer] = k_BLNH, v_BLNH
        return k_BLNH, v_BLNH

    def latest(self, slot: CacheSlot, part: int, x_BLC: Tensor) -> Tensor:
        """Raise `UserError`: inputs of convolutions are not replayed."""
        raise UserError(f"{EXIT_STEP}: models with short convolutions replay no exits; use static")
