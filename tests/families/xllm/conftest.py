"""Checkpoints in xLLM-Loop's layout, written by the tests themselves."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

Write = Callable[[Mapping[str, Any], Mapping[str, Tensor]], Path]


@pytest.fixture
def write_released(tmp_path: Path) -> Write:
    """Return `write(fields, weights)`, which writes a folder as their exporter does."""

    def write(fields: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Path:
        folder = tmp_path / "released"
        (folder / "tokenizer").mkdir(parents=True)
        half = len(weights) // 2
        names = sorted(weights)
        weight_map: dict[str, str] = {}
        for number, part in enumerate((names[:half], names[half:]), start=1):
            file = f"model-{number:05d}-of-00002.safetensors"
            tensors = {name: weights[name].to(torch.bfloat16).contiguous() for name in part}
            save_file(tensors, folder / file, metadata={"format": "xllm"})
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        config = {"model": dict(fields), "tokenizer": {"path": "tokenizer"}}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write
