"""The cluster a plan is made for."""

from dataclasses import dataclass

from titan_loop.distributed.devices import Device
from titan_loop.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts and their GPUs, one rank each; `mfu` is assumed model FLOPs over peak ones."""

    nodes: int
    gpus_per_node: int
    gpu: Device
    mfu: float

    @property
    def ranks(self) -> int:
        """Number of GPUs in all."""
        return self.nodes * self.gpus_per_node

    def check(self) -> None:
        """Raise `UserError` for a cluster that cannot exist."""
        for flag, value in (("nodes", self.nodes), ("gpus-per-node", self.gpus_per_node)):
            if value < 1:
                raise UserError(f"--{flag} {value} must be at least 1")
        if not 0 < self.mfu <= 1:
            raise UserError(f"--mfu {self.mfu} must be above 0 and at most 1, such as 0.4")
