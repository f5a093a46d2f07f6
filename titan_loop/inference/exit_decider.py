"""An exit policy applied step by step, in the engine or to the states of whole windows."""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_loop.inference.exit_policy import Evidence, ExitPolicy


class ExitDecider:
    """Applies a policy step by step and keeps the earlier steps that it needs.

    Args:
        gate: Maps a state (B, L, D) to exit logits (B, L).
        readout: Maps a state (B, L, D) to logits (B, L, V).

    Attributes:
        log_prob_BLV: Log-probabilities of the next token after the latest step; None before the
            first, and if the policy reads no logits.
    """

    def __init__(
        self,
        policy: ExitPolicy,
        deepest_step: int,
        *,
        gate: Callable[[Tensor], Tensor],
        readout: Callable[[Tensor], Tensor],
    ) -> None:
        self.policy = policy
        self.deepest_step = deepest_step
        self._gate = gate
        self._readout = readout
        self._log_survival_BL: Tensor | None = None
        self._early_BLD: Tensor | None = None
        self.log_prob_BLV: Tensor | None = None

    def decide(self, step_BL: Tensor, hidden_BLD: Tensor, before_BLD: Tensor) -> Tensor:
        """Return (B, L) bool, True where the token leaves after the step it just ran.

        Call it once per step. At step 1 the memory of the row's previous token is dropped.
        """
        evidence = Evidence(step_BL, hidden_BLD, before_BLD)
        if self.policy.early_step is not None:
            kept_BLD = hidden_BLD if self._early_BLD is None else self._early_BLD
            here_BL1 = (step_BL == self.policy.early_step).unsqueeze(-1)
            self._early_BLD = torch.where(here_BL1, hidden_BLD, kept_BLD)
        if self.policy.reads_gate:
            exit_logit_BL = self._gate(hidden_BLD)
            wide = exit_logit_BL.to(torch.promote_types(exit_logit_BL.dtype, torch.float32))
            log_survival_BL = F.logsigmoid(-wide)
            if self._log_survival_BL is not None:
                earlier_BL = torch.where(step_BL > 1, self._log_survival_BL, 0.0)
                log_survival_BL = earlier_BL + log_survival_BL
            self._log_survival_BL = log_survival_BL
            evidence = evidence._replace(log_survival_BL=log_survival_BL)
        if self.policy.reads_logits:
            logits_BLV = self._readout(hidden_BLD)
            wide = torch.promote_types(logits_BLV.dtype, torch.float32)
            log_prob_BLV = logits_BLV.to(wide).log_softmax(-1)
            before_BLV = log_prob_BLV if self.log_prob_BLV is None else self.log_prob_BLV
            self.log_prob_BLV = log_prob_BLV
            evidence = evidence._replace(log_prob_BLV=log_prob_BLV, log_prob_before_BLV=before_BLV)
        return self.policy.fires(evidence) | (step_BL >= self.deepest_step)

    def reads(self, steps: Iterable[int]) -> bool:
        """Return whether the policy, or the head, reads a state after one of these steps.

        If neither does, no token leaves after them.
        """
        read = {self.deepest_step, self.policy.early_step}
        return self.policy.reads_states or not read.isdisjoint(steps)

    def logits(self, hidden_BLD: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the logits that tokens leave with, (B, L, V).

        Args:
            hidden_BLD: States of the rows that leave.
            rows: Their indices; None for all.
        """
        logits_BLV = self._readout(hidden_BLD)
        if self.policy.early_step is None:
            return logits_BLV
        assert self._early_BLD is not None
        early_BLD = self._early_BLD if rows is None else self._early_BLD[rows]
        return self.policy.combined(logits_BLV, self._readout(early_BLD))

    def admit(self, rows: int) -> None:
        """Append rows that are about to start a token."""
        if self._log_survival_BL is not None:
            self._log_survival_BL = F.pad(self._log_survival_BL, (0, 0, 0, rows))
        if self._early_BLD is not None:
            self._early_BLD = F.pad(self._early_BLD, (0, 0, 0, 0, 0, rows))
        if self.log_prob_BLV is not None:
            self.log_prob_BLV = F.pad(self.log_prob_BLV, (0, 0, 0, 0, 0, rows))

    def select(self, rows: Sequence[int]) -> None:
        """Keep the memory of these rows only."""
        if self._log_survival_BL is not None:
            self._log_survival_BL = self._log_survival_BL[list(rows)]
        if self._early_BLD is not None:
            self._early_BLD = self._early_BLD[list(rows)]
        if self.log_prob_BLV is not None:
            self.log_prob_BLV = self.log_prob_BLV[list(rows)]


def exit_steps(
    policy: ExitPolicy,
    hidden_RBLD: Sequence[Tensor],
    *,
    gate: Callable[[Tensor], Tensor],
    readout: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the step after which a policy would leave, for the states of whole windows.

    Returns:
        (B, L) int64 in 1 … R.
    """
    deepest = policy.deepest_step(len(hidden_RBLD))
    decider = ExitDecider(policy, deepest, gate=gate, readout=readout)
    left_BL = torch.zeros(hidden_RBLD[0].shape[:2], dtype=torch.int64, device=hidden_RBLD[0].device)
    for index, hidden_BLD in enumerate(hidden_RBLD[:deepest]):
        step_BL = torch.full_like(left_BL, index + 1)
        leaves_BL = decider.decide(step_BL, hidden_BLD, hidden_RBLD[max(index - 1, 0)])
        left_BL = torch.where((left_BL == 0) & leaves_BL, step_BL, left_BL)
    return left_BL
