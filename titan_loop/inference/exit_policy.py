"""After which recurrent step a token is read out: rules, each decided per token.

    static:S          after step S
    hidden:EPSILON    ‖h_r − h_{r−1}‖₂ < ε, from r = 2
    relative:EPSILON  ‖h_r − h_{r−1}‖₂ < ε ‖h_r‖₂, from r = 2
    confidence:P      the likeliest next token has more than the probability P
    q:THRESHOLD       CDF(r) ≥ q of the exit gate
    kl:KL,ENTROPY     KL(P_r ‖ P_{r−1}) < KL and H(P_r) < ENTROPY, from r = 2; P_r is the next
                      token's distribution, both are in nats

A family may have policies of its own, of one number, such as survival:TAU
(`titan_loop/families/adaptive/exit_policy.py`).

Whatever the rule says, a token leaves after step R. The rules that compare with the step before
cannot fire at step 1, whose predecessor is an embedding: their shallow end is step 2.

Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, §5.4.1 and §3.2; KL and entropy from the
recurrent-depth transformer (arXiv 2604.07822): kl:0.01,3 with 210 tokens. Its authors' code uses
kl:0.001,3 for the final tests and a laxer rule in the curriculum's, kl:0.5,3.24 with windows of 50
(an entropy below 3 + 12/window). A smaller vocabulary wants a smaller bound on the entropy, which
never exceeds its logarithm.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_loop.errors import UserError, nearest
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import get_family
from titan_loop.objectives.exit_distribution import reaches_threshold
from titan_loop.plugins import find, names


class Evidence(NamedTuple):
    """The tokens a policy looks at: each just finished a step of its own.

    Attributes:
        hidden_BLD: States after that step, as the head reads them.
        before_BLD: States before that step; meaningless at step 1.
        log_survival_BL: log Π_{j≤r}(1 − λ_j), at least fp32; None unless the policy reads the gate.
        log_prob_BLV: Log-probabilities of the next token after this step, in nats; None unless the
            policy reads logits.
        log_prob_before_BLV: The same one step before; meaningless at step 1.
    """

    step_BL: Tensor
    hidden_BLD: Tensor
    before_BLD: Tensor
    log_survival_BL: Tensor | None = None
    log_prob_BLV: Tensor | None = None
    log_prob_before_BLV: Tensor | None = None


class ExitPolicy(ABC):
    """Decides which tokens leave the recurrence after the step they just ran.

    Attributes:
        reads_logits: Whether it looks at logits, which costs a readout after every step.
        reads_states: Whether it looks at states, which costs a coda after every step. All tokens of
            a policy that does not leave after its deepest step.
    """

    name: ClassVar[str]
    reads_gate: ClassVar[bool] = False
    reads_logits: ClassVar[bool] = False
    reads_states: ClassVar[bool] = True

    @abstractmethod
    def fires(self, evidence: Evidence) -> Tensor:
        """Return (B, L) bool, True where the token leaves."""

    def deepest_step(self, recurrent_steps: int) -> int:
        """Return the last step that can ever run, at most R."""
        return recurrent_steps


@dataclass(frozen=True)
class StaticStep(ExitPolicy):
    """Every token leaves after the same step S; None means R."""

    step: int | None = None
    name: ClassVar[str] = "static"
    reads_states: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.step is not None and self.step < 1:
            raise UserError(f"exit=static:{self.step} must name a step of at least 1")

    def fires(self, evidence: Evidence) -> Tensor:
        """True from step S on."""
        if self.step is None:
            return torch.zeros_like(evidence.step_BL, dtype=torch.bool)
        return evidence.step_BL >= self.step

    def deepest_step(self, recurrent_steps: int) -> int:
        """Return S; raise `UserError` if it is beyond R."""
        if self.step is None:
            return recurrent_steps
        if self.step > recurrent_steps:
            raise UserError(
                f"exit=static:{self.step} is beyond recurrent_steps={recurrent_steps}; raise that"
            )
        return self.step


@dataclass(frozen=True)
class HiddenDifference(ExitPolicy):
    """Tokens leave when a step hardly moves the normed state: ‖h_r − h_{r−1}‖₂ < ε."""

    epsilon: float
    name: ClassVar[str] = "hidden"

    def __post_init__(self) -> None:
        if not self.epsilon >= 0.0:
            raise UserError(f"exit={self.name}:{self.epsilon} must be a distance of at least 0")

    def fires(self, evidence: Evidence) -> Tensor:
        """True where the distance, in at least fp32 and not normalised, is below ε."""
        return (evidence.step_BL > 1) & (
            hidden_distance(evidence.hidden_BLD, evidence.before_BLD) < self.epsilon
        )


@dataclass(frozen=True)
class RelativeDifference(HiddenDifference):
    """As `HiddenDifference`, in units of the state itself: ‖h_r − h_{r−1}‖₂ < ε ‖h_r‖₂."""

    name: ClassVar[str] = "relative"

    def fires(self, evidence: Evidence) -> Tensor:
        """True where the relative distance, in at least fp32, is below ε."""
        return (evidence.step_BL > 1) & (
            relative_distance(evidence.hidden_BLD, evidence.before_BLD) < self.epsilon
        )


@dataclass(frozen=True)
class Confidence(ExitPolicy):
    """Tokens leave when one next token is likely enough."""

    probability: float
    name: ClassVar[str] = "confidence"
    reads_logits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.probability <= 1.0:
            raise UserError(f"exit=confidence:{self.probability} must be between 0 and 1")

    def fires(self, evidence: Evidence) -> Tensor:
        """True above the probability; 1 is full depth, also where the largest one rounds to 1."""
        assert evidence.log_prob_BLV is not None
        return evidence.log_prob_BLV.amax(-1).exp() > self.probability


@dataclass(frozen=True)
class QExit(ExitPolicy):
    """Tokens leave when the exit gate's CDF reaches the threshold q."""

    threshold: float
    name: ClassVar[str] = "q"
    reads_gate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold <= 1.0:
            raise UserError(f"exit=q:{self.threshold} must be between 0 and 1")

    def fires(self, evidence: Evidence) -> Tensor:
        """True where CDF ≥ q; q = 1 is full depth however certain the gate is."""
        assert evidence.log_survival_BL is not None
        return reaches_threshold(evidence.log_survival_BL, self.threshold)


