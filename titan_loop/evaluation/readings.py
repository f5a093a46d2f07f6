"""Readings: one pass to the deepest step, read out at many depths and by many exit policies.

    windows ─► model, R steps ─► states of the scored positions ─┬─ readout per step ─► nats, argmax
                                                                 └─ policy ─► exit step ─► selects

A depth is a reading (`static:3`), and so is any exit policy (`q:0.9`). Layers run once for all of
them, and the readout once per step. Every reading sees the states of a full-depth pass; only the
engine (`titan_loop.inference`) lets later tokens see that a token left early.

Shapes: P readings, R steps, T scored positions, C of one chunk.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from titan_loop.errors import UserError, require_at_least
from titan_loop.inference.exit_decider import exit_steps
from titan_loop.inference.exit_policy import (
    ExitPolicy,
    StaticStep,
    exit_policies_of,
    parse_exit_policy,
)
from titan_loop.inference.measures import (
    divergence_nats,
    hidden_distance,
    margin_change,
    relative_distance,
)
from titan_loop.models.decoder import LoopDecoder

_LOGITS_AT_A_TIME = 1 << 26
"""R · C · V: the logits of one chunk at every step take at most 256 MiB in fp32."""

_Q_THRESHOLDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
_QUANTILES = (0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98)
_ENTROPY_BOUND_NATS = 3.0
_CONTRASTS = (0.1, 0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Reading:
    """How to read a looped model: an exit policy and the R it runs in.

    Attributes:
        name: As `--exit` takes it; a depth r is `static:r`.
        recurrent_steps: R of that policy.
    """

    name: str
    policy: ExitPolicy
    recurrent_steps: int

    @property
    def deepest_step(self) -> int:
        """The last step it can ever need."""
        return self.policy.deepest_step(self.recurrent_steps)


class Scores(NamedTuple):
    """Scores of T positions at P readings.

    Attributes:
        nats_PT: Negative log likelihood of the label, at least fp32.
        right_PT: Whether the label is the most likely token.
        step_PT: The step it was read from, int64.
    """

    nats_PT: Tensor
    right_PT: Tensor
    step_PT: Tensor


def depth_readings(depths: Sequence[int]) -> list[Reading]:
    """Return a reading for each depth.

    Raises:
        UserError: No depth, or one below 1.
    """
    if not depths or min(depths) < 1:
        raise UserError(f"depths={list(depths)} must name recurrent steps of at least 1")
    return [Reading(f"static:{step}", StaticStep(step), step) for step in dict.fromkeys(depths)]


def policy_reading(exit_text: str, recurrent_steps: int) -> Reading:
    """Return the reading that `--exit` describes at this R.

    Raises:
        UserError: R below 1, an unknown policy, or a value out of range.
    """
    require_at_least(1, recurrent_steps=recurrent_steps)
    policy = parse_exit_policy(exit_text)
    if isinstance(policy, StaticStep):
        return depth_readings([policy.deepest_step(recurrent_steps)])[0]
    return Reading(exit_text, policy, recurrent_steps)


@torch.no_grad()
def states_at(
    model: LoopDecoder,
    input_BL: Tensor,
    chosen_BL: Tensor,
    steps: int,
    positions_BL: Tensor | None = None,
    columns: Mapping[str, Tensor] | None = None,
) -> list[Tensor]:
    """Return the states of T chosen positions after each of R recurrent steps, (T, D) each.

    Args:
        chosen_BL: Which positions to return; T of them are True.
        positions_BL: Positions that restart with every document; None for one document per row.

    Raises:
        UserError: The model's context is shorter than L.
    """
    context, length = model.config.max_seq_len, input_BL.shape[1]
    if context < length:
        raise UserError(
            f"max_length={context} is shorter than the {length} tokens of a window of this task; "
            "raise it, or leave it out"
        )
    output = model(
        input_BL, positions_BL, recurrent_steps=steps, collect="all", columns=columns or None
    )
    return [hidden_BLD[chosen_BL] for hidden_BLD in output.hidden_RBLD]


@torch.no_grad()
def frontier_readings(
    model: LoopDecoder, hidden_RTD: Sequence[Tensor], recurrent_steps: int
) -> list[Reading]:
    """Return static depths 1 … R, and every policy from its shallowest to its deepest setting.

    Thresholds on distances and divergences have no scale of their own, so they are quantiles over a
    sample of states.

    Args:
        model: Decides whether there is an exit gate to ask.
        hidden_RTD: States of a sample after each of at least R steps, (T, D).
    """
    states = [state.unsqueeze(0) for state in hidden_RTD[:recurrent_steps]]
    names: list[str] = []
    if model.exit_gate is not None:
        names += [f"q:{threshold:g}" for threshold in _Q_THRESHOLDS]
    if recurrent_steps > 1:
        pairs = list(zip(states[1:], states[:-1], strict=True))
        distances = torch.cat([hidden_distance(*pair).flatten() for pair in pairs])
        names += [f"hidden:{x:.4g}" for x in (0, *_quantiles(distances), math.inf)]
        shares = torch.cat([relative_distance(*pair).flatten() for pair in pairs])
        names += [f"fixed_point:{x:.4g}" for x in (0, *_quantiles(shares), math.inf)]
        names += [f"confidence:{threshold:g}" for threshold in _Q_THRESHOLDS]
        log_probs = [_log_prob(model.readout(state)) for state in states]
        pairs = list(zip(log_probs[1:], log_probs[:-1], strict=True))
        leads = torch.cat([margin_change(*pair).flatten() for pair in pairs])
        names += [f"margin:{x:.4g}" for x in (0, *_quantiles(leads), math.inf)]
        changes = torch.cat([divergence_nats(*pair).flatten() for pair in pairs])
        bound = f"{_ENTROPY_BOUND_NATS:g}"
        names += ["kl:0,0", *(f"kl:{x:.4g},{bound}" for x in _quantiles(changes)), "kl:inf,inf"]
        early = sorted({1, recurrent_steps - 1})
        names += [f"contrast:{a},{x:g},0.1" for a in early for x in _CONTRASTS]
    policies = [policy_reading(name, recurrent_steps) for name in dict.fromkeys(names)]
    has = exit_policies_of(model)
    return [
        *depth_readings(range(1, recurrent_steps + 1)),
        *(reading for reading in policies if reading.policy.name in has),
    ]


@torch.no_grad()
def score_states(
    model: LoopDecoder, hidden_RTD: Sequence[Tensor], labels_T: Tensor, readings: Sequence[Reading]
) -> Scores:
    """Read the same states in every way.

    Args:
        hidden_RTD: States after each step, (T, D) each, at least as many as the deepest reading.
        labels_T: The token that follows each position.
    """
    steps = _steps_to_read(readings)
    chunk = max(1, _LOGITS_AT_A_TIME // (len(steps) * model.config.vocab_size))
    parts: list[Scores] = []
    for start in range(0, len(labels_T), chunk):
        states = [state[start : start + chunk].unsqueeze(0) for state in hidden_RTD]
        parts.append(_score_chunk(model, states, labels_T[start : start + chunk], readings, steps))
    if not parts:
        empty = torch.zeros((len(readings), 0), device=labels_T.device)
        return Scores(empty, empty.bool(), empty.long())
    return Scores(*(torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True)))


def _score_chunk(
    model: LoopDecoder,
    states_R1CD: list[Tensor],
    labels_C: Tensor,
    readings: Sequence[Reading],
    steps: Sequence[int],
) -> Scores:
    logits = {step: model.readout(states_R1CD[step - 1]) for step in steps}
    by_state = {id(states_R1CD[step - 1]): logits[step] for step in steps}
    deepest = max(steps)
    wide = torch.promote_types(states_R1CD[0].dtype, torch.float32)
    nats_RC = torch.full((deepest, len(labels_C)), math.nan, dtype=wide, device=labels_C.device)
    right_RC = torch.zeros_like(nats_RC, dtype=torch.bool)
    for step, logits_1CV in logits.items():
        nats_RC[step - 1], right_RC[step - 1] = _graded(logits_1CV[0], labels_C)
    step_PC = torch.cat(
        [
            exit_steps(
                reading.policy,
                states_R1CD[: reading.recurrent_steps],
                gate=model.gate,
                readout=lambda state: by_state[id(state)],
            )
            for reading in readings
        ]
    )
    nats_PC, right_PC = nats_RC.gather(0, step_PC - 1), right_RC.gather(0, step_PC - 1)
    for p, reading in enumerate(readings):
        early = reading.policy.early_step
        if early is not None:
            last_CV, early_CV = logits[reading.deepest_step][0], logits[early][0]
            nats_PC[p], right_PC[p] = _graded(reading.policy.combined(last_CV, early_CV), labels_C)
    return Scores(nats_PC, right_PC, step_PC)


def _graded(logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return negative log likelihoods, and where the label is the most likely token."""
    wide_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    nats_C = torch.nn.functional.cross_entropy(wide_CV, labels_C, reduction="none")
    return nats_C, wide_CV.argmax(-1) == labels_C


def _steps_to_read(readings: Sequence[Reading]) -> list[int]:
    steps: set[int] = set()
    for reading in readings:
        deepest = reading.deepest_step
        early = reading.policy.early_step
        if early is not None:
            steps |= {early, deepest}
        else:
            fixed = isinstance(reading.policy, StaticStep)
            steps |= {deepest} if fixed else set(range(1, deepest + 1))
    return sorted(steps)


def _quantiles(values: Tensor) -> list[float]:
    ranked = values.double().sort().values
    return [float(ranked[int(share * (len(ranked) - 1))]) for share in _QUANTILES]


def _log_prob(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
