"""Options of the generic looped decoder, which several families share."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from annotated_types import Ge, Gt, Lt

from titan_loop.bounds import FINITE
from titan_loop.models.family import ModelOptions
from titan_loop.models.final_norm import NormPlacement
from titan_loop.models.injection import InjectionKind
from titan_loop.models.positions import PositionKind

ResidualScale: TypeAlias = Literal["layers", "visits", "none"]
ROPE_THETA = 10_000.0
PLAIN_LOOP: Mapping[str, Any] = {
    "rope_theta": ROPE_THETA,
    "norm_placement": "readout",
    "scale_embeddings": False,
    "positions": "rope",
    "learned_positions": None,
    "relative_window": None,
    "injection": "none",
    "prelude_layers": 0,
    "coda_layers": 0,
    "branch_scale": 0.0,
    "branch_factor": 1.0,
}
"""What families without these options record in their place."""

InitialKeys: TypeAlias = Literal["random", "queries"]


@dataclass(kw_only=True, slots=True)
class LoopOptions(ModelOptions):
    """Options of every family that builds on `loop_config`; the defaults are Ouro's."""

    rope_theta: Annotated[float | None, Gt(0), FINITE] = None
    """Base of the rotary embedding; None takes the base of the starting weights, else 10,000."""

    norm_placement: NormPlacement = "every_step"
    """Place of the final norm: after every recurrent step, as in Ouro, or at the readout only."""

    scale_embeddings: bool = False
    """Whether token embeddings are scaled by √D where they enter the state."""

    positions: PositionKind = "rope"
    """Kind of positions: rope rotates queries and keys, as in Ouro; learned adds a vector to the
    embedding. Three add to the scores: relative, query times a vector per distance; deberta, also
    key times another; bias, a number per distance. none leaves order to the causal mask."""

    learned_positions: Annotated[int | None, Ge(1)] = None
    """Number of learned positions, at least as many as a window has tokens."""

    relative_window: Annotated[int | None, Ge(1)] = None
    """Largest relative distance between positions; larger ones count as this one."""

    injection: InjectionKind = "none"
    """Injection of the embedding into every recurrent step: none, as in Ouro; additive; or
    diagonal, a learned contraction."""

    prelude_layers: Annotated[int, Ge(0)] = 0
    """Number of first layers, which run once before the loop."""

    coda_layers: Annotated[int, Ge(0)] = 0
    """Number of last layers, which run after the loop on every state that is read."""

    residual_scale: ResidualScale = "layers"
    """n in the initial gain of a layer's branches, 1/sqrt(2·n): the number of layers, or of their
    visits at the model's recurrent_steps; none makes the gain 1."""

    branch_scale: Annotated[float, Ge(0), FINITE] = 0.0
    """λ of the factor λ / (R·√(L/12)) on everything that one of L looped layers adds to the state,
    with R the model's recurrent_steps, so that one learning rate serves every R; 0: no factor."""

    base_width: Annotated[int, Ge(0)] = 0
    """Width at which the learning rate was tuned. At m times that width, matrices start at
    initializer_range/√m and learn at 1/m of the rate, or 1/√m with Muon; 0 scales nothing."""

    initializer_range: Annotated[float, Gt(0), FINITE] = 0.02
    """Standard deviation of the initial weights of linear layers, head and tables of positions."""

    initial_keys: InitialKeys = "random"
    """Initial key matrices: random; or queries, which copies the query matrices, so that a token
    attends to tokens like itself."""

    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of the outputs of attention and feed-forward that is zeroed in training."""

    embedding_dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of the embedding, with its positions, that is zeroed in training."""

    def canonical(self) -> dict[str, Any]:
        """Return the rotary base."""
        return {"rope_theta": ROPE_THETA if self.rope_theta is None else self.rope_theta}

    def branch_factor(self) -> float:
        """Return the factor of `branch_scale` on the branches of looped layers."""
        if not self.branch_scale:
            return 1.0
        assert self.n_layers is not None
        assert self.recurrent_steps is not None
        looped = self.n_layers - self.prelude_layers - self.coda_layers
        return self.branch_scale / (self.recurrent_steps * math.sqrt(looped / 12))

    def reader_of_steps(self) -> str:
        """Return the factor on branches, in every pass or at the start."""
        if self.branch_scale:
            return f"branch_scale={self.branch_scale:g}"
        return "residual_scale=visits" if self.residual_scale == "visits" else ""

    def implied(self) -> Mapping[str, Any]:
        """Return the factor, by which models of one `branch_scale` differ if R or L do."""
        return {"branch_factor": self.branch_factor()}
