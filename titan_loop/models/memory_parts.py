"""Memory that a micro-batch keeps for its backward pass, part by part and token by token.

A decoder lists its parts (`LoopDecoder.Config.memory_parts`); the estimate of memory and `plan` add
them up, so neither knows what a family consists of. How much of a part is kept depends on what
activation checkpointing recomputes it with:

| policy | a part recomputed with its layer | with its step | never |
|---|---|---|---|
| none | `whole` | `whole` | `whole` |
| selective | `selected` | `whole` | `whole` |
| full | `input` | `whole` | `whole` |
| full-offload | on the host: `input` | `whole` | `whole` |
| recurrent-step | nothing | nothing | `whole` |
"""

from typing import Literal, NamedTuple, Protocol


class Spread(Protocol):
    """What the bytes of one token depend on beside the architecture."""

    @property
    def compute_bytes(self) -> int:
        """Bytes of a value in the forward pass: 2 for bf16, 4 for fp32."""
        ...

    @property
    def seq_len(self) -> int:
        """Tokens of a whole window."""
        ...

    @property
    def recurrent_steps(self) -> int:
        """R."""
        ...

    @property
    def tensor_parallel_degree(self) -> int:
        """Number of ranks that share a layer's matrices and the sequence between them."""
        ...

    @property
    def context_parallel_degree(self) -> int:
        """Number of ranks that share a window."""
        ...

    @property
    def fused_norms(self) -> bool:
        """Whether a norm is one kernel, or composed of several."""
        ...


class LayerBytes(NamedTuple):
    """Bytes per token that one visit of a layer keeps.

    Attributes:
        whole: With nothing recomputed.
        selected: Under selective checkpointing.
        input: With the layer recomputed from its input.
    """

    whole: float
    selected: float
    input: float


class MemoryPart(NamedTuple):
    """What a part of a decoder keeps, in bytes per token and visit.

    Attributes:
        kept: Bytes of one visit; of a part that is no layer only `whole` counts.
        visited: Once a micro-batch, in every step that the backward pass reaches, or for every
            state, whether the backward pass reaches its step or not.
        recomputed: What it is recomputed with, if activation checkpointing recomputes that.
        visits: Number of visits, in every step if it is visited in each.
    """

    kept: LayerBytes
    visited: Literal["once", "step", "state"]
    recomputed: Literal["layer", "step", "never"]
    visits: int = 1


def part(
    whole: float,
    visited: Literal["once", "step", "state"],
    recomputed: Literal["step", "never"] = "never",
) -> MemoryPart:
    """Return a part that is no layer."""
    return MemoryPart(LayerBytes(whole, whole, whole), visited, recomputed)


class ReadoutMemory(NamedTuple):
    """What is alive while the streamed loss is computed.

    Attributes:
        chunk_bytes: Logits that exist at a time.
        head_elements: Rows and columns of the head on one rank.
        state_gradient_bytes: Gradients of all states that are read.
    """

    chunk_bytes: float
    head_elements: float
    state_gradient_bytes: float


def norm_bytes(dim: int, spread: Spread) -> float:
    """Return what a norm of width D keeps: its input if fused, that and more in fp32 if not."""
    per_value = spread.compute_bytes if spread.fused_norms else 2 * 4
    return per_value * dim / spread.tensor_parallel_degree
