"""Rules for the recurrent step after which a token is read out, each decided per token.

    static:S          after step S
    hidden:EPSILON    ‖h_r − h_{r−1}‖₂ < ε, from r = 2
    fixed_point:EPSILON  ‖h_r − h_{r−1}‖₂ < ε ‖h_r‖₂, from r = 2; also written relative:EPSILON
    margin:EPSILON    |m_r − m_{r−1}| < ε m_r, from r = 2; m is the lead of step r's likeliest token
                      over the others, in nats
    confidence:P      the likeliest next token has more than the probability P
    q:THRESHOLD       CDF(r) ≥ q of the exit gate
    sampled           after a step drawn from the exit gate's distribution
    kl:KL,ENTROPY     KL(P_r ‖ P_{r−1}) < KL and H(P_r) < ENTROPY, from r = 2; P_r is the next
                      token's distribution, both are in nats

A plug-in may have policies of its own, which take one number.

Whatever the rule says, a token leaves after step R. The rules that compare with the step before
cannot fire at step 1, whose predecessor is an embedding.

Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, §5.4.1 and §3.2; fixed points by token: arXiv
2607.14427; KL and entropy: the recurrent-depth transformer, arXiv 2604.07822, with kl:0.01,3 and
210 tokens (`titan_loop/families/recurrent_depth/README.md`). A smaller vocabulary
needs a smaller bound on the entropy, which never exceeds the vocabulary's logarithm.
"""

import math
from abc import ABC
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from titan_loop.errors import UserError, nearest
from titan_loop.inference.measures import (
    at_least_fp32,
    entropy_nats,
    hidden_distance,
    margin_change,
)
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import get_family
from titan_loop.objectives.exit_distribution import reaches_threshold
from titan_loop.plugins import find, names


class Evidence(NamedTuple):
    """States and distributions of the tokens that a policy decides on.

    Attributes:
        step_BL: Step that each token has just run.
        hidden_BLD: States after that step, as the head reads them.
        before_BLD: States before that step; meaningless at step 1.
        log_survival_BL: log Π_{j≤r}(1 − λ_j), at least fp32, if the policy reads the gate.
        log_prob_BLV: Log-probabilities of the next token after this step, in nats, if the policy
            reads logits.
        log_prob_before_BLV: The same one step before; meaningless at step 1.
        share_BL: A uniform number of each token in [0, 1), the same at all its steps, if the policy
            draws.
    """

    step_BL: Tensor
    hidden_BLD: Tensor
    before_BLD: Tensor
    log_survival_BL: Tensor | None = None
    log_prob_BLV: Tensor | None = None
    log_prob_before_BLV: Tensor | None = None
    share_BL: Tensor | None = None


class ExitPolicy(ABC):
    """Decides which tokens leave the recurrence after the step they just ran.

    Attributes:
        reads_logits: Whether it looks at logits, which costs a readout after every step.
        reads_states: Whether it looks at states, which costs a coda after every step. If not, all
            tokens leave after the deepest step.
        draws: Whether it needs a random number for each token.
    """

    name: ClassVar[str]
    draws: ClassVar[bool] = False
    reads_gate: ClassVar[bool] = False
    reads_logits: ClassVar[bool] = False
    reads_states: ClassVar[bool] = True

    @classmethod
    def grid(cls, evidence: Sequence[Evidence]) -> list[str]:
        """Return the values after the colon at which a frontier reads this policy.

        Args:
            evidence: A sample's states and distributions after each step from 2 on.
        """
        return []

    def fires(self, evidence: Evidence) -> Tensor:
        """Return (B, L) bool, True where the token leaves; by default False everywhere."""
        return torch.zeros_like(evidence.step_BL, dtype=torch.bool)

    def deepest_step(self, recurrent_steps: int) -> int:
        """Return the last step that may run, at most R."""
        return recurrent_steps


_SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
_QUANTILES = (0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98)


