"""Readings: one pass to the deepest step, read out at many depths and by many exit policies.

    windows ─► model, R steps ─► states of the scored positions ─┬─ readout per step ─► nats, argmax
                                                                 └─ policy ─► exit step ─► selects

A reading is a depth (`static:3`) or any exit policy (`q:0.9`). Layers run once for all of them, and
the readout once per step. Every reading sees the states of a full-depth pass; only in the engine
(`titan_loop.inference`) do later tokens see that a token left early.

Shapes: P readings, R steps, T scored positions, C of one chunk.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_loop.errors import UserError, require_at_least
from titan_loop.inference.exit_decider import exit_steps
from titan_loop.inference.exit_policy import (
    POLICIES,
    Evidence,
    ExitPolicy,
    StaticStep,
    exit_policies_of,
    parse_exit_policy,
)
from titan_loop.inference.measures import at_least_fp32, log_probabilities
from titan_loop.models.decoder import LoopDecoder

_LOGITS_AT_A_TIME = 1 << 26  # R · C · V of one chunk: 256 MiB in fp32


@dataclass(frozen=True)
class Reading:
    """An exit policy, its name in `--exit` and the R it runs with; depth r is `static:r`."""

    name: str
    policy: ExitPolicy
    recurrent_steps: int

    @property
    def deepest_step(self) -> int:
        """Last step that it can need."""
        return self.policy.deepest_step(self.recurrent_steps)


class Scores(NamedTuple):
    """Scores of T positions at P readings.

    Attributes:
        nats_PT: Negative log likelihood of the label, at least fp32.
        right_PT: Whether the label is the most likely token.
        step_PT: Step that the position was read from, int64.
    """

    nats_PT: Tensor
    right_PT: Tensor
    step_PT: Tensor


def depth_readings(depths: Sequence[int]) -> list[Reading]:
    """Return a reading for each depth; raise `UserError` for none, or one below 1."""
    if not depths or min(depths) < 1:
        raise UserError(f"depths={list(depths)} must name recurrent steps of at least 1")
    return [Reading(f"static:{step}", StaticStep(step), step) for step in dict.fromkeys(depths)]


def policy_reading(exit_text: str, recurrent_steps: int) -> Reading:
    """Return the reading that `--exit` describes at this R; raise `UserError` for a mistake."""
    require_at_least(1, recurrent_steps=recurrent_steps)
    policy = parse_exit_policy(exit_text)
    if isinstance(policy, StaticStep):
        return depth_readings([policy.deepest_step(recurrent_steps)])[0]
    return Reading(exit_text, policy, recurrent_steps)


@torch.no_grad()
def frontier_readings(
    model: LoopDecoder, hidden_RTD: Sequence[Tensor], recurrent_steps: int
) -> list[Reading]:
    """Return static depths 1 … R, and the model's core exit policies at their `grid` each.

    Policies that plugins register are left out.

    Args:
        hidden_RTD: States of a sample after each of at least R steps, (T, D) each.
    """
    states = [state.unsqueeze(0) for state in hidden_RTD[:recurrent_steps]]
    log_probs = [log_probabilities(model.readout(state)) for state in states]
    evidence = [
        Evidence(
            torch.tensor(r + 1), states[r], states[r - 1], None, log_probs[r], log_probs[r - 1]
        )
        for r in range(1, len(states))
    ]
    policies = [
        policy_reading(f"{name}:{values}", recurrent_steps)
        for name, kind in POLICIES.items()
        if name in exit_policies_of(model) and not (kind.reads_gate and model.exit_gate is None)
        for values in dict.fromkeys(kind.grid(evidence))
    ]
    return [*depth_readings(range(1, recurrent_steps + 1)), *policies]


@torch.no_grad()
def score_states(
    model: LoopDecoder, hidden_RTD: Sequence[Tensor], labels_T: Tensor, readings: Sequence[Reading]
) -> Scores:
    """Score the same states at every reading.

    Args:
        hidden_RTD: States after each step up to the deepest reading's or beyond, (T, D) each.
        labels_T: Token that follows each position.
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
    logits = {step: model.lm_head(states_R1CD[step - 1]) for step in steps}
    if isinstance(logits[steps[0]], DTensor):  # ranks share the vocabulary
        logits = {step: logits_1CV.full_tensor() for step, logits_1CV in logits.items()}
    by_state = {id(states_R1CD[step - 1]): logits[step] for step in steps}
    deepest = max(steps)
    wide = torch.promote_types(states_R1CD[0].dtype, torch.float32)
    nats_RC = torch.full((deepest, len(labels_C)), math.nan, dtype=wide, device=labels_C.device)
    right_RC = torch.zeros_like(nats_RC, dtype=torch.bool)
    for step, logits_1CV in logits.items():
        nats_RC[step - 1], right_RC[step - 1] = _graded(logits_1CV[0], labels_C)
    ask = partial(exit_steps, gate=model.gate, readout=lambda state: by_state[id(state)])
    step_PC = torch.cat([ask(r.policy, states_R1CD[: r.recurrent_steps]) for r in readings])
    nats_PC, right_PC = nats_RC.gather(0, step_PC - 1), right_RC.gather(0, step_PC - 1)
    return Scores(nats_PC, right_PC, step_PC)


def _graded(logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
    wide_CV = at_least_fp32(logits_CV)
    nats_C = torch.nn.functional.cross_entropy(wide_CV, labels_C, reduction="none")
    return nats_C, wide_CV.argmax(-1) == labels_C


def _steps_to_read(readings: Sequence[Reading]) -> list[int]:
    steps: set[int] = set()
    for reading in readings:
        static = isinstance(reading.policy, StaticStep)
        steps.update(range(reading.deepest_step if static else 1, reading.deepest_step + 1))
    return sorted(steps)
