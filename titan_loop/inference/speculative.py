"""Self-speculative decoding: step s of the model drafts, step R of the same model verifies.

    draft    c ─ steps 1…s ─► x_1 ─ steps 1…s ─► x_2 … x_k ─ steps 1…s
    verify   the states after step s of c, x_1 … x_k ─ steps s+1…R, all at once ─► P_1 … P_{k+1}
    accept   x_i with probability min(1, P_i(x_i) / Q_i(x_i)); the first one refused is replaced by
             a draw from max(0, P_i − Q_i), and after k acceptances comes a draw from P_{k+1}

Draft and verification share states and caches up to step s, so nothing is computed twice. The cache
entries of a refused token lie beyond the row's new end and are overwritten before they can be seen.
The accepted tokens have exactly the distribution of plain decoding at step R. With greedy sampling
P and Q are one-hot and the rule keeps x_i while it is the most likely token of step R.

Needs the `full` cache: under sharing, plain decoding attends to an earlier token's keys as kept
*after* its last step, which a draft token has not run yet.

Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, §7.3; acceptance rule of Leviathan et al. 2023,
arXiv 2211.17192, §2.3.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from titan_loop.errors import UserError, require_at_least
from titan_loop.inference.measures import log_probabilities
from titan_loop.inference.rows import Batch, GeneratedToken
from titan_loop.inference.sampling import probabilities
from titan_loop.inference.stack import LoopState


@dataclass
class SelfSpeculation:
    """Depth and length of the drafts, and counts so far; a round has one verification."""

    draft_step: int = 1
    draft_tokens: int = 3
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    def check(self, recurrent_steps: int) -> None:
        """Raise `UserError` if a value is out of range."""
        if not 1 <= self.draft_step < recurrent_steps:
            raise UserError(
                f"draft_step={self.draft_step} must be at least 1 and below "
                f"recurrent_steps={recurrent_steps}"
            )
        require_at_least(1, draft_tokens=self.draft_tokens)

    @property
    def acceptance(self) -> float:
        """Accepted share of the drafted tokens; NaN before the first."""
        return self.accepted / self.drafted if self.drafted else float("nan")

    def advance(self, batch: Batch) -> Iterator[GeneratedToken]:
        """Run one round for all rows, yielding between 1 and k + 1 tokens per row."""
        rows = batch.rows
        # The last token a row may still produce needs no draft: verification gives it.
        count = min(self.draft_tokens, max(row.remaining for row in rows) - 1)
        draft_BL, draft_prob_BLV, state = self._draft(batch, count)
        logits_BLV = self._verify(batch, state)
        prob_BLV = probabilities(logits_BLV, batch.sampling)
        accepted = accepted_count(
            draft_BL, draft_prob_BLV, prob_BLV[:, :count], self._uniforms(batch, count)
        )
        # After the last draft Q is 0, so the remainder there is P itself.
        remainder_BLV = (prob_BLV - F.pad(draft_prob_BLV, (0, 0, 0, 1))).clamp_min(0.0)
        row_B = torch.arange(len(rows), device=accepted.device)
        last_BV, whole_BV = remainder_BLV[row_B, accepted], prob_BLV[row_B, accepted]
        # After a refusal P exceeds Q somewhere, except when rounding hides it.
        last_BV = torch.where(last_BV.sum(-1, keepdim=True) > 0, last_BV, whole_BV)
        replacement = batch.draw(last_BV, rows)
        self.rounds += 1
        for row, logits_LV, drafts, kept, last in zip(
            rows, logits_BLV, draft_BL.tolist(), accepted.tolist(), replacement, strict=True
        ):
            usable = min(count, row.remaining)
            self.drafted += usable
            self.accepted += min(kept, usable)
            for token, logits_V in zip([*drafts[:kept], last], logits_LV, strict=False):
                if row.tells_log_prob:
                    row.log_prob = float(log_probabilities(logits_V)[token])
                yield row.accept(token, batch.recurrent_steps)
                if row.finish is not None:
                    break

    def _draft(self, batch: Batch, count: int) -> tuple[Tensor, Tensor, LoopState]:
        """Return drafts (B, k), their distributions (B, k, V), and k + 1 states after step s."""
        stack, rows = batch.stack, batch.rows
        token_BL = batch.column(row.token for row in rows)
        drafts = [token_BL[:, :0]]
        distributions = [
            torch.empty(len(rows), 0, stack.model.config.vocab_size, device=stack.device)
        ]
        states: list[LoopState] = []
        for offset in range(count + 1):
            context = stack.token_context(self._positions(batch, offset, offset + 1), batch.cache)
            state = None
            for step in range(1, self.draft_step + 1):
                reads = step == self.draft_step and offset < count
                state = stack.step(state, token_BL, [step] * len(rows), context, reads=reads)
            assert state is not None
            states.append(state)
            if offset == count:
                break
            prob_BLV = probabilities(stack.readout(state.read_BLD), batch.sampling)
            token_BL = batch.column(batch.draw(prob_BLV[:, 0], rows))
            distributions.append(prob_BLV)
            drafts.append(token_BL)
        state = tree_map(lambda *leaves: torch.cat(leaves, 1), *states)
        return torch.cat(drafts, 1), torch.cat(distributions, 1), state

    def _verify(self, batch: Batch, state: LoopState) -> Tensor:
        positions_BL = self._positions(batch, 0, state.read_BLD.shape[1])
        context = batch.stack.token_context(positions_BL, batch.cache)
        for step in range(self.draft_step + 1, batch.recurrent_steps + 1):
            reads = step == batch.recurrent_steps
            state = batch.stack.step(state, None, [step] * len(batch.rows), context, reads=reads)
        return batch.stack.readout(state.read_BLD)

    def _positions(self, batch: Batch, start: int, stop: int) -> Tensor:
        # A row near its end drafts along with the others. Drafts past the cache's last position are
        # never accepted; they only need a place that no accepted token reads.
        first_BL = batch.column(row.position for row in batch.rows)
        offset_L = torch.arange(start, stop, device=first_BL.device)
        return (first_BL + offset_L).clamp_max(batch.cache.shape.capacity - 1)

    def _uniforms(self, batch: Batch, count: int) -> Tensor:
        if batch.sampling.temperature == 0.0:  # acceptance is certain or impossible
            return torch.zeros((len(batch.rows), count), device=batch.stack.device)
        return torch.tensor(
            [[row.uniform() for _ in range(count)] for row in batch.rows],
            dtype=torch.float64,
            device=batch.stack.device,
        ).view(len(batch.rows), count)


def accepted_count(
    draft_BL: Tensor, draft_prob_BLV: Tensor, prob_BLV: Tensor, uniform_BL: Tensor
) -> Tensor:
    """Return the number of drafts that each row accepts up to its first refusal, (B,) int64.

    A draft x_i from Q_i is accepted if u_i · Q_i(x_i) < P_i(x_i), with P_i of step R and u_i in
    [0, 1); L is k.
    """
    index_BL1 = draft_BL.unsqueeze(-1)
    draft_BL_prob = draft_prob_BLV.gather(-1, index_BL1).squeeze(-1)
    target_BL_prob = prob_BLV.gather(-1, index_BL1).squeeze(-1)
    accepted_BL = uniform_BL * draft_BL_prob < target_BL_prob
    return accepted_BL.long().cumprod(-1).sum(-1)
