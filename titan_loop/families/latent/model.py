"""Recursion in a latent space of factored, discrete states: one layer of a graph per step.

    E^0 = Σ_f Emb_f(z_f^0)
    H^t = Block(E^{t-1})                                t = 1 … T
    z_f^t = argmax W_f H^t,   E^t = Σ_f Emb_f(z_f^t)    discrete
    E^t = H^t                                           continuous

| symbol | code |
|---|---|
| z_f | carry of a discrete model, (B, L, 4) int64: value, syntax, variable, operation |
| Emb_f | `tok_embeddings`, the rows of all factors in one table |
| Block | `step`: all layers and the final norm |
| W_f | `lm_head`, the rows of all factors in one matrix; the value's come first |
| T | `recurrent_steps`, at least the depth of the deepest node |

The value of a variable is EMPTY (the last but one of the value factor) until its node's turn comes.
Argmax stops gradients, so the steps of a discrete model are independent problems once each is given
the correct result of the step before. Training therefore folds them into the batch (`forward`):

    z^{t-1} = solved where depth ≤ t-1, else EMPTY      rows (t, b) of one step, t = 1 … T

*Self-correction*: with a small probability, values that were worked out in the step before are
replaced at random; the labels stay. (The authors' code replaces values that the step has yet to
work out: `corrupted=due`.) `LatentSupervision` is the loss of every step. Two baselines have a
continuous state and the loss of the last step alone (`ExpectedExitLoss`): one without recursion,
with R = 1, and one trained end to end.

Source: "Unlocking Out-of-Distribution Generalization in Transformers via Recursive Latent Space
Reasoning" (arXiv 2510.14095), section 4.1, Eq. 2 and 4, Appendix B; corruption as in the authors'
code (0.05, then 0.5 per value).
Deviations: layers and norms are Ouro's, whereas the authors' layers are pre-norm, with biases, ReLU
and one table of distances for all layers; readouts have no bias; corruption is decided for every
graph and step, not for a whole batch. By default the sum of a token's four embeddings starts at
unit scale, like every H^t; `initial_weights` and `scale_scores_by_terms` choose the initial weights
and the scale of attention scores that the authors have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from torch import Tensor, nn
from torchtitan.models.common.embedding import Embedding

from titan_loop.errors import UserError
from titan_loop.models.block import DenseBlock
from titan_loop.models.context import AttentionMask, LoopContext
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.decoder_costs import Flops
from titan_loop.models.dropout import Drawing
from titan_loop.models.family import RUNTIME_OPTIONS, Family, FamilyName, ModelSize, require_usual
from titan_loop.models.initialisation import draw, normal_matrix
from titan_loop.models.loop_config import loop_config
from titan_loop.models.loop_options import LoopOptions
from titan_loop.models.output import Collect, LoopOutput
from titan_loop.models.positions import PositionKind
from titan_loop.models.readout import LMHead, Vocabulary
from titan_loop.models.recurrence import Carry

State = Literal["discrete", "continuous"]
Corrupted = Literal["told", "due"]
InitialWeights = Literal["ouro", "torch", "by_rows"]

_ABSENT = (
    "exit_gate",
    "tie_weights",
    "scale_embeddings",
    "embedding_dropout",
    "injection",
    "prelude_layers",
)
"""Ouro's options that this recurrence does not have; they must keep their defaults."""

SIZES = {
    "debugmodel": ModelSize(64, 2, 4, 192, vocab_size=9),
    "small": ModelSize(128, 2, 4, 256, vocab_size=9),
    "l2_h16_d256": ModelSize(256, 2, 16, 704, vocab_size=25),
    "l4_h16_d384": ModelSize(384, 4, 16, 1024, vocab_size=25),
    "l8_h16_d256": ModelSize(256, 8, 16, 704, vocab_size=25),
}


