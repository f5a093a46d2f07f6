"""An exit policy applied step by step, in the engine or to the states of whole windows."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_loop.errors import UserError
from titan_loop.inference.exit_policy import Evidence, ExitPolicy
from titan_loop.inference.measures import at_least_fp32, log_probabilities


def append_rows(tensor: Tensor, rows: int) -> Tensor:
    """Append rows of zeros."""
    return F.pad(tensor, [0, 0] * (tensor.ndim - 1) + [0, rows])


@dataclass(eq=False)
class ExitDecider:
    """Applies a policy step by step, and remembers the earlier states that the policy reads.

    Attributes:
        gate: Maps a state (B, L, D) to exit logits (B, L).
        readout: Maps a state (B, L, D) to logits (B, L, V).
    """

    policy: ExitPolicy
    deepest_step: int
    gate: Callable[[Tensor], Tensor]
    readout: Callable[[Tensor], Tensor]
    _memory: dict[str, Tensor] = field(default_factory=dict, init=False)

    @property
    def log_prob(self) -> Tensor | None:
        """Log-probabilities after the latest step, (B, L, V), if the policy reads logits."""
        return self._memory.get("log_prob")

    def draws(self, row: object) -> bool:
        """Return whether a row's decisions need a random number for each token."""
        return self.policy.draws

    def decide(
        self,
        step_BL: Tensor,
        hidden_BLD: Tensor,
        before_BLD: Tensor,
        share_BL: Tensor | None = None,
    ) -> Tensor:
        """Return (B, L) bool, True where the token leaves after the step it just ran.

        Call it once per step. At step 1 the memory of the row's previous token is dropped.
        `share_BL` is the random number of each token, where the policy `draws`.
        """
        policy = self.policy
        evidence = self.evidence(
            *(step_BL, hidden_BLD, before_BLD),
            reads_gate=policy.reads_gate,
            reads_logits=policy.reads_logits,
        )
        evidence = evidence._replace(share_BL=share_BL)
        return policy.fires(evidence) | (step_BL >= self.deepest_step)

    def evidence(
        self,
        step_BL: Tensor,
        hidden_BLD: Tensor,
        before_BLD: Tensor,
        *,
        reads_gate: bool,
        reads_logits: bool,
    ) -> Evidence:
        """Return what policies decide on, and remember it for the next step."""
        evidence, memory = Evidence(step_BL, hidden_BLD, before_BLD), self._memory
        if reads_gate:
            log_survival_BL = F.logsigmoid(-at_least_fp32(self.gate(hidden_BLD)))
            if "log_survival" in memory:
                earlier_BL = torch.where(step_BL > 1, memory["log_survival"], 0.0)
                log_survival_BL = earlier_BL + log_survival_BL
            memory["log_survival"] = log_survival_BL
            evidence = evidence._replace(log_survival_BL=log_survival_BL)
        if reads_logits:
            log_prob_BLV = log_probabilities(self.readout(hidden_BLD))
            before_BLV = memory.get("log_prob", log_prob_BLV)
            memory["log_prob"] = log_prob_BLV
            evidence = evidence._replace(log_prob_BLV=log_prob_BLV, log_prob_before_BLV=before_BLV)
        return evidence

    def reads(self, steps: Iterable[int]) -> bool:
        """Return whether policy or head reads a state after `steps`; if not, no token leaves."""
        return self.policy.reads_states or self.deepest_step in steps

    def admit(self, rows: int) -> None:
        """Append rows that are about to start a token."""
        self._memory = {name: append_rows(kept, rows) for name, kept in self._memory.items()}

    def select(self, rows: Sequence[int]) -> None:
        """Keep the memory of these rows only."""
        self._memory = {name: kept[list(rows)] for name, kept in self._memory.items()}


def exit_steps(
    policy: ExitPolicy,
    hidden_RBLD: Sequence[Tensor],
    *,
    gate: Callable[[Tensor], Tensor],
    readout: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the step after which each token of whole windows would leave, (B, L) int64."""
    if policy.draws:
        raise UserError(f"exit={policy.name} draws exits while it writes; it reads no given text")
    deepest = policy.deepest_step(len(hidden_RBLD))
    decider = ExitDecider(policy, deepest, gate=gate, readout=readout)
    left_BL = torch.zeros(hidden_RBLD[0].shape[:2], dtype=torch.int64, device=hidden_RBLD[0].device)
    for index, hidden_BLD in enumerate(hidden_RBLD[:deepest]):
        step_BL = torch.full_like(left_BL, index + 1)
        leaves_BL = decider.decide(step_BL, hidden_BLD, hidden_RBLD[max(index - 1, 0)])
        left_BL = torch.where((left_BL == 0) & leaves_BL, step_BL, left_BL)
    return left_BL