def _quantiles(values: Sequence[Tensor]) -> list[str]:
    """Return quantiles: distances and divergences have no scale of their own."""
    ranked = torch.cat([value.flatten() for value in values]).double().sort().values
    return [f"{float(ranked[int(share * (len(ranked) - 1))]):.4g}" for share in _QUANTILES]


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
        return evidence.step_BL >= (self.step or math.inf)

    def deepest_step(self, recurrent_steps: int) -> int:
        """Return S; raise `UserError` if it is beyond R."""
        if self.step is None:
            return recurrent_steps
        if self.step > recurrent_steps:
            raise UserError(
                f"exit=static:{self.step} is beyond recurrent_steps={recurrent_steps}; raise R"
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
        """True where the step changes the token by less than ε; measured in at least fp32."""
        return (evidence.step_BL > 1) & (self._change(evidence) < self.epsilon)

    @classmethod
    def grid(cls, evidence: Sequence[Evidence]) -> list[str]:
        """Return 0, quantiles of the sample's changes, and infinity."""
        changes = [cls(0.0)._change(each) for each in evidence]
        return ["0", *_quantiles(changes), "inf"] if changes else []

    def _change(self, evidence: Evidence) -> Tensor:
        return hidden_distance(evidence.hidden_BLD, evidence.before_BLD)


@dataclass(frozen=True)
class FixedPoint(HiddenDifference):
    """Tokens leave when the state's relative change is small: ‖h_r − h_{r−1}‖₂ < ε ‖h_r‖₂."""

    name: ClassVar[str] = "fixed_point"

    def _change(self, evidence: Evidence) -> Tensor:
        return super()._change(evidence) / at_least_fp32(evidence.hidden_BLD).norm(dim=-1)


@dataclass(frozen=True)
class Margin(HiddenDifference):
    """Tokens leave when a step hardly moves the lead of the likeliest next token."""

    name: ClassVar[str] = "margin"
    reads_logits: ClassVar[bool] = True

    def _change(self, evidence: Evidence) -> Tensor:
        assert evidence.log_prob_BLV is not None
        assert evidence.log_prob_before_BLV is not None
        return margin_change(evidence.log_prob_BLV, evidence.log_prob_before_BLV)


@dataclass(frozen=True)
class Confidence(ExitPolicy):
    """Tokens leave when one next token is likely enough."""

    probability: float
    name: ClassVar[str] = "confidence"
    reads_logits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.probability <= 1.0:
            raise UserError(f"exit=confidence:{self.probability} must be between 0 and 1")

    @classmethod
    def grid(cls, evidence: Sequence[Evidence]) -> list[str]:
        """Return probabilities from 0 to 1."""
        return [f"{share:g}" for share in _SHARES if evidence]

    def fires(self, evidence: Evidence) -> Tensor:
        """True above the probability; 1 is full depth, even if the largest one rounds to 1."""
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

    @classmethod
    def grid(cls, evidence: Sequence[Evidence]) -> list[str]:
        """Return thresholds from 0 to 1."""
        return [f"{share:g}" for share in _SHARES]

    def fires(self, evidence: Evidence) -> Tensor:
        """True where CDF ≥ q; q = 1 is full depth however certain the gate is."""
        assert evidence.log_survival_BL is not None
        return reaches_threshold(evidence.log_survival_BL, self.threshold)


@dataclass(frozen=True)
class SampledExit(ExitPolicy):
    """Tokens leave after a step drawn from the exit gate's distribution p_r.

    A token leaves at the first step whose CDF exceeds the token's share: the inverse of the CDF.
    """

    name: ClassVar[str] = "sampled"
    reads_gate: ClassVar[bool] = True
    draws: ClassVar[bool] = True

    def fires(self, evidence: Evidence) -> Tensor:
        """True where CDF > share: a step of probability 0 is never drawn."""
        assert evidence.log_survival_BL is not None
        assert evidence.share_BL is not None
        return evidence.log_survival_BL < torch.log1p(-evidence.share_BL)


@dataclass(frozen=True)
class KLAndEntropy(ExitPolicy):
    """Tokens leave when the prediction is sharp and a step hardly changes it."""

    kl_nats: float = 0.01
    entropy_nats: float = 3.0
    name: ClassVar[str] = "kl"
    reads_logits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (self.kl_nats >= 0.0 and self.entropy_nats >= 0.0):
            written = f"exit=kl:{self.kl_nats},{self.entropy_nats}"
            raise UserError(f"{written} must be two bounds of at least 0 nats")

    @classmethod
    def grid(cls, evidence: Sequence[Evidence]) -> list[str]:
        """Return quantiles of the sample's divergences, with 3 nats as the bound on entropy."""
        changes = [cls._change(each) for each in evidence]
        return ["0,0", *(f"{x},3" for x in _quantiles(changes)), "inf,inf"] if changes else []

    @staticmethod
    def _change(evidence: Evidence) -> Tensor:
        """Return KL(P_r ‖ P_{r−1}) per token, (B, L), from finite log-probabilities."""
        log_prob_BLV, before_BLV = evidence.log_prob_BLV, evidence.log_prob_before_BLV
        assert log_prob_BLV is not None
        assert before_BLV is not None
        return (log_prob_BLV.exp() * (log_prob_BLV - before_BLV)).sum(-1)

    def fires(self, evidence: Evidence) -> Tensor:
        """True where both bounds hold: a small KL alone halts too early."""
        assert evidence.log_prob_BLV is not None
        settled = self._change(evidence) < self.kl_nats
        sharp = entropy_nats(evidence.log_prob_BLV) < self.entropy_nats
        return (evidence.step_BL > 1) & settled & sharp


_CORE = (
    StaticStep,
    QExit,
    SampledExit,
    HiddenDifference,
    FixedPoint,
    Confidence,
    Margin,
    KLAndEntropy,
)
POLICIES: dict[str, type[ExitPolicy]] = {kind.name: kind for kind in _CORE}
"""Policies that every recurrence over the stack has."""

_ALIASES = {"full": "static", "relative": "fixed_point"}
_NUMBERS = {"static": 1, "kl": 2, "sampled": 0}  # values after the colon; others take one


def parse_exit_policy(text: str) -> ExitPolicy:
    """Read a policy as in this module's docstring; `full` is full depth.

    "/" may stand for a comma, which `lm_eval --model_args` does not take within a value.
    """
    name, _, values = text.partition(":")
    kind: Any = POLICIES.get(_ALIASES.get(name, name)) or find("exit_policies", name)
    if kind is None:
        known = ["full", *POLICIES, *names("exit_policies")]
        raise UserError(f"exit={text} is not an exit policy{nearest(name, known)}")
    parts = [part for part in values.replace("/", ",").split(",") if part]
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
    return POLICIES if listed is None else listed


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
