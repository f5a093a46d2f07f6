"""The rows that are running together, and what all of them share."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_loop.inference.cache import LoopCache
from titan_loop.inference.exit_policy import ExitDecider
from titan_loop.inference.request import Row
from titan_loop.inference.sampling import Sampling, draw, probabilities
from titan_loop.inference.stack import Stack


@dataclass(kw_only=True)
class Batch:
    """State of a decoding loop; row b of every tensor belongs to `rows[b]`.

    Attributes:
        stack: The model.
        rows: Those that are not done.
        cache: Of these rows, with room for as many as may run at once.
        decider: The exit policy with its memory of these rows.
        sampling: How tokens are chosen.
        recurrent_steps: R, the deepest step there is.
        hidden_BLD: (B, 1, D) state of each row's newest token after `Row.step` steps.
    """

    stack: Stack
    rows: list[Row]
    cache: LoopCache
    decider: ExitDecider
    sampling: Sampling
    recurrent_steps: int
    hidden_BLD: Tensor

    def column(self, values: Iterable[int]) -> Tensor:
        """Return one integer a row as (B, 1)."""
        return torch.tensor([[value] for value in values], device=self.stack.device)

    def sample(self, logits_BV: Tensor, rows: list[Row]) -> list[int]:
        """Draw a token for each of `rows` from (B, V) logits."""
        return self.draw(probabilities(logits_BV, self.sampling), rows)

    def draw(self, weight_BV: Tensor, rows: list[Row]) -> list[int]:
        """Draw a token for each of `rows` from (B, V) weights."""
        if self.sampling.temperature == 0.0:
            return weight_BV.argmax(-1).tolist()  # random numbers would change nothing
        uniform_B = torch.tensor(
            [row.uniform() for row in rows], dtype=torch.float64, device=weight_BV.device
        )
        return draw(weight_BV, uniform_B).tolist()

    def admit(self, rows: list[Row]) -> None:
        """Let rows in that have gone through their prompt and are about to start a token."""
        self.rows = self.rows + rows
        self.decider.admit(len(rows))
        self.hidden_BLD = F.pad(self.hidden_BLD, (0, 0, 0, 0, 0, len(rows)))

    def drop_finished(self) -> None:
        """Forget the rows that are done."""
        kept = [index for index, row in enumerate(self.rows) if row.finish is None]
        if len(kept) == len(self.rows):
            return
        self.rows = [self.rows[index] for index in kept]
        self.cache.select(kept)
        self.decider.select(kept)
        self.hidden_BLD = self.hidden_BLD[kept]