@dataclass(kw_only=True, slots=True)
class LatentOptions(LoopOptions):
    """Options of a latent-space model; `vocab_size` is the size of the value factor."""

    family: FamilyName = field(default="latent", init=False)

    state: State = "discrete"
    """Input of a step: discrete, the embedded factors that the previous step predicts; continuous,
    the previous step's hidden state."""

    factors: tuple[int, int, int] | None = None
    """Numbers of syntax symbols, variables and operations; None takes the data's."""

    corruption: Annotated[float, Ge(0), Le(1)] = 0.0
    """Probability, in training, that some values of a graph are corrupted before a step of a
    discrete model; the paper's self-correction has 0.05."""

    corrupted_share: Annotated[float, Ge(0), Le(1)] = 0.5
    """Probability that each value that `corrupted` chooses is then replaced."""

    corrupted: Corrupted = "told"
    """Values that corruption may replace: told, worked out in the step before; or due, to be worked
    out in this step, as in the authors' code."""

    initial_weights: InitialWeights = "ouro"
    """Initial weights: ouro; torch, as `nn.Linear` and `nn.Embedding` draw them in the authors'
    code, with the vectors of distances on the scale of keys; or by_rows, as ouro, but the variance
    of a factor's embedding is its share of all rows, so that tokens of one name are alike whatever
    their values are."""

    scale_scores_by_terms: bool = False
    """Whether attention scores are divided by √(3·H) instead of √H, as in DeBERTa, where a score is
    the sum of three products."""

    exit_gate: bool = False
    """Must be False: the number of steps follows from the graph."""

    positions: PositionKind = "deberta"
    """Kind of positions: deberta adds two terms to a score, the query and the key each times a
    vector of their distance; or any other kind that Ouro has."""

    relative_window: Annotated[int | None, Ge(1)] = 64
    """Largest relative distance between positions; larger ones count as this one."""

    def canonical(self) -> dict[str, Any]:
        """Return the rotary base and the factors, by default the paper's."""
        return {**LoopOptions.canonical(self), "factors": self.factors or (5, 9, 2)}


class FactorEmbedding(Embedding):
    """The sum of one row of every factor's table."""

    @dataclass(kw_only=True, slots=True)
    class Config(Embedding.Config):
        """Number of rows in total, width, and number of rows per factor."""

        sizes: tuple[int, ...]

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.sizes = config.sizes

    def forward(self, input: Tensor) -> Tensor:
        """Map (B, L, factors) int64 to (B, L, D)."""
        first_F = input.new_tensor([sum(self.sizes[:factor]) for factor in range(len(self.sizes))])
        return super().forward(input + first_F).sum(dim=-2)


