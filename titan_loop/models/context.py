"""State that all layer visits of one forward pass share: rotations, mask, perhaps a cache."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torchtitan.models.common.attention import VarlenMetadata

from titan_loop.models.joined import Joined

PREFIX = "prefix"
"""Column (B, L) that marks a document's prefix; its tokens attend to the whole prefix."""


class WindowedMasks(NamedTuple):
    """The masks of a model in which some layers see a window of the latest keys alone.

    `whole` is None where a query sees all keys.
    """

    whole: Tensor | BlockMask | None
    window: Tensor | BlockMask


AttentionMask = Tensor | BlockMask | VarlenMetadata | WindowedMasks


class WindowShare(NamedTuple):
    """Indices into every window: of this rank's tokens, and of all tokens in the keys' order."""

    queries_L: Tensor
    keys_L: Tensor


class CacheSlot(NamedTuple):
    """Address of one layer visit in a cache.

    `step` counts from 1; it is a (B,) tensor when rows are at different steps, None outside the
    loop. `layer` counts from 0, among the looped layers or among those outside the loop.
    """

    step: int | Tensor | None
    layer: int


class Entries(NamedTuple):
    """Keys or values where they stand in a cache, of rows with one query each.

    Attributes:
        table_TH: Entries of single heads.
        seen_MT: Sparse rows whose S stored columns are the entries that a head's query sees, for
            M = B·N heads.
    """

    table_TH: Tensor
    seen_MT: Tensor


class KeyValueCache(Protocol):
    """Keeps keys and values of earlier tokens for every (recurrent step, layer)."""

    def update(self, slot: CacheSlot, k_BLNH: Tensor, v_BLNH: Tensor) -> tuple[Any, Any]:
        """Append the current tokens' rotated keys and values; return all that may be seen.

        Both are (B, S, N, H) tensors, or `Entries` for attention that `reads_entries`.
        """
        ...

    def latest(self, slot: CacheSlot, part: int, x_BLC: Tensor) -> Tensor:
        """Append the current tokens' inputs of a short convolution, behind those it still reads.

        `part` is its number in the layer. Returns (B, taps − 1 + L, C); what stands before a row's
        first token is arbitrary.
        """
        ...


class LoopContext(NamedTuple):
    """A pytree handed unchanged to every layer visit.

    Attributes:
        positions_BL: (B or 1, L) positions of the current tokens.
        shared_positions: Tables that the layers read, from `Positions.shared`.
        attention_mask: None for causal attention that ignores document boundaries.
        columns: Further model inputs of the batch, by name.
        joined: By a layer's index, its matrices of this pass; None multiplies by each of them.
        said_BLV: Log-probabilities of the next token that the engine read from the previous step,
            if it did; a family that feeds them back need not compute them again.
    """

    positions_BL: Tensor
    shared_positions: Tensor | None
    attention_mask: AttentionMask | None = None
    cache: KeyValueCache | None = None
    columns: Mapping[str, Tensor] | None = None
    said_BLV: Tensor | None = None
    joined: Mapping[int, Joined] | None = None
