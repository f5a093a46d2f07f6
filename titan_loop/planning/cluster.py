"""The cluster a plan is made for."""

from dataclasses import dataclass

from titan_loop.distributed.devices import Device
from titan_loop.errors import UserError, require_at_least


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts and their GPUs, one rank each; `mfu` is the assumed share of peak FLOPs in use."""

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
        require_at_least(1, **{"--nodes": self.nodes, "--gpus-per-node": self.gpus_per_node})
        if not 0 < self.mfu <= 1:
            raise UserError(f"--mfu {self.mfu} must be above 0 and at most 1, such as 0.4")
