"""A layer that loops as often as each token needs, and reads learned memory.

    h⁽ᵗ⁾ = h⁽ᵗ⁻¹⁾ + softplus(α_t) · Block(LN(h⁽ᵗ⁻¹⁾))                      t = 1 … N_max
    p_t = σ(W_h [h⁽ᵗ⁾; t/N_max] + b_h)
    p_halt⁽ᵗ⁾ = p_t Π_{i<t} (1 − p_i),   h_out = Σ_t p_halt⁽ᵗ⁾ h⁽ᵗ⁾,   E[n] = Σ_t t · p_halt⁽ᵗ⁾

The last iteration takes the mass that is left, so that Σ p_halt = 1; the printed equation shrinks
the state.

| symbol | code |
|---|---|
| Block | `block`, with its own norms and residual sums; the whole layer if it does not loop |
| LN | `loop_norm` |
| α_t; W_h, b_h | `LoopControl`, in fp32 |
| banks | `memory_bank.py`; read once, after the loop |

Inside the loop the state is fp32 even with a bf16 block. At the start softplus(α) = 9e-4, and bf16
would round the update away.

Source: Frey et al. 2026, "Adaptive loops and memory in transformers", §2.1, Eq. 3–5; halting after
Banino et al. 2021 (PonderNet).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models.common.nn_modules import LayerNorm
from torchtitan.protocols.module import Module, ModuleList

from titan_loop.families.adaptive.memory_bank import BankReader, MemoryBank, MemoryGates, wide_dtype
from titan_loop.models.attention import LoopAttention
from titan_loop.models.context import CacheSlot, LoopContext
from titan_loop.models.gpt2_block import GPT2Block


class LayerReport(NamedTuple):
    """Measurements of one layer's forward pass.

    Attributes:
        iterations_BL1: E[n]; None without loops.
        scales: softplus(α_t), N_max detached tensors (1,).
        gates: Gate of every bank, (B, L, 1) each, detached.
    """

    iterations_BL1: Tensor | None = None
    scales: tuple[Tensor, ...] = ()
    gates: tuple[Tensor, ...] = ()


class LoopControl(Module):
    """Loop scales and halting router of one layer."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """D and N_max."""

        dim: int
        max_iterations: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(config.max_iterations))
        self.weight = nn.Parameter(torch.empty(config.dim))
        self.step_weight = nn.Parameter(torch.empty(1))
        self.bias = nn.Parameter(torch.empty(1))

    def forward(
        self, hidden_BLD: Tensor, branch_BLD: Tensor, iteration: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return h⁽ᵗ⁾, p_t as (B, L, 1) and softplus(α_t).

        Args:
            hidden_BLD: h⁽ᵗ⁻¹⁾.
            branch_BLD: Block(LN(h⁽ᵗ⁻¹⁾)).
        """
        scale_1 = F.softplus(self.scale[iteration - 1 : iteration])
        hidden_BLD = hidden_BLD + scale_1 * branch_BLD
        progress = iteration / len(self.scale)
        logit_BL1 = (hidden_BLD * self.weight).sum(dim=-1, keepdim=True)
        logit_BL1 = logit_BL1 + progress * self.step_weight + self.bias
        return hidden_BLD, logit_BL1.sigmoid(), scale_1.detach()


class AdaptiveLayer(Module):
    """A block with an optional loop and optional memory."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Parts of the layer; `readers` has one for each bank, its own before the shared one."""

        block: GPT2Block.Config
        loop_norm: LayerNorm.Config | None = None
        control: LoopControl.Config | None = None
        bank: MemoryBank.Config | None = None
        shared_bank: MemoryBank.Config | None = None
        readers: tuple[BankReader.Config, ...] = ()
        gates: MemoryGates.Config | None = None

        @property
        def attention(self) -> Any:
            """The block's attention."""
            return self.block.attention

        @property
        def feed_forward(self) -> Any:
            """The block's feed-forward part."""
            return self.block.feed_forward

        @property
        def dropout(self) -> Any:
            """The block's dropout."""
            return self.block.dropout

        @property
        def iterations(self) -> int:
            """N_max, or 1."""
            return 1 if self.control is None else self.control.max_iterations

        @property
        def banks(self) -> list[MemoryBank.Config]:
            """The banks that the layer reads."""
            return [bank for bank in (self.bank, self.shared_bank) if bank is not None]

        @property
        def matrix_elements(self) -> int:
            """As in `DenseBlock`, for one iteration without memory."""
            return self.block.matrix_elements

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.block = config.block.build()
        self.loop_norm = None if config.loop_norm is None else config.loop_norm.build()
        self.control = None if config.control is None else config.control.build()
        self.bank = None if config.bank is None else config.bank.build()
        self.readers = ModuleList([reader.build() for reader in config.readers])
        self.gates = None if config.gates is None else config.gates.build()

    @property
    def attention(self) -> LoopAttention:
        """The block's attention."""
        return self.block.attention

    def forward(
        self,
        hidden_BLD: Tensor,
        context: LoopContext,
        slots: tuple[CacheSlot | None, ...],
        shared_bank: MemoryBank | None = None,
    ) -> tuple[Tensor, LayerReport]:
        """Return the state after the layer, and its report.

        Args:
            slots: Addresses in the cache, one for each iteration.
        """
        if self.control is None:
            hidden_BLD, report = self.block(hidden_BLD, context, slots[0]), LayerReport()
        else:
            hidden_BLD, report = self._mixed(hidden_BLD.to(wide_dtype(hidden_BLD)), context, slots)
        if self.gates is None:
            return hidden_BLD, report
        banks = [bank for bank in (self.bank, shared_bank) if bank is not None]
        read = [reader(hidden_BLD, bank) for reader, bank in zip(self.readers, banks, strict=True)]
        enriched_BLD, gates = self.gates(hidden_BLD, read)
        return enriched_BLD.to(hidden_BLD.dtype), report._replace(gates=gates)

    def _normed(self, hidden_BLD: Tensor) -> Tensor:
        assert self.loop_norm is not None
        return self.loop_norm(hidden_BLD.to(self.loop_norm.weight.dtype))

    def _mixed(
        self,
        hidden_BLD: Tensor,
        context: LoopContext,
        slots: tuple[CacheSlot | None, ...],
    ) -> tuple[Tensor, LayerReport]:
        """Return Σ_t p_halt⁽ᵗ⁾ h⁽ᵗ⁾."""
        assert self.control is not None
        left_BL1 = torch.ones_like(hidden_BLD[..., :1])
        out_BLD, iterations_BL1 = torch.zeros_like(hidden_BLD), torch.zeros_like(left_BL1)
        scales = []
        for iteration, slot in enumerate(slots, start=1):
            branch_BLD = self.block(self._normed(hidden_BLD), context, slot)
            hidden_BLD, halts_BL1, scale = self.control(hidden_BLD, branch_BLD, iteration)
            scales.append(scale)
            halted_BL1 = left_BL1 if iteration == len(slots) else halts_BL1 * left_BL1
            left_BL1 = left_BL1 - halted_BL1
            out_BLD = out_BLD + halted_BL1 * hidden_BLD
            iterations_BL1 = iterations_BL1 + iteration * halted_BL1
        return out_BLD, LayerReport(iterations_BL1, tuple(scales))
