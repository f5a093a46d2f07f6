"""One small checkpoint, ways to change it, and code that must not run."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import save

from titan_loop.checkpoint.manifest import TABLE
from titan_loop.checkpoint.tensor_table import TableWriter


class Payload:
    """Creates a file where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self.marker}",)


def content(step: int = 7, **architecture: Any) -> dict[str, Any]:
    """Return a manifest's content after `step` steps of 1,000 tokens and one window."""
    trainer = {"step": step, "tokens": 1000 * step, "recurrent_steps": 4}
    return {
        "step": step,
        "created": f"2026-11-21T12:00:0{step}+00:00",
        "stage_end": False,
        "trainer": {**trainer, "architecture": architecture},
        "data": {"windows_consumed": step},
        "lineage": {"parent": None, "stage": "1a"},
    }


def flip_a_bit(path: Path) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)


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


def write(checkpoint: Path, content: dict[str, Any] | None = None) -> Path:
    """Write the small state, or other content, without a manifest."""
    content = state() if content is None else content
    save(content, storage_writer=TableWriter(checkpoint), no_dist=True)
    return checkpoint


def rewrite(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the entries of the table, as an attacker would: with a hash that fits."""
    path = checkpoint / TABLE
    entries = json.loads(path.read_text())["entries"]
    change(entries)
    digest = hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({"sha256": digest, "entries": entries}))


def assert_one_line(error: BaseException, *parts: str) -> None:
    assert "\n" not in str(error)
    for part in parts:
        assert part in str(error)
