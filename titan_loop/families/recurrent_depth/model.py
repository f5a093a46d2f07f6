"""Recurrent depth: GPT-2's blocks applied R times; a pass starts as the identity.

    h_0 = E[x] + P[position],   h_r = block_N(… block_1(h_{r−1}) …),   logits = E norm(h_R)

Blocks are GPT-2's (`models/gpt2_block.py`). There is no norm between steps; final norm and tied
head are applied at the readout only. The paper has learned positions (P) for systematic
generalisation, and none for depth extrapolation.

Initialisation: a block's two output projections, with their biases, are zero, so that R
steps are the identity for any R. The other matrices are normal with standard deviation
0.02 √(768/D), which is GPT-2's 0.02 at its width of 768 and gives projections the same gain at
every width; they are truncated at three standard deviations. The authors' code draws embeddings and
positions from N(0, 1) (`initial_tables=unit`).

Source: recurrent-depth transformers, arXiv 2604.07822, §4, and its authors' code. Deviations: the
truncation; output projections start at zero in every experiment, where their code draws them like
other matrices in those on systematic generalisation; no dropout unless `dropout` is set. Theirs is
0.1, but acts only in the first epoch of a run or level, because their exams leave the model in
evaluation mode.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt

from titan_loop.errors import UserError
from titan_loop.models.family import (
    RUNTIME_OPTIONS,
    Family,
    FamilyName,
    ModelOptions,
    ModelSize,
    require_usual,
)
from titan_loop.models.gpt2_block import (
    ZERO,
    GPT2Decoder,
    block_config,
    gpt2_config,
    matrix_init,
)
from titan_loop.models.initialisation import normal_matrix
from titan_loop.models.loop_options import PLAIN_LOOP
from titan_loop.models.positions import (
    LearnedPositions,
    NoRotation,
    Positions,
    PositionTable,
)

SIZES = {
    "debugmodel": ModelSize(64, 2, 4, 256, vocab_size=128, recurrent_steps=3),
    "small": ModelSize(128, 2, 4, 512, vocab_size=256),
    "published": ModelSize(768, 4, 12, 3072, vocab_size=2200),
}


AbsolutePositions = Literal["learned", "none"]
InitialTables = Literal["matrix", "unit"]


@dataclass(kw_only=True, slots=True)
class RecurrentDepthOptions(ModelOptions):
    """Options of recurrent-depth models."""

    family: FamilyName = field(default="recurrent_depth", init=False)

    exit_gate: bool = False
    """Must be False: the family has no exit gate."""

    tie_weights: bool = True
    """Whether embedding and head share one matrix."""

    positions: AbsolutePositions = "none"
    """Kind of positions: learned adds a vector to the embedding, none leaves order to the causal
    mask."""

    learned_positions: Annotated[int | None, Ge(1)] = None
    """Rows of the table of learned positions, at least the tokens of a window."""

    initial_tables: InitialTables = "matrix"
    """Initial embedding, tied head and learned positions: matrix draws them like other matrices,
    unit from N(0, 1)."""

    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of the outputs of attention and feed-forward that is zeroed in training, before they
    are added to the state."""

    def implied(self) -> Mapping[str, Any]:
        """Return the record of a plain loop."""
        return PLAIN_LOOP


def _table(options: RecurrentDepthOptions, shape: ModelSize) -> dict[str, Callable]:
    if options.initial_tables == "unit":
        return {"weight": partial(normal_matrix, std=1.0)}
    return matrix_init(shape.dim)


def _positions(options: RecurrentDepthOptions, shape: ModelSize) -> Positions.Config:
    kind, rows = options.positions, options.learned_positions
    if kind == "none":
        require_usual(options, ("learned_positions",), "has no effect with model.positions=none")
        return Positions.Config()
    if rows is None:
        raise UserError("model.positions=learned needs model.learned_positions")
    table = PositionTable.Config(
        num_embeddings=rows, embedding_dim=shape.dim, param_init=_table(options, shape)
    )
    return LearnedPositions.Config(table=table)


def decoder_config(
    options: RecurrentDepthOptions, shape: ModelSize, max_seq_len: int
) -> GPT2Decoder.Config:
    """Return the architecture; arguments as in `Family.decoder_config`."""
    require_usual(options, ("exit_gate",), "does not work with model.family=recurrent_depth")
    positions = _positions(options, shape)
    positions.check_window(max_seq_len)
    head_dim, table = shape.dim // shape.n_heads, _table(options, shape)
    rotation = NoRotation.Config(dim=head_dim, max_seq_len=max_seq_len)
    return gpt2_config(
        GPT2Decoder.Config,
        options,
        shape,
        table=table,
        layers=[
            block_config(shape, options.attention, rotation, ZERO, dropout=options.dropout)
            for _ in range(shape.n_layers)
        ],
        positions=positions,
    )


RECURRENT_DEPTH = Family(
    name="recurrent_depth",
    options=RecurrentDepthOptions,
    sizes=SIZES,
    decoder_config=decoder_config,
    uses=frozenset({"analyse", "generate", "held_out"}),
    runtime_options=RUNTIME_OPTIONS | {"initial_tables"},
)
