"""Memory and peak FLOP/s of the GPUs that `plan` knows, from the vendors' data sheets."""

from dataclasses import dataclass

from titan_loop.errors import UserError, nearest

USABLE_SHARE = 0.9
"""Share of a GPU's memory that a step may take; fragmentation, NCCL and CUDA take the rest."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU: `peak_flops` is for dense bf16, `fp32_peak_flops` for fp32 without TF32."""

    memory_bytes: float
    peak_flops: float
    fp32_peak_flops: float


DEVICES = {
    "a100-40gb": Device(39.4 * 2**30, 312e12, 19.5e12),
    "a100-80gb": Device(79.2 * 2**30, 312e12, 19.5e12),
    "h100-80gb": Device(79.2 * 2**30, 989e12, 67e12),
    "h200-141gb": Device(139.8 * 2**30, 989e12, 67e12),
    "b200-180gb": Device(178.4 * 2**30, 2250e12, 75e12),
}


def get_device(name: str) -> Device:
    """Return the named GPU; raises `UserError` with the nearest names if it is unknown."""
    if name not in DEVICES:
        raise UserError(f"--gpu {name} is unknown{nearest(name, DEVICES)}")
    return DEVICES[name]