class _ValueRows(Vocabulary):
    """The rows of the value factor, which stand first."""

    def local(self, head_weight_VD: Tensor, hidden_RBLD: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        return head_weight_VD[: self.rows], tuple(hidden_RBLD)


class FactorHead(LMHead):
    """The readouts of all factors; logits and losses are the value's unless `factors` is set."""

    @dataclass(kw_only=True, slots=True)
    class Config(LMHead.Config):
        """Widths, and the number of rows per factor."""

        sizes: tuple[int, ...]

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.sizes = config.sizes
        self.vocabulary = _ValueRows(config.sizes[0])

    def forward(self, input: Any, *, factors: bool = False, **loss: Any) -> Any:
        """Return the same as `LMHead`; with `factors`, logits (B, L, V_f) of every factor.

        With `factors`, the input is one state, (B, L, D).
        """
        if factors:
            return F.linear(input, self.weight).split(self.sizes, dim=-1)
        if isinstance(input, Tensor):
            return F.linear(input, self.weight[: self.sizes[0]])
        return super().forward(input, **loss)


class Corruption(Drawing):
    """Replaces values of a discrete model, in training."""

    @dataclass(kw_only=True, slots=True)
    class Config(Drawing.Config):
        """Fields as in `LatentOptions`; `values` is the size of the value factor."""

        probability: float
        share: float
        values: int
        due: bool

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    def forward(self, value_TBL: Tensor, chosen_TBL: Tensor) -> Tensor:
        """Return the values, some of the chosen ones replaced by uniform draws.

        Args:
            value_TBL: Value factor before each step.
            chosen_TBL: Whether each value may be replaced.
        """
        device = value_TBL.device
        coin_TB1 = torch.rand(*value_TBL.shape[:2], 1, device=device) < self.config.probability
        each_TBL = torch.rand(value_TBL.shape, device=device) < self.config.share
        any_TBL = torch.randint_like(value_TBL, self.config.values)
        return torch.where(coin_TB1 & each_TBL & chosen_TBL, any_TBL, value_TBL)


class LatentDecoder(LoopDecoder):
    """A looped decoder of factored tokens; see the module's docstring."""

    @dataclass(kw_only=True, slots=True)
    class Config(LoopDecoder.Config):
        """Ouro's options, the kind of carry, and the corruption."""

        columns: ClassVar[tuple[str, ...]] = ("factors", "depth", "solved")

        state: State
        sizes: tuple[int, ...]
        corruption: Corruption.Config | None
        scale_scores_by_terms: bool

        @property
        def draws(self) -> bool:
            """Whether layers or the corruption draw random numbers in training."""
            return self.corruption is not None or any(layer.dropout for layer in self.layers)

        def check_spreading(self, **degrees: int) -> None:
            """Refuse all but data parallelism."""
            for name, degree in degrees.items():
                if degree > 1:
                    raise UserError(
                        f"parallelism.{name}_degree={degree} does not work with model.family="
                        "latent; leave it at 1"
                    )

        def own_flops(self, flops: Flops, recurrent_steps: float, reached: float) -> Flops:
            """As in the base class, with a readout of all factors in every step."""
            return flops._replace(readouts=6 * recurrent_steps * self.dim * sum(self.sizes))

    config: Config
    tok_embeddings: FactorEmbedding
    lm_head: FactorHead

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.discrete = config.state == "discrete"
        self.corruption = None if config.corruption is None else config.corruption.build()
        if config.scale_scores_by_terms:
            for layer in self.layers.values():
                assert isinstance(layer, DenseBlock)
                layer.attention.scaling = (3 * layer.attention.head_dim) ** -0.5

    def start(self, tokens: Tensor, context: LoopContext) -> Carry:
        """Return z^0 of a discrete model, else E^0."""
        assert context.columns is not None
        factors_BLF = torch.cat((tokens.unsqueeze(-1), context.columns["factors"]), dim=-1)
        return factors_BLF if self.discrete else self._embedded(factors_BLF, context)

    def input(self, carry: Carry, context: LoopContext) -> Tensor:
        """Return E^{t-1}, (B, L, D)."""
        return self._embedded(carry, context) if self.discrete else carry

    def _embedded(self, factors_BLF: Tensor, context: LoopContext) -> Tensor:
        return self.positions.embedded(self.tok_embeddings(factors_BLF), context.positions_BL)

    def advance(
        self, carry: Carry, hidden_BLD: Tensor, step: int | Tensor, context: LoopContext
    ) -> Carry:
        """Return z^t of a discrete model, else H^t."""
        if not self.discrete:
            return hidden_BLD
        logits = self.lm_head(self.read(hidden_BLD, context), factors=True)
        return torch.stack([logits_BLV.argmax(dim=-1) for logits_BLV in logits], dim=-1)

    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        attention_masks: AttentionMask | None = None,
        *,
        recurrent_steps: int | None = None,
        backward_steps: int | None = None,
        collect: Collect = "all",
        columns: Mapping[str, Tensor] | None = None,
    ) -> LoopOutput:
        """Run T steps, all at once if a discrete model trains; arguments as in the base class."""
        steps = self.recurrent_steps if recurrent_steps is None else recurrent_steps
        if not (self.training and self.discrete):
            return super().forward(
                tokens,
                positions,
                attention_masks,
                recurrent_steps=steps,
                backward_steps=backward_steps,
                collect=collect,
                columns=columns,
            )
        assert columns is not None
        folded = {
            name: values.repeat(steps, *[1] * (values.ndim - 1)) for name, values in columns.items()
        }
        positions = None if positions is None else positions.repeat(steps, 1)
        value_SL = self.told(columns, steps).flatten(0, 1)  # S = T·B rows
        context = self.make_context(value_SL, positions, columns=folded)
        (hidden_SLD,) = self.recurrence.run(self, self.start(value_SL, context), 1, context)
        states = self.state_gather(self.read(hidden_SLD, context)).chunk(steps)
        first_step = steps if collect == "last" else 1
        return LoopOutput(tuple(states[first_step - 1 :]), (), first_step)

    def told(self, columns: Mapping[str, Tensor], steps: int) -> Tensor:
        """Return the value factor before each of T steps, (T, B, L), corrupted in training."""
        depth_BL, solved_BL = columns["depth"], columns["solved"]
        before_T11 = torch.arange(steps, device=depth_BL.device).view(-1, 1, 1)
        value_TBL = torch.where(depth_BL <= before_T11, solved_BL, self.config.vocab_size - 2)
        if self.corruption is None or not self.training:
            return value_TBL
        chosen_T11 = before_T11 + int(self.corruption.config.due)
        return self.corruption(value_TBL, (depth_BL == chosen_T11) & (depth_BL > 0))


