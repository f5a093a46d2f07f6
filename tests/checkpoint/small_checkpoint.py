"""One small checkpoint as stock DCP writes it, ways to change it, and code that must not run."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp


class Payload:
    """Creates a file where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self.marker}",)


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "weight": torch.randn(6, 4, generator=generator),
        "half": torch.randn(3, 5, generator=generator).bfloat16(),
        "last": torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "optimizer": {"param_groups": [{"lr": 0.25, "betas": (0.9, 0.95)}], "step": 7},
        "text": "plain",
    }


def zeros() -> dict[str, Any]:
    def empty(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: empty(item) for key, item in value.items()}
        if isinstance(value, list):
            return [empty(item) for item in value]
        return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None

    return empty(state())


def rewrite(checkpoint: Path, change: Callable[[dcp.Metadata], None]) -> None:
    path = checkpoint / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def assert_one_line(error: BaseException, *parts: str) -> None:
    assert "\n" not in str(error)
    for part in parts:
        assert part in str(error)
