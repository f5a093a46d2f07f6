"""Import and export of folders in the layout of xLLM-Loop's released checkpoints.

    config.json {"model", "tokenizer"}, model-*.safetensors with an index, tokenizer/,
    artifact_manifest.json: size and SHA-256 of every file

Their files store a norm's gain as an offset from 1, and their rotary embedding pairs neighbouring
elements of a head. Checkpoints here store the gain itself, and pair the two halves of a head. A
plain loop (no injection, one state, no norm in the loop) is imported as family `nanbeige`, so that
every export of that family applies. `titan_loop/families/xllm_moe/formats.py` reads mixtures of
experts.

Source: the code of xLLM-Loop, `xllm/models` and `xllm/paper_part1/artifacts.py`.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from titan_loop.checkpoint.safetensors_files import INDEX, write_folder
from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.data.source_card import file_sha256
from titan_loop.errors import UserError
from titan_loop.families.xllm.decoder import States
from titan_loop.families.xllm.injection import PROJECTION_EPS, Injection
from titan_loop.families.xllm.start_state import Start
from titan_loop.formats.fields import Field, integer, unsupported
from titan_loop.formats.format import Export
from titan_loop.formats.gguf_file import neighbours
from titan_loop.formats.importing import CONFIG
from titan_loop.formats.llama_shape import LlamaShape
from titan_loop.formats.model_folder import folder_format
from titan_loop.models.family import ModelOptions
from titan_loop.storage.json_files import write_json
from titan_loop.storage.staged_folder import staged_folder

WINDOW = 8192
"""Tokens of a window in all of their recipes; their config does not record it."""

_OF_LAYER = {
    "self_attn.q_proj.": "attention.wq.",
    "self_attn.k_proj.": "attention.wk.",
    "self_attn.v_proj.": "attention.wv.",
    "self_attn.o_proj.": "attention.wo.",
    "mlp.gate_proj.": "nffn.fc1.",
    "mlp.down_proj.": "nffn.fc2.",
    "mlp.up_proj.": "nffn.fc3.",
    "input_layernorm.": "attention.norm.",
    "post_attention_layernorm.": "nffn.norm.",
}
_OF_MODEL = {
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "output.final_norm.weight",
    "lm_head.weight": "output.output.weight",
    "model.prelude_norm.weight": "huginn_prelude_norm_module.weight",
}
_OF_INJECTION = {
    "weight": "input_adapter.weight",
    "log_decay": "A_log",
    "step_bias": "dt_bias",
}
_OF_LINEAR = {"weight": "adapter.weight", "bias": "adapter.bias"}
_OFF_WHEN_ABSENT = {"apply_rmsnorm", "swiglu"}
_STATES: dict[str, States] = {"none": "one", "shared_hl": "shared", "split_hl": "split"}


@dataclass(frozen=True, kw_only=True)
class XllmShape(LlamaShape):
    """The shape of a released model; its own fields are named as the options of family `xllm`."""

    title: ClassVar[str] = "xLLM"
    family: ClassVar[str] = "xllm"
    model_type: ClassVar[str] = "xllm"
    tokenizer_folder: ClassVar[str] = "tokenizer"
    fixed: ClassVar[Mapping[str, Any]] = {
        "attn_act_func": "softmax",
        "qknorm": False,
        "apply_attn_gate": False,
        "apply_rmsnorm": True,
        "layernorm_num_groups": 1,
        "norm_affine": True,
        "scale_emb": False,
        "swiglu": True,
        "output_size": -1,
        "num_experts": 0,
        "num_values": 0,
        "residual_func": "base",
    }
    """Fields of the model section, with the only value that is supported; an absent field has it,
    unless it is in `_OFF_WHEN_ABSENT`."""
    own_fields: ClassVar[Mapping[str, Field]] = {
        "dim": Field("model_dim"),
        "n_layers": Field("num_layers"),
        "n_heads": Field("num_heads"),
        "hidden_dim": Field("ffn_hidden_dim"),
        "vocab_size": Field("vocab_size"),
        "rope_theta": Field("rope_base", float),
        "norm_eps": Field("rmsnorm_eps", float, 1e-6),
    }
    of_model: ClassVar[Mapping[str, str]] = {
        **LlamaShape.of_model,
        "model.injection.": "injection.",
        "model.prelude_norm.": "prelude_norm.",
    }

    prelude_layers: int
    coda_layers: int
    injection: Injection
    start_state: Start
    states: States = "one"
    low_cycles: int = 3
    core_passes: int = 1
    untied_steps: int = 1
    prelude_norm: bool = False
    state_norm: bool = False

    @classmethod
    def describes(cls, config: Mapping[str, Any]) -> bool:
        """As in the base class; a dense model's config has a `model` section with an `arch`."""
        model = config.get("model")
        return isinstance(model, dict) and "arch" in model and not model.get("num_experts")

    @classmethod
    def read_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """As in the base class, from the model section."""
        model = config["model"]
        for name, wanted in cls.fixed.items():
            found = model.get(name, False if name in _OFF_WHEN_ABSENT else wanted)
            if found != wanted:
                raise unsupported(f"model.{name}", found, wanted)
        known = {option: field.read(model) for option, field in cls.own_fields.items()}
        heads, dim = known["n_heads"], known["dim"]
        for name in ("head_dim", "rope_head_dim"):
            if model.get(name) not in (None, dim // heads):
                raise unsupported(f"model.{name}", model[name], dim // heads)
        read = {"transformer": _read_transformer, "huginn": _read_huginn}.get(str(model["arch"]))
        if read is None:
            raise unsupported("model.arch", model["arch"], "transformer or huginn")
        return {
            **known,
            "n_kv_heads": integer(model, "num_kv_heads", heads),
            "tie_weights": False,
            "max_positions": WINDOW,
            **read(model),
        }

    def options(self, family: str | None = None, **more: Any) -> ModelOptions:
        """As in the base class; a plain loop is of family `nanbeige`."""
        return super().options(family or ("nanbeige" if self.is_plain else None), **more)

    @property
    def is_plain(self) -> bool:
        """Whether family `nanbeige` can run the model: a plain loop of Llama's blocks."""
        return self.injection == "none" and self.states == "one" and not self.state_norm

    @property
    def is_depth_controlled(self) -> bool:
        """Whether a model with prelude or coda is of their class `DepthControlledHuginn`."""
        injected = self.injection in ("orthogonal", "linear")
        return injected or self.prelude_norm or self.state_norm

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes, dim = super().tensor_shapes(), self.dim
        if self.injection == "linear":
            shapes |= {"model.injection.weight": (dim, 2 * dim), "model.injection.bias": (dim,)}
        elif self.injection != "none":
            shapes |= {
                "model.injection.weight": (dim, dim),
                "model.injection.log_decay": (dim,),
                "model.injection.step_bias": (dim,),
            }
        if self.prelude_norm:
            shapes["model.prelude_norm.weight"] = (dim,)
        return shapes

    def file_name(self, tensor: str) -> str:
        if tensor in _OF_MODEL:
            return _OF_MODEL[tensor]
        if tensor.startswith("model.injection."):
            names = _OF_LINEAR if self.injection == "linear" else _OF_INJECTION
            return f"{self._module}.{names[tensor.removeprefix('model.injection.')]}"
        stem, kind = tensor.rsplit(".", 1)
        _, _, index, inner = f"{stem}.".split(".", 3)
        return f"layers.{index}.{_OF_LAYER[inner]}{kind}"

    @property
    def _module(self) -> str:
        """Name of the injection's module, which differs between their three classes."""
        if self.untied_steps > 1:
            return "dense_prelude_input_injection_module"
        of_loop = not (self.prelude_layers or self.coda_layers)
        return "loop_input_injection_module" if of_loop else "input_injection"

    def loaded(self, tensor: str, stored: Tensor) -> Tensor:
        if tensor.endswith("norm.weight"):
            return stored + 1
        heads = self._rotated_heads(tensor)
        if heads is None:
            return stored
        return stored.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)

    def read(self, reader: CheckpointReader, tensor: str) -> Tensor:
        """Return a checkpoint's tensor in the form of their files: the inverse of `loaded`."""
        weight = super().read(reader, tensor)
        if tensor.endswith("norm.weight"):
            return weight - 1
        heads = self._rotated_heads(tensor)
        return weight if heads is None else neighbours(weight, heads)

    def _rotated_heads(self, tensor: str) -> int | None:
        """Return the heads of a query or key matrix, which rotation permutes; None for the rest."""
        of = {"self_attn.q_proj.weight": self.n_heads, "self_attn.k_proj.weight": self.n_kv_heads}
        return next((heads for name, heads in of.items() if tensor.endswith(name)), None)

    def to_config(self, *, dtype: str, bos_id: int | None, eos_id: int | None) -> dict[str, Any]:
        """Return the `model` section of config.json, which their `ModelConf` reads."""
        return {
            **{name: value for name, value in self.fixed.items() if name != "residual_func"},
            **{field.name: getattr(self, option) for option, field in self.own_fields.items()},
            "num_kv_heads": self.n_kv_heads,
            "head_dim": self.dim // self.n_heads,
            "rope_head_dim": self.dim // self.n_heads,
            "apply_bias_term": True,
            **self._loop_fields(),
        }

    def _loop_fields(self) -> dict[str, Any]:
        core = self.n_layers - self.prelude_layers - self.coda_layers
        if self.untied_steps > 1:
            starts = range(self.prelude_layers, self.n_layers - self.coda_layers)
            return {
                "arch": "transformer",
                "dense_prelude_input_injection": self.injection,
                "dense_prelude_input_layers": ",".join(
                    map(str, starts[:: core // self.untied_steps])
                ),
                "dense_prelude_source_layer": self.prelude_layers - 1,
            }
        if not (self.prelude_layers or self.coda_layers):
            return {
                "arch": "transformer",
                "loop_times": self.recurrent_steps,
                "loop_input_injection": self.injection,
            }
        names = {ours: theirs for theirs, ours in _STATES.items()}
        orthogonal = self.injection == "orthogonal"
        cycles = 1 if self.states == "one" else self.low_cycles + 1
        return {
            "arch": "huginn",
            "loop_times": self.recurrent_steps * cycles,
            "huginn_prelude_layers": self.prelude_layers,
            "huginn_recurrent_layers": core,
            "huginn_coda_layers": self.coda_layers,
            "huginn_state_init": self.start_state,
            "huginn_input_injection": "diagonal" if orthogonal else self.injection,
            "huginn_hierarchical_state": names[self.states],
            "huginn_hierarchical_h_cycles": self.recurrent_steps,
            "huginn_hierarchical_l_cycles": self.low_cycles,
            "huginn_split_module_repeats": self.core_passes,
            "huginn_depth_control": self.is_depth_controlled,
            "huginn_prelude_orthogonal": orthogonal,
            "huginn_prelude_norm": "rms" if self.prelude_norm else "none",
            "huginn_recurrent_exit_norm": "parameterless_rms" if self.state_norm else "none",
        }

    def checked(self) -> Self:
        """As in the base class; refuse combinations of options that their classes lack."""
        whole_stack = not (self.prelude_layers or self.coda_layers)
        plain = self.injection == "diagonal" and self.start_state == "input"
        own = (self.states, self.prelude_norm, self.state_norm) == ("one", False, False)
        if (whole_stack or self.untied_steps > 1) and not (plain and own):
            raise UserError(
                "the xLLM format has no place for a loop over the whole stack, or for untied "
                "steps, other than with model.injection=diagonal, model.start_state=input, one "
                "state and no norms in the loop"
            )
        if self.untied_steps > 1 and (self.recurrent_steps > 1 or not self.prelude_layers):
            raise UserError(
                "the xLLM format has untied steps only after a prelude, and no loop over them: "
                "use --recurrent-steps 1 and model.prelude_layers of at least 1"
            )
        if self.core_passes > 1 and self.states != "split":
            raise UserError(
                f"model.core_passes={self.core_passes} with model.states={self.states}: the xLLM "
                "format has several passes only with model.states=split"
            )
        if self.is_depth_controlled and self.states != "one":
            raise UserError(
                f"model.states={self.states}: the xLLM format has an orthogonal or linear "
                "injection, and norms in the loop, only with model.states=one"
            )
        return self


def _read_transformer(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loop of their `LoopedTransformer`: over a span of layers, or untied steps."""
    layers, loops = integer(model, "num_layers"), integer(model, "loop_times", 1)
    first, stop = model.get("loop_start_layer", 0), model.get("loop_end_layers")
    for name, value in (("loop_start_layer", first), ("loop_end_layers", stop)):
        if value is not None and (type(value) is not int or not 0 <= value <= layers):
            raise unsupported(f"model.{name}", value, f"a layer from 0 to {layers}")
    fields = {
        "recurrent_steps": loops,
        "prelude_layers": first if loops > 1 else 0,
        "coda_layers": layers - stop if loops > 1 and stop is not None else 0,
        "injection": model.get("loop_input_injection", "none"),
        "start_state": "input",
    }
    if fields["injection"] != "none" and (first or fields["coda_layers"]):
        raise unsupported("model.loop_start_layer", first, "the whole stack with an injection")
    if model.get("dense_prelude_input_injection", "none") == "none":
        return fields
    text, source = (model.get(f"dense_prelude_{name}") for name in ("input_layers", "source_layer"))
    if not re.fullmatch(r"\d+(,\d+)*", str(text)):
        raise unsupported("model.dense_prelude_input_layers", text, "numbers of layers, 8,20,…")
    places = [int(place) for place in str(text).split(",")]
    part = places[1] - places[0] if len(places) > 1 else layers - places[0]
    even = [*range(places[0], places[0] + part * len(places), part)]
    if places != even or source != places[0] - 1 or even[-1] + part > layers:
        raise unsupported("model.dense_prelude_input_layers", text, "equal parts after the source")
    return fields | {
        "prelude_layers": places[0],
        "coda_layers": layers - even[-1] - part,
        "untied_steps": len(places),
        "injection": model["dense_prelude_input_injection"],
    }


def _read_huginn(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loop of their `Huginn` or `DepthControlledHuginn`."""
    layers = integer(model, "num_layers")
    prelude, coda = (
        0 if model.get(name) == 0 else integer(model, name, 1)
        for name in ("huginn_prelude_layers", "huginn_coda_layers")
    )
    core = model.get("huginn_recurrent_layers")
    if core is not None and prelude + core + coda != layers:
        raise unsupported("model.huginn_recurrent_layers", core, layers - prelude - coda)
    states = _STATES.get(found := model.get("huginn_hierarchical_state", "none"))
    if states is None:
        raise unsupported("model.huginn_hierarchical_state", found, " or ".join(_STATES))
    injection = model.get("huginn_input_injection", "diagonal")
    if model.get("huginn_prelude_orthogonal", False):
        injection = "orthogonal"
        eps = model.get("huginn_ortho_projection_eps", PROJECTION_EPS)
        if eps != PROJECTION_EPS:
            raise unsupported("model.huginn_ortho_projection_eps", eps, PROJECTION_EPS)
    steps, absent = ("loop_times", 1) if states == "one" else ("huginn_hierarchical_h_cycles", 2)
    cycles = {
        "low_cycles": integer(model, "huginn_hierarchical_l_cycles", 3),
        "core_passes": integer(model, "huginn_split_module_repeats", 1),
    }
    return {
        "recurrent_steps": integer(model, steps, absent),
        "prelude_layers": prelude,
        "coda_layers": coda,
        "injection": injection,
        "start_state": model.get("huginn_state_init", "zero"),
        "states": states,
        "prelude_norm": model.get("huginn_prelude_norm", "none") == "rms",
        "state_norm": model.get("huginn_recurrent_exit_norm", "none") != "none",
        **({} if states == "one" else cycles),
    }


def write_released(export: Export, output: Path) -> None:
    """Write a folder with its manifest; weights are rounded to bfloat16, as in the release."""
    shape = export.shape
    assert isinstance(shape, XllmShape)
    named = {shape.file_name(tensor): tensor for tensor in shape.tensor_shapes()}
    whole = shape.tensor_shapes()
    shapes = {file: shape.file_shape(named[file], whole[named[file]]) for file in sorted(named)}
    with staged_folder(output) as folder:
        write_folder(
            folder,
            shapes,
            torch.bfloat16,
            lambda file: export.read(named[file]),
            max_shard_bytes=export.max_shard_bytes,
            index=True,
        )
        (folder / shape.tokenizer_folder).mkdir()
        if export.tokenizer is not None:
            export.tokenizer.write(folder / shape.tokenizer_folder, max_positions=WINDOW)
        config = shape.to_config(dtype=export.dtype, bos_id=None, eos_id=None)
        tokenizer = {"type": "huggingface", "path": shape.tokenizer_folder}
        write_json(folder / CONFIG, {"model": config, "tokenizer": tokenizer})
        write_json(folder / "artifact_manifest.json", _manifest(folder, output.name, export))


def _manifest(folder: Path, name: str, export: Export) -> dict[str, Any]:
    """Return the manifest; their loader verifies its files before it reads a tensor."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    shards = [file for file in files if file.suffix == ".safetensors"]
    manifest = {
        "schema_version": 1,
        "release": "paper-part1",
        "format": "xllm-native-bf16-safetensors",
        "config_projection": "model_tokenizer_only",
        "model": {
            "name": name,
            "dtype": "bfloat16",
            "index": INDEX,
            "tensor_count": len(export.shape.tensor_shapes()),
            "shards": len(shards),
        },
        "source": {"checkpoint_id": f"step-{export.reader.manifest['step']}"},
        "files": [
            {
                "path": file.relative_to(folder).as_posix(),
                "sha256": file_sha256(file),
                "size_bytes": file.stat().st_size,
            }
            for file in files
        ],
    }
    text = json.dumps(manifest, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    return manifest | {"manifest_sha256": hashlib.sha256(text.encode()).hexdigest()}


XLLM_FOLDER = folder_format(
    "folder in the layout of xLLM-Loop's released checkpoints, which its own code reads",
    XllmShape,
    write=write_released,
    dtypes=("bfloat16",),
)
