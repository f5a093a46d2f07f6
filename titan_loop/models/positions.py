"""Positions of tokens: they act at the embedding, on queries and keys, or on the scores.

| kind | where it acts | parameters |
|---|---|---|
| `RotaryPositions` | rotates queries and keys, by rows that all visits share | none |
| `LearnedPositions` | is added to the embedding | a row per position |
| `RelativePositions` | adds to the scores, by distance | a table per layer, see `SCORES` |
| `Positions` | nowhere: order is seen through the causal mask alone | none |

Tables that depend on positions alone belong to the decoder, are made once per forward pass and
travel in the `LoopContext`; upstream gathers rows at every visit of a layer.

Source: rotation: Su et al. 2021, arXiv 2104.09864, in the split-half pairing of the released Ouro
checkpoints; distances: Shaw et al. 2018, arXiv 1803.02155, §3.2, Eq. 4 (keys only).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models.common.embedding import Embedding
from torchtitan.models.common.rope import RoPE
from torchtitan.protocols.module import Module, ModuleList

from titan_loop.errors import UserError
from titan_loop.models.initialisation import local_part
from titan_loop.models.parameter_groups import LookUp
from titan_loop.models.rotary import Rotation, RotationTable

PositionKind: TypeAlias = Literal["rope", "learned", "relative", "deberta", "bias", "none"]
"""Kinds of positions; `LoopOptions.positions` explains each."""


class Positions(Module):
    """Positions that act nowhere; the base of the other kinds."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        def check_window(self, tokens: int) -> None:
            """Raise `UserError` if windows of `tokens` tokens exceed a table."""

        def scores(
            self, head_dim: int, n_heads: int, matrix: dict[str, Callable]
        ) -> "DistanceScores.Config | None":
            """Return the part of a layer's scores that depends on distances, if there is one."""
            return None

    def __init__(self, config: Config, *, rope: RoPE.Config) -> None:
        super().__init__()

    def tables(self) -> tuple[nn.Module, ...]:
        """Return the modules with parameters that `embedded` looks up."""
        return ()

    def embedded(self, embedding_BLD: Tensor, positions_BL: Tensor) -> Tensor:
        """Return the embedding, with position vectors added where the kind has them."""
        return embedding_BLD

    def shared(self, positions_BL: Tensor, key_positions_BS: Tensor) -> Tensor | None:
        """Return the tables that every layer visit reads.

        The positions of queries, (B or 1, L), and of the keys that they may attend to, (B or 1, S),
        restart per document.
        """
        return None


class RotaryPositions(Positions):
    """Rotations of queries and keys."""

    @dataclass(kw_only=True, slots=True)
    class Config(Positions.Config):
        """The rotations of which each layer has one; none: one with the layers' base."""

        rotations: tuple[Rotation, ...] = ()

    def __init__(self, config: Config, *, rope: RoPE.Config) -> None:
        super().__init__(config, rope=rope)
        rotations = config.rotations or (Rotation(dim=rope.dim, theta=rope.theta),)
        tables = [
            RotationTable.Config(dim=each.dim, max_seq_len=rope.max_seq_len, rotation=each).build()
            for each in rotations
        ]
        self.table = tables[0]
        self.others = ModuleList(tables[1:])

    def shared(self, positions_BL: Tensor, key_positions_BS: Tensor) -> Tensor:
        """Return (B or 1, L, 1, n·2·H) fp32: cosines, then sines, of each of n rotations."""
        modules: list[Any] = [self.table, *self.others]
        tables = [module.cache[positions_BL] for module in modules]
        return (tables[0] if len(tables) == 1 else torch.cat(tables, dim=-1)).unsqueeze(2)


class PositionTable(Embedding):
    """Learned vectors; replicated under tensor parallelism, unlike token embeddings."""

    @dataclass(kw_only=True, slots=True)
    class Config(Embedding.Config):
        pass

    def forward(self, input: Tensor) -> Tensor:
        """Return (B, L, D) rows of (B, L) positions."""
        return F.embedding(input, local_part(self.weight))


