"""Reads a folder of the released format as strictly as any loader might; knows no titan_loop.

Bytes are parsed by hand: the header's length, JSON, and places of tensors that must follow each
other without a gap.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

CONFIG_TYPES: dict[str, type | tuple[type, ...]] = {
    "hidden_size": int,
    "intermediate_size": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "num_key_value_heads": int,
    "head_dim": int,
    "vocab_size": int,
    "max_position_embeddings": int,
    "max_window_layers": int,
    "total_ut_steps": int,
    "bos_token_id": int,
    "eos_token_id": (int, list),  # several, as in Llama 3.1's
    "rope_theta": float,
    "initializer_range": float,
    "tie_word_embeddings": bool,
    "torch_dtype": str,
}
CONFIG_VALUES: dict[str, Any] = {
    "model_type": "ouro",
    "architectures": ["OuroForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_ouro.OuroConfig",
        "AutoModel": "modeling_ouro.OuroModel",
        "AutoModelForCausalLM": "modeling_ouro.OuroForCausalLM",
    },
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "attention_dropout": 0.0,
    "use_cache": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "early_exit_threshold": 1.0,
}
WIDTH_BYTES = {"F32": 4, "BF16": 2}
TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16"}


def read_strictly(folder: Path) -> tuple[dict[str, Any], dict[str, tuple[str, list[int]]]]:
    """Return the config, and each tensor's type and shape; assert everything on the way."""
    config = json.loads((folder / "config.json").read_text())
    assert config.keys() == CONFIG_TYPES.keys() | CONFIG_VALUES.keys() | {"layer_types"}
    for name, kind in CONFIG_TYPES.items():
        assert type(config[name]) in (kind if isinstance(kind, tuple) else (kind,)), name
    for name, value in CONFIG_VALUES.items():
        assert config[name] == value, name
    assert config["layer_types"] == ["full_attention"] * config["num_hidden_layers"]
    assert config["hidden_size"] == config["num_attention_heads"] * config["head_dim"]

    tensors: dict[str, tuple[str, list[int]]] = {}
    for file, names in _files(folder).items():
        header = _read_header(folder / file)
        assert names is None or header.keys() == names, file
        assert not header.keys() & tensors.keys()
        tensors.update(header)
    assert {name: shape for name, (_, shape) in tensors.items()} == _expected(config)
    assert {TORCH_NAMES[kind] for kind, _ in tensors.values()} == {config["torch_dtype"]}
    return config, tensors


def _expected(config: dict[str, Any]) -> dict[str, list[int]]:
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "model.embed_tokens.weight": [v, d],
        "lm_head.weight": [v, d],
        "model.norm.weight": [d],
        "model.early_exit_gate.weight": [1, d],
        "model.early_exit_gate.bias": [1],
    }
    of_layer = {
        "self_attn.q_proj": [d, d],
        "self_attn.k_proj": [kv, d],
        "self_attn.v_proj": [kv, d],
        "self_attn.o_proj": [d, d],
        "mlp.gate_proj": [f, d],
        "mlp.up_proj": [f, d],
        "mlp.down_proj": [d, f],
        "input_layernorm": [d],
        "input_layernorm_2": [d],
        "post_attention_layernorm": [d],
        "post_attention_layernorm_2": [d],
    }
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in of_layer.items()}
    assert len(shapes) == 11 * config["num_hidden_layers"] + 5
    if config["tie_word_embeddings"]:
        del shapes["lm_head.weight"]
    return shapes


def _files(folder: Path) -> dict[str, set[str] | None]:
    if (folder / "model.safetensors").exists():
        assert [path.name for path in folder.glob("*.safetensors*")] == ["model.safetensors"]
        return {"model.safetensors": None}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index.keys() == {"metadata", "weight_map"}
    placed = index["weight_map"]
    files = sorted(set(placed.values()))
    assert files == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert {path.name for path in folder.glob("*.safetensors")} == set(files)
    total = sum((folder / file).stat().st_size - _data_start(folder / file) for file in files)
    assert index["metadata"] == {"total_size": total}
    return {file: {name for name in placed if placed[name] == file} for file in files}


def _data_start(path: Path) -> int:
    with open(path, "rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def _read_header(path: Path) -> dict[str, tuple[str, list[int]]]:
    start = _data_start(path)
    assert start % 8 == 0
    with open(path, "rb") as file:
        text = file.read(start)[8:].decode()
    assert re.fullmatch(r"\{.*\} *", text)
    header = json.loads(text)
    assert header.pop("__metadata__") == {"format": "pt"}
    end = 0
    for name, part in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        assert part["data_offsets"][0] == end, name
        end += WIDTH_BYTES[part["dtype"]] * math.prod(part["shape"])
        assert part["data_offsets"][1] == end, name
    assert path.stat().st_size == start + end
    return {name: (part["dtype"], part["shape"]) for name, part in header.items()}