def decoder_config(
    options: LatentOptions, shape: ModelSize, max_seq_len: int
) -> LatentDecoder.Config:
    """Return the architecture; arguments as in `Family.decoder_config`."""
    require_usual(options, _ABSENT, "does not work with model.family=latent")
    if options.state == "continuous":
        problem = "needs the discrete values of model.state=discrete"
        require_usual(options, ("corruption",), problem)
    else:
        problem = "has no effect with model.state=discrete, which reads a state through the norm"
        require_usual(options, ("norm_placement",), problem)
    if options.positions != "deberta":
        problem = f"needs the terms of model.positions=deberta, not {options.positions}"
        require_usual(options, ("scale_scores_by_terms",), problem)
    sizes = (shape.vocab_size, *(options.factors or ()))
    head = FactorHead.Config(
        in_features=shape.dim,
        out_features=sum(sizes),
        param_init={"weight": partial(normal_matrix, std=options.initializer_range)},
        sizes=sizes,
    )
    if options.readout_chunk_tokens is not None:
        head.chunk_tokens = options.readout_chunk_tokens
    embedding = FactorEmbedding.Config(
        num_embeddings=sum(sizes),
        embedding_dim=shape.dim,
        param_init={"weight": partial(normal_matrix, std=len(sizes) ** -0.5)},
        sizes=sizes,
    )
    corruption = Corruption.Config(
        probability=options.corruption,
        share=options.corrupted_share,
        values=shape.vocab_size,
        due=options.corrupted == "due",
    )
    config = loop_config(
        LatentDecoder.Config,
        options,
        shape,
        max_seq_len,
        tok_embeddings=embedding,
        lm_head=head,
        state=options.state,
        sizes=sizes,
        corruption=corruption if options.corruption else None,
        scale_scores_by_terms=options.scale_scores_by_terms,
    )
    if options.initial_weights == "torch":
        _start_as_in_torch(config)
    elif options.initial_weights == "by_rows":
        weight = partial(draw, fill=partial(_by_rows, sizes=sizes))
        config.tok_embeddings.param_init = {"weight": weight}
    return config


def _start_as_in_torch(config: LatentDecoder.Config) -> None:
    """Give every weight the distribution that it has in the authors' code.

    Their table of distances is normed, then projected like keys, so its elements have variance 1/3.
    """
    linear = {"weight": partial(draw, fill=_as_linear)}
    for layer in config.layers:
        attention, feed_forward = layer.attention, layer.feed_forward
        for each in (
            attention.qkv_linear.wq,
            attention.qkv_linear.wkv,
            attention.wo,
            feed_forward.w1,
            feed_forward.w2,
            feed_forward.w3,
        ):
            each.param_init = linear
        if attention.distance_scores is not None:
            distances = {"weight": partial(normal_matrix, std=3**-0.5)}
            attention.distance_scores.param_init = distances
    config.lm_head.param_init = linear
    config.tok_embeddings.param_init = {"weight": partial(normal_matrix, std=1.0)}


def _by_rows(whole: Tensor, *, sizes: Sequence[int]) -> None:
    for rows in whole.split(sizes):
        nn.init.normal_(rows, std=(len(rows) / len(whole)) ** 0.5)


def _as_linear(whole: Tensor) -> None:
    bound = whole.shape[-1] ** -0.5
    nn.init.uniform_(whole, -bound, bound)


LATENT = Family(
    name="latent",
    options=LatentOptions,
    sizes=SIZES,
    decoder_config=decoder_config,
    uses=frozenset({"analyse"}),
    exit_policies=frozenset({"static"}),
    runtime_options=RUNTIME_OPTIONS
    | {"corruption", "corrupted_share", "corrupted", "initial_weights"},
    data_options=frozenset({"vocab_size", "factors"}),
)