class LearnedPositions(Positions):
    """A learned vector per position, added to the embedding."""

    @dataclass(kw_only=True, slots=True)
    class Config(Positions.Config):
        table: PositionTable.Config

        def check_window(self, tokens: int) -> None:
            """Refuse a window that is longer than the table."""
            if tokens > self.table.num_embeddings:
                rows = f"model.learned_positions={self.table.num_embeddings}"
                problem = f"{rows} is less than the {tokens} tokens of a window"
                raise UserError(f"{problem}; shorten the window, or train a model with more")

    def __init__(self, config: Config, *, rope: RoPE.Config) -> None:
        super().__init__(config, rope=rope)
        self.table = config.table.build()

    def tables(self) -> tuple[nn.Module, ...]:
        return (self.table,)

    def embedded(self, embedding_BLD: Tensor, positions_BL: Tensor) -> Tensor:
        return embedding_BLD + self.table(positions_BL).to(embedding_BLD.dtype)


class RelativePositions(Positions):
    """Distances between query and key, clipped to a window, which the layers' scores read."""

    @dataclass(kw_only=True, slots=True)
    class Config(Positions.Config):
        kind: PositionKind = "relative"
        window: int

        def scores(
            self, head_dim: int, n_heads: int, matrix: dict[str, Callable]
        ) -> "DistanceScores.Config":
            """Return the scores of this kind; a bias starts at zero, vectors like matrices."""
            zeros = {"bias": nn.init.zeros_}
            return SCORES[self.kind].Config(
                window=self.window,
                head_dim=head_dim,
                n_heads=n_heads,
                param_init=zeros if self.kind == "bias" else matrix,
            )

    def __init__(self, config: Config, *, rope: RoPE.Config) -> None:
        super().__init__(config, rope=rope)
        self.window = config.window

    def shared(self, positions_BL: Tensor, key_positions_BS: Tensor) -> Tensor:
        """Return (B or 1, L, S) distances from 0 to the window; arbitrary where masked."""
        return (positions_BL.unsqueeze(2) - key_positions_BS.unsqueeze(1)).clamp(0, self.window)


class DistanceScores(LookUp, Module):
    """A layer's scores by distance: q_i · a_δ, δ = min(i − j, window); its heads share a."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        window: int
        head_dim: int
        n_heads: int
        scale: float | None = None

        products: ClassVar[int] = 1
        """Products of a head with a table: of its queries, and of its keys."""

        @property
        def matrix_elements(self) -> int:
            """Number of weights that a token's heads are multiplied by."""
            return self.products * self.n_heads * self.head_dim * (self.window + 1)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.window + 1, config.head_dim))

    def forward(self, q_BLNH: Tensor, k_BLNH: Tensor, distance_BLS: Tensor) -> Tensor:
        """Return (B, N, L, S) scores before they are scaled."""
        by_distance_BNLW = (q_BLNH @ self.weight.to(q_BLNH.dtype).T).transpose(1, 2)
        shape = (*by_distance_BNLW.shape[:3], distance_BLS.shape[-1])
        return by_distance_BNLW.gather(-1, distance_BLS.unsqueeze(1).expand(shape))


def every_head(x_BLKH: Tensor, n_heads: int) -> Tensor:
    """Repeat keys or values (B, L, K, H) for the query heads that share them."""
    groups = n_heads // x_BLKH.shape[2]
    return x_BLKH if groups == 1 else x_BLKH.repeat_interleave(groups, dim=2)


