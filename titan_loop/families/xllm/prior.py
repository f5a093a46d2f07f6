"""A distribution of depths that is learned while the model trains.

    R ~ p = softmax(θ) over 1 … R_max
    after a step with loss L:   c = −exp(−L),   A = (c − mean c) · std L / std c
    Adam minimises over θ:      A log p_R + λ_m (E[R] − m)² + λ_H Σ p log p

A depth whose perplexity is below average becomes more probable, unless the penalty on the mean
prevents it. The factor std L / std c puts A in units of the loss. Means and standard deviations are
moving averages; the first `burn_in` steps update these and leave θ as it is.

Source: Huang et al. 2026 (xLLM-Loop), arXiv 2610.06833 II, Table 2 (learned), and their code, whose
defaults are used here. Deviations: one draw per training step, where they draw for every
micro-batch; a draw is keyed by the seed and the number of the training step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titan_loop.errors import UserError
from titan_loop.families.xllm.depth import SEED
from titan_loop.training.callback import Callback, TrainingState
from titan_loop.training.metrics import global_means
from titan_loop.training.step_plan import StepPlan

KEY = "depth_prior"
_SMALLEST_STD = 1e-12


@dataclass(frozen=True, kw_only=True)
class PriorSettings:
    """Settings of a learned distribution.

    Attributes:
        entropy_weight: λ_H; above 0 it favours a broad distribution.
        mean_weight: λ_m; 0 leaves the mean free.
        mean: m, the mean number of steps that the penalty aims at.
        rate: Adam's learning rate.
        average_decay: Decay of the moving averages.
        burn_in: Training steps before the first update of θ.
    """

    entropy_weight: float = 0.0
    mean_weight: float = 1.0
    mean: float = 5.0
    rate: float = 1e-3
    average_decay: float = 0.95
    burn_in: int = 32


@dataclass
class Moments:
    """Exponential moving mean and variance of a number."""

    mean: float = 0.0
    variance: float = 0.0

    def update(self, value: float, *, decay: float, first: bool) -> None:
        """Add a training step's value; the first one becomes the mean."""
        if first:
            self.mean = value
            return
        moved = value - self.mean
        self.variance = decay * self.variance + decay * (1 - decay) * moved**2
        self.mean = decay * self.mean + (1 - decay) * value


class DepthPrior:
    """The distribution and its optimiser, in float64 on the host.

    Args:
        probabilities: Distribution before training, over 1 … R_max, all above 0.
    """

    def __init__(self, settings: PriorSettings, probabilities: Sequence[float]) -> None:
        start = torch.as_tensor(np.asarray(probabilities), dtype=torch.float64)
        if not (start > 0).all():
            raise UserError("a learned distribution of depths must start with all of them possible")
        self.settings = settings
        self.logits = torch.nn.Parameter(start.log())
        self._adam = torch.optim.Adam([self.logits], lr=settings.rate)
        self._steps = torch.arange(1, len(start) + 1, dtype=torch.float64)
        self.loss, self.cost = Moments(), Moments()
        self.updates = 0

    @property
    def probabilities(self) -> Tensor:
        """p, (R_max,) float64."""
        return self.logits.detach().softmax(0)

    def draw(self, *key: int) -> int:
        """Return a depth, which depends on the key and the distribution only."""
        seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)
        generator = torch.Generator().manual_seed(seed)
        return int(torch.multinomial(self.probabilities, 1, generator=generator)) + 1

    def learn(self, depth: int, loss: float) -> None:
        """Update from a training step with R = `depth` and mean loss `loss`, in nats per token."""
        settings, cost = self.settings, -math.exp(-loss)
        if self.updates >= settings.burn_in:
            scale = 1.0
            if self.updates:
                stds = (math.sqrt(each.variance) for each in (self.loss, self.cost))
                of_loss, of_cost = (max(std, _SMALLEST_STD) for std in stds)
                scale = of_loss / of_cost
            log_p = self.logits.log_softmax(0)
            p = log_p.exp()
            objective = (cost - self.cost.mean) * scale * log_p[depth - 1]
            objective = objective + settings.mean_weight * (p @ self._steps - settings.mean) ** 2
            objective = objective + settings.entropy_weight * (p @ log_p)
            self._adam.zero_grad()
            objective.backward()
            self._adam.step()
        first = self.updates == 0
        self.loss.update(loss, decay=settings.average_decay, first=first)
        self.cost.update(cost, decay=settings.average_decay, first=first)
        self.updates += 1

    def record(self) -> dict[str, float]:
        """Return mean and entropy, in nats, of the distribution."""
        p = self.probabilities
        return {
            f"{KEY}/mean": float(p @ self._steps),
            f"{KEY}/entropy": float(-(p @ p.log())),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return state for JSON, from which training continues exactly."""
        moments = self._adam.state.get(self.logits, {})
        return {
            "logits": self.logits.tolist(),
            "adam": {name: value.tolist() for name, value in moments.items()},
            "loss": vars(self.loss),
            "cost": vars(self.cost),
            "updates": self.updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, which must have the same number of depths."""
        logits = torch.tensor(state["logits"], dtype=torch.float64)
        if logits.shape != self.logits.shape:
            raise UserError(
                f"the checkpoint's learned distribution is over {len(logits)} recurrent steps, "
                f"this run's over {len(self.logits)}; a resumed run needs the same"
            )
        with torch.no_grad():
            self.logits.copy_(logits)
        if state["adam"]:
            # Adam keeps its step count in fp32, and its moments in the logits' dtype.
            self._adam.state[self.logits] = {
                name: torch.tensor(value, dtype=torch.float32 if name == "step" else torch.float64)
                for name, value in state["adam"].items()
            }
        self.loss, self.cost = Moments(**state["loss"]), Moments(**state["cost"])
        self.updates = state["updates"]


class LearnedDepth(Callback):
    """Draws R of every training step from a distribution that learns from the step's loss.

    The host waits for the loss of every step, since the next draw depends on it.

    Args:
        probabilities: As in `DepthPrior`, such as `capped_depths(5, 0.5, 64)`.
        settings: Settings of the distribution; None takes the defaults of the authors' code.
    """

    def __init__(
        self,
        probabilities: Sequence[float],
        *,
        settings: PriorSettings | None = None,
        seed: int = SEED,
    ) -> None:
        self._new = partial(DepthPrior, settings or PriorSettings(), probabilities)
        self.prior = self._new()
        self._seed = seed

    def on_train_start(self, trainer: TrainingState) -> None:
        """Reset the distribution when training starts from step 0, in case it was used before."""
        if trainer.step == 0:
            self.prior = self._new()

    def plan(self, trainer: TrainingState, plan: StepPlan) -> StepPlan:
        return replace(plan, recurrent_steps=self.prior.draw(self._seed, plan.step))

    def judge(self, trainer: TrainingState, loss: Tensor, grad_norm: Tensor) -> None:
        """Learn from the mean loss of all ranks; ignore a loss that is not finite."""
        mesh = trainer.parallel_dims.get_optional_mesh("loss")
        mean, _ = global_means(loss.detach(), {}, mesh)
        if math.isfinite(mean):
            self.prior.learn(trainer.plan.recurrent_steps, mean)

    def record(self, trainer: TrainingState) -> Mapping[str, Any]:
        return self.prior.record()

    def state_dict(self) -> dict[str, Any]:
        return {KEY: self.prior.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; keep the initial one if the checkpoint has none."""
        if KEY in state:
            self.prior.load_state_dict(state[KEY])
