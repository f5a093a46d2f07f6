"""Memory banks: learned keys and values that every token reads, and the gates that let them in.

    m = softmax(LN_q(h) LN_k(K)ᵀ / √D) V          a bank (K, V), read by a layer
    h ← h + g_L ⊙ W_L m_L + g_G ⊙ W_G m_G        g = σ(W_g h + b_g)

| symbol | code |
|---|---|
| K, V, LN_k | `MemoryBank`: a layer's own (L), or one that all layers share (G) |
| LN_q, W_L, W_G | `BankReader`, one per layer and bank |
| g | `MemoryGates`, in fp32: one number per token and bank |

A bank is a parameter, not a cache: nothing of a text is stored in it. Its norms have a gain and no
bias.

Source: Frey et al. 2026, "Adaptive loops and memory in transformers", §2.2, Eq. 6–10.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.protocols.module import Module


class MemoryBank(Module):
    """M learned keys and values of width D."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """M and D."""

        slots: int
        dim: int

        @property
        def matrix_elements(self) -> int:
            """Number of weights that one read multiplies, including the reader's W and its gate."""
            return 2 * self.slots * self.dim + self.dim**2 + self.dim

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.dim = config.dim
        self.keys = nn.Parameter(torch.empty(config.slots, config.dim))
        self.values = nn.Parameter(torch.empty(config.slots, config.dim))
        self.key_gain = nn.Parameter(torch.empty(config.dim))

    def forward(self, query_BLD: Tensor) -> Tensor:
        """Return the values read by tokens with these normed queries, (B, L, D)."""
        keys_MD = F.layer_norm(self.keys, (self.dim,), self.key_gain)
        score_BLM = F.linear(query_BLD, keys_MD) * self.dim**-0.5
        share_BLM = score_BLM.softmax(dim=-1, dtype=wide_dtype(score_BLM))
        return F.linear(share_BLM.to(query_BLD.dtype), self.values.T)


class BankReader(Module):
    """One layer's query norm and output projection W for one bank."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """D."""

        dim: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.query_gain = nn.Parameter(torch.empty(config.dim))
        self.output = nn.Parameter(torch.empty(config.dim, config.dim))

    def forward(self, hidden_BLD: Tensor, bank: MemoryBank) -> Tensor:
        """Return W m, (B, L, D), in the dtype of the weights."""
        hidden_BLD = hidden_BLD.to(self.query_gain.dtype)
        query_BLD = F.layer_norm(hidden_BLD, self.query_gain.shape, self.query_gain)
        return F.linear(bank(query_BLD), self.output)


class MemoryGates(Module):
    """Adds the outputs of K banks to the state, each through its gate."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """K banks and width D."""

        banks: int
        dim: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.banks, config.dim))
        self.bias = nn.Parameter(torch.empty(config.banks))

    # Not *read_KBLD: torchtitan's `Module.parallelize` drops positional arguments without a name.
    def forward(
        self, hidden_BLD: Tensor, read_KBLD: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the enriched state, in the wider dtype, and every bank's gate, (B, L, 1).

        Args:
            hidden_BLD: h.
            read_KBLD: W m of each bank.
        """
        gate_BLK = F.linear(hidden_BLD.to(self.weight.dtype), self.weight, self.bias).sigmoid()
        gates, enriched_BLD = gate_BLK.split(1, dim=-1), hidden_BLD
        for gate_BL1, read_BLD in zip(gates, read_KBLD, strict=True):
            enriched_BLD = enriched_BLD + gate_BL1 * read_BLD
        return enriched_BLD, tuple(gate_BL1.detach() for gate_BL1 in gates)


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """Return fp32, or float64 for a float64 tensor."""
    return torch.promote_types(tensor.dtype, torch.float32)