class DebertaScores(DistanceScores):
    """Scores by distance, of queries and of keys: q_i · a_δ + k_j · b_δ, with a and b per head.

    Source: He et al. 2021 (DeBERTa), arXiv 2006.03654, Eq. 4. Deviations: a and b are parameters of
        each layer, where the paper projects a table that layers share; a causal model has no
        negative distance.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(DistanceScores.Config):
        products: ClassVar[int] = 2

    def __init__(self, config: Config) -> None:
        Module.__init__(self)
        self.weight = nn.Parameter(
            torch.empty(2, config.n_heads, config.head_dim, config.window + 1)
        )

    def forward(self, q_BLNH: Tensor, k_BLNH: Tensor, distance_BLS: Tensor) -> Tensor:
        of_query_NHW, of_key_NHW = self.weight.to(q_BLNH.dtype)
        query_BNLW = q_BLNH.transpose(1, 2) @ of_query_NHW
        k_BLNH = every_head(k_BLNH, q_BLNH.shape[2])
        key_BNSW = k_BLNH.transpose(1, 2) @ of_key_NHW
        distance_B1LS = distance_BLS.unsqueeze(1)
        shape = (*query_BNLW.shape[:3], distance_BLS.shape[-1])
        by_query_BNLS = query_BNLW.gather(-1, distance_B1LS.expand(shape))
        shape = (*key_BNSW.shape[:3], distance_BLS.shape[1])
        by_key_BNSL = key_BNSW.gather(-1, distance_B1LS.transpose(2, 3).expand(shape))
        return by_query_BNLS + by_key_BNSL.transpose(2, 3)


class BiasScores(DistanceScores):
    """Scores by distance alone: every head has a number for each distance.

    Source: Raffel et al. 2020 (T5), arXiv 1910.10683, §2.1. Deviations: the numbers are parameters
        of each layer; every distance up to the window has its own number, not buckets.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(DistanceScores.Config):
        products: ClassVar[int] = 0

    def __init__(self, config: Config) -> None:
        Module.__init__(self)
        self.bias = nn.Parameter(torch.empty(config.n_heads, config.window + 1))
        self.factor = config.head_dim**0.5 if config.scale is None else 1 / config.scale

    def forward(self, q_BLNH: Tensor, k_BLNH: Tensor, distance_BLS: Tensor) -> Tensor:
        """Return (B, N, L, S) scores before they are scaled, which the factor undoes."""
        scores_BNLS = (self.bias[:, distance_BLS] * self.factor).transpose(0, 1)
        return scores_BNLS.to(q_BLNH.dtype).expand(len(q_BLNH), -1, -1, -1)


SCORES: dict[str, type[DistanceScores]] = {
    "relative": DistanceScores,
    "deberta": DebertaScores,
    "bias": BiasScores,
}
"""The class of a layer's scores by distance, by kind of positions."""


class RotateHalf(RoPE):
    """Rotates queries and keys by the table rows of their positions; has no table of its own.

    Computes in at least fp32 and keeps float64, which upstream rounds to fp32.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoPE.Config):
        """Width, length and base of the decoder's table, where upstream looks for them.

        `table` is its number among the decoder's rotations. Elements of a head beyond `dim` keep
        their values.
        """

        table: int = 0

    def __init__(self, config: Config) -> None:
        Module.__init__(self)
        self.config = config

    def forward(  # type: ignore[override]  rows instead of positions
        self, query: Tensor, key: Tensor, *, rope_BLH: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rotate `query` and `key`, both (B, L, N, H); shapes and dtypes are kept."""
        return self.rotated(query, rope_BLH), self.rotated(key, rope_BLH)

    def rotated(self, x_BLNH: Tensor, rope_BLH: Tensor) -> Tensor:
        """Rotate all heads of a tensor; shape and dtype are kept."""
        dim = self.config.dim
        if rope_BLH.shape[-1] != 2 * dim:
            rope_BLH = rope_BLH.narrow(-1, self.config.table * 2 * dim, 2 * dim)
        cos, sin = rope_BLH.chunk(2, dim=-1)
        turned = x_BLNH if dim == x_BLNH.shape[-1] else x_BLNH[..., :dim]
        wide = turned.to(torch.promote_types(x_BLNH.dtype, torch.float32))
        turned = (wide * cos + wide.roll(dim // 2, -1) * sin).to(x_BLNH.dtype)
        if dim == x_BLNH.shape[-1]:
            return turned
        return torch.cat((turned, x_BLNH[..., dim:]), dim=-1)

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        """Nothing to initialise: the table is the decoder's."""


class NoRotation(RotateHalf):
    """Leaves queries and keys as they are."""

    @dataclass(kw_only=True, slots=True)
    class Config(RotateHalf.Config):
        pass

    def forward(  # type: ignore[override]
        self, query: Tensor, key: Tensor, *, rope_BLH: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return query, key

    def rotated(self, x_BLNH: Tensor, rope_BLH: Tensor | None) -> Tensor:  # type: ignore[override]
        return x_BLNH