@dataclass(frozen=True)
class KLAndEntropy(ExitPolicy):
    """Tokens leave when the prediction is sharp and a step hardly changes it."""

    kl_nats: float = 0.01
    entropy_nats: float = 3.0
    name: ClassVar[str] = "kl"
    reads_logits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (self.kl_nats >= 0.0 and self.entropy_nats >= 0.0):
            raise UserError(
                f"exit=kl:{self.kl_nats},{self.entropy_nats} must be two bounds of at least 0 nats"
            )

    def fires(self, evidence: Evidence) -> Tensor:
        """True where both bounds hold: a small KL alone halts too early."""
        now_BLV, before_BLV = evidence.log_prob_BLV, evidence.log_prob_before_BLV
        assert now_BLV is not None
        assert before_BLV is not None
        settled = divergence_nats(now_BLV, before_BLV) < self.kl_nats
        sharp = entropy_nats(now_BLV) < self.entropy_nats
        return (evidence.step_BL > 1) & settled & sharp


def hidden_distance(hidden_BLD: Tensor, before_BLD: Tensor) -> Tensor:
    """Return ‖h_r − h_{r−1}‖₂ per token, (B, L), at least fp32."""
    wide = torch.promote_types(hidden_BLD.dtype, torch.float32)
    return (hidden_BLD.to(wide) - before_BLD.to(wide)).norm(dim=-1)


