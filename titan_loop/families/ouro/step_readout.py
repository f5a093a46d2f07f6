"""A light readout for each recurrent step.

    read_r(h) = (1 + s_r) ⊙ h + B_r A_r h,   r = 1 … K,  and read_K beyond K

The result goes to head, exit gate and exit policies; the next step starts from h itself. s and B
start at zero, so the model starts as one without readouts. K is the R it is built with.

| symbol | code |
|---|---|
| s (K, D) | `scale` |
| A (K, D, rank), B (K, rank, D) | `down`, `up` |

Source: Belrose et al. 2023 (tuned lens), arXiv 2303.08112, §2: one affine map per layer in front of
a shared head. There the maps have full rank and are trained after the model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchtitan.protocols.module import Module

from titan_loop.errors import UserError
from titan_loop.models.context import LoopContext
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.decoder_costs import Flops
from titan_loop.models.parameter_groups import LookUp
from titan_loop.models.units import NORM_AND_GATE, Unit


class StepReadout(LookUp, Module):
    """Maps the state after a step to the input of head and gate, in at least fp32."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Width D, steps K, and the rank of each step's own map; 0 for a scale alone."""

        dim: int
        steps: int
        rank: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(config.steps, config.dim))
        self.down = self.up = None
        if config.rank:
            self.down = nn.Parameter(torch.empty(config.steps, config.dim, config.rank))
            self.up = nn.Parameter(torch.empty(config.steps, config.rank, config.dim))

    def forward(self, hidden_BLD: Tensor, *, step: int | Tensor) -> Tensor:
        """Return read_r(h), (B, L, D); `step` r counts from 1 and may differ by row, (B,)."""
        deepest = len(self.scale)
        row = min(step, deepest) - 1 if isinstance(step, int) else step.clamp_max(deepest) - 1
        wide = torch.promote_types(self.scale.dtype, torch.float32)
        wide_BLD = hidden_BLD.to(wide)
        read_BLD = wide_BLD * (1 + self.scale[row].to(wide)).unsqueeze(-2)
        if self.down is not None and self.up is not None:
            read_BLD = read_BLD + wide_BLD @ self.down[row].to(wide) @ self.up[row].to(wide)
        return read_BLD.to(hidden_BLD.dtype)


class OuroDecoder(LoopDecoder):
    """The looped decoder with readouts for its early steps."""

    @dataclass(kw_only=True, slots=True)
    class Config(LoopDecoder.Config):
        """Architecture of an Ouro model."""

        step_readout: StepReadout.Config | None = None

        def check_spreading(
            self, *, tensor_parallel: int, context_parallel: int, expert_parallel: int
        ) -> None:
            """As in the base class; readouts by step are not spread over tensor-parallel ranks."""
            LoopDecoder.Config.check_spreading(
                self,
                tensor_parallel=tensor_parallel,
                context_parallel=context_parallel,
                expert_parallel=expert_parallel,
            )
            if tensor_parallel > 1 and self.step_readout is not None:
                raise UserError(
                    f"parallelism.tensor_parallel_degree={tensor_parallel} does not work with "
                    f"model.readout_rank={self.step_readout.rank}; leave it at 1"
                )

        def own_flops(self, flops: Flops, recurrent_steps: float, reached: float) -> Flops:
            """As in the base class, with 6·2·R·rank·D (2 instead of 6 if only the gate trains)."""
            if self.step_readout is None:
                return flops
            elements = 2 * recurrent_steps * self.step_readout.rank * self.dim
            factor = 6 if reached else 2
            return flops._replace(readouts=flops.readouts + factor * elements)

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        readout = config.step_readout
        self.step_readout = None if readout is None else readout.build()

    def read(
        self, hidden_BLD: Tensor, context: LoopContext, step: int | Tensor | None = None
    ) -> Tensor:
        """As in the base class, through the step's own readout."""
        read_BLD = super().read(hidden_BLD, context, step)
        if self.step_readout is None:
            return read_BLD
        assert step is not None, "a readout by step needs the step"
        return self.step_readout(read_BLD, step=step)

    def units(self) -> list[Unit]:
        """List the units, with the readouts in the unit of norm and gate."""
        units = super().units()
        if self.step_readout is None:
            return units
        return [
            unit._replace(modules=(*unit.modules, self.step_readout))
            if unit.name == NORM_AND_GATE
            else unit
            for unit in units
        ]