def relative_distance(hidden_BLD: Tensor, before_BLD: Tensor) -> Tensor:
    """Return ‖h_r − h_{r−1}‖₂ / ‖h_r‖₂ per token, (B, L), at least fp32."""
    wide = torch.promote_types(hidden_BLD.dtype, torch.float32)
    return hidden_distance(hidden_BLD, before_BLD) / hidden_BLD.to(wide).norm(dim=-1)


def divergence_nats(log_prob_BLV: Tensor, log_prob_before_BLV: Tensor) -> Tensor:
    """Return KL(P_r ‖ P_{r−1}) per token, (B, L), from finite log-probabilities."""
    return (log_prob_BLV.exp() * (log_prob_BLV - log_prob_before_BLV)).sum(-1)


def entropy_nats(log_prob_BLV: Tensor) -> Tensor:
    """Return H(P_r) per token, (B, L), from finite log-probabilities."""
    return -(log_prob_BLV.exp() * log_prob_BLV).sum(-1)


_POLICIES: dict[str, Callable[..., ExitPolicy]] = {
    kind.name: kind
    for kind in (StaticStep, HiddenDifference, RelativeDifference, Confidence, QExit, KLAndEntropy)
}
"""Policies that every recurrence over the stack has."""

_NUMBERS = {"static": 1, "kl": 2}
"""Number of values after the colon, where it is not one number that may have a fraction."""


def parse_exit_policy(text: str) -> ExitPolicy:
    """Read a policy as in this module's docstring; `full` is full depth.

    Raises:
        UserError: The policy is unknown, or a value is missing, not a number or out of range.
    """
    name, _, values = text.partition(":")
    kind: Any = _POLICIES.get("static" if name == "full" else name) or find("exit_policies", name)
    if kind is None:
        known = ["full", *_POLICIES, *names("exit_policies")]
        raise UserError(f"exit={text} is not an exit policy{nearest(name, known)}")
    parts = [part for part in values.split(",") if part]
    number = int if name == "static" else float
    count = 0 if name == "full" else _NUMBERS.get(name, 1)
    wanted = f"exit={text}: {name} takes {count} number(s), as in q:0.9 or kl:0.01,3"
    if len(parts) != count:
        raise UserError(wanted)
    try:
        return kind(*(number(part) for part in parts))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(wanted) from error


def exit_policies_of(model: LoopDecoder) -> Collection[str]:
    """Return the names of the exit policies that a model's family has."""
    listed = get_family(model.config.family).exit_policies
    return _POLICIES if listed is None else listed


def require_exit_policy(model: LoopDecoder, policy: ExitPolicy) -> None:
    """Raise `UserError` if a model lacks the gate a policy needs, or its family the policy."""
    has = exit_policies_of(model)
    if policy.name not in has:
        raise UserError(
            f"exit={policy.name} is an exit policy that model.family={model.config.family} does "
            f"not have; it has {', '.join(sorted(has))}"
        )
    if policy.reads_gate and model.exit_gate is None:
        raise UserError(
            f"exit={policy.name} needs an exit gate, which this model does not have; use static"
        )


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
        self.log_prob_BLV: Tensor | None = None

    def decide(self, step_BL: Tensor, hidden_BLD: Tensor, before_BLD: Tensor) -> Tensor:
        """Return (B, L) bool, True where the token leaves after the step it just ran.

        Call it once per step. At step 1 the memory of the row's previous token is dropped.
        """
        evidence = Evidence(step_BL, hidden_BLD, before_BLD)
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
        return self.policy.reads_states or self.deepest_step in steps

    def admit(self, rows: int) -> None:
        """Append rows that are about to start a token."""
        if self._log_survival_BL is not None:
            self._log_survival_BL = F.pad(self._log_survival_BL, (0, 0, 0, rows))
        if self.log_prob_BLV is not None:
            self.log_prob_BLV = F.pad(self.log_prob_BLV, (0, 0, 0, 0, 0, rows))

    def select(self, rows: Sequence[int]) -> None:
        """Keep the memory of these rows only."""
        if self._log_survival_BL is not None:
            self._log_survival_BL = self._log_survival_BL[list(rows)]
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
