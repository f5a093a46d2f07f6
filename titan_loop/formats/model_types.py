"""The dense models of transformers that can be imported and exported, by `model_type`."""

from collections.abc import Callable, Mapping
from typing import Any

from titan_loop.formats.fields import (
    FULL,
    SLIDING,
    Fields,
    Options,
    positive,
    rotation_fields,
    unsupported,
    windowed_theta,
)
from titan_loop.formats.model_type import ModelType, Pair, UnsaidError, Window


def _kinds(fields: Fields, layers: int, usual: Callable[[int], bool]) -> list[int]:
    """Return the layers with a window: by `layer_types`, else by a rule."""
    kinds = fields("layer_types")
    if kinds is None:
        return [layer for layer in range(layers) if usual(layer)]
    known = isinstance(kinds, list) and {*kinds} <= {FULL, SLIDING} and len(kinds) == layers
    if not known:
        raise unsupported("layer_types", kinds, f"{layers} of {FULL} or {SLIDING}")
    return [layer for layer, kind in enumerate(kinds) if kind == SLIDING]


def _window(fields: Fields) -> int | None:
    return None if fields("sliding_window") is None else fields.whole("sliding_window")


def _every_layer(fields: Fields, layers: int) -> Window:
    return _window(fields), range(layers)


def _later_layers(fields: Fields, layers: int) -> Window:
    first = fields("max_window_layers")
    windowed = _kinds(fields, layers, lambda layer: layer >= first)
    window = _window(fields)  # released models have one that the flag turns off
    return (window if fields.flag("use_sliding_window") else None), windowed


def _unrotated_layers(fields: Fields, layers: int) -> Window:
    without = _unrotated(fields, {"n_layers": layers}) if fields.flag("use_sliding_window") else ()
    return _window(fields), _kinds(fields, layers, lambda layer: layer in without)


def _unless_every(period: int) -> Callable[[Fields, int], Window]:
    def read(fields: Fields, layers: int) -> Window:
        every = fields.whole("sliding_window_pattern", fields("_sliding_window_pattern", period))
        return _window(fields), _kinds(fields, layers, lambda layer: bool((layer + 1) % every))

    return read


def _same_window(window: int | None, kinds: list[str]) -> Options:
    if window is not None and FULL in kinds:
        raise UnsaidError
    return {"sliding_window": window}


def _window_of_kinds(window: int | None, kinds: list[str]) -> Options:
    if window is None:
        raise UnsaidError
    return {"sliding_window": window, "layer_types": kinds}


def _switched_window(window: int | None, kinds: list[str]) -> Options:
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": kinds.index(SLIDING) if SLIDING in kinds else len(kinds),
        "layer_types": kinds,
    }


def _unrotated(fields: Fields, options: Options) -> tuple[int, ...]:
    layers, value = range(options["n_layers"]), fields("no_rope_layers")
    if value is None:
        every = fields.whole("no_rope_layer_interval", 4)
        value = [int((layer + 1) % every != 0) for layer in layers]
    if not isinstance(value, list) or len(value) != len(layers) or not {*value} <= {0, 1}:
        raise unsupported("no_rope_layers", value, f"{len(layers)} of 0 or 1")
    return tuple(layer for layer in layers if not value[layer])


def _rotated(layers: tuple[int, ...], options: Options) -> list[int]:
    return [int(layer not in layers) for layer in range(options["n_layers"])]


def _olmo_theta(fields: Fields, options: Options) -> float | None:
    theta = windowed_theta(fields, options["rope_theta"])
    same = theta == options["rope_theta"] and options.get("rope_scaling", "none") == "none"
    return None if same else theta


def _olmo_fields(options: Options) -> Options:
    theta, scaling = options["rope_theta"], rotation_fields(options)["rope_scaling"]
    if options["window_rope_theta"] != (theta if scaling else None):
        raise UnsaidError
    # transformers 5 gives the top-level base to one kind of layers alone.
    full = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
    local = {"rope_type": "default", "rope_theta": theta}
    return {"rope_parameters": {FULL: full, SLIDING: local}}


def _gemma_fields(options: Options) -> Options:
    layers = range(options["n_layers"])
    for period in layers:  # MLX reads no layer_types
        if period and tuple(n for n in layers if (n + 1) % period) == options["windowed_layers"]:
            own = {"sliding_window_pattern": period}
            break
    else:
        own = {}
    return {"rope_local_base_freq": _said(options["window_rope_theta"]), **own}


def _phi_fields(options: Options) -> Options:
    if options["rope_scaling"] != "none":  # its class takes longrope alone
        raise UnsaidError
    return {}


def _said(value: Any) -> Any:
    if value is None:
        raise UnsaidError
    return value


def _neat(value: float) -> float:
    """Return a number without the last digits' noise of the division that made it."""
    value = float(f"{value:.12g}")
    return int(value) if value == int(value) else value


def _scalar(scale: float | None, _: Options) -> int:
    value = _neat(_said(scale) ** -2)
    if not isinstance(value, int):  # transformers 5 loads no folder with another number
        raise UnsaidError
    return value


def _biases(value: str, _: Options) -> bool:
    if value == "qkv":
        raise UnsaidError
    return value == "qkvo"


def _cap(name: str, option: str) -> Pair:
    def read(fields: Fields, _: Options) -> float:
        return 0.0 if fields(name) is None else positive(name, fields(name))

    return Pair(name, option, read, lambda value, _: value or None)


def _number(name: str, option: str) -> Pair:
    read: Any = lambda fields, _: positive(name, fields(name))  # noqa: E731
    return Pair(name, option, read, lambda value, _: _said(value))


_BIASES = Pair(
    "attention_bias",
    "attention_biases",
    lambda fields, _: "qkvo" if fields.flag("attention_bias") else "none",
    _biases,
)
_MLP_BIASES = Pair("mlp_bias", "feed_forward_biases", lambda fields, _: fields.flag("mlp_bias"))
_GEMMA_PAIRS = (
    _BIASES,
    Pair(
        "query_pre_attn_scalar",
        "attention_scale",
        lambda fields, _: (
            positive("query_pre_attn_scalar", fields("query_pre_attn_scalar")) ** -0.5
        ),
        _scalar,
    ),
    _cap("final_logit_softcapping", "logit_softcap"),
)
_GEMMA: Mapping[str, Any] = {
    "norm_order": "both",
    "norm_offset": True,
    "activation": "gelu",
    "embedding_scale": lambda options: options["dim"] ** 0.5,
}
_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_BASE = {"rope_theta": 10_000.0}
_WINDOW = {**_BASE, "sliding_window": 4096}
_QWEN = {**_WINDOW, "num_key_value_heads": 32, "max_window_layers": 28}
_OLMO = {"norm_order": "after", "qk_norm": "all"}

MODEL_TYPES: Mapping[str, ModelType] = {
    "llama": ModelType(
        architecture="LlamaForCausalLM", pairs=(_BIASES, _MLP_BIASES), defaults=_BASE
    ),
    "mistral": ModelType(
        architecture="MistralForCausalLM",
        defaults={**_WINDOW, "num_key_value_heads": 8},
        windows=_every_layer,
        window_fields=_same_window,
    ),
    "qwen2": ModelType(
        architecture="Qwen2ForCausalLM",
        constants={"attention_biases": "qkv"},
        defaults=_QWEN,
        windows=_later_layers,
        window_fields=_switched_window,
    ),
    "qwen3": ModelType(
        architecture="Qwen3ForCausalLM",
        constants={"qk_norm": "head"},
        pairs=(_BIASES,),
        defaults={**_QWEN, "head_dim": 128},
        windows=_later_layers,
        window_fields=_switched_window,
    ),
    "olmo2": ModelType(
        architecture="Olmo2ForCausalLM",
        constants=_OLMO,
        pairs=(_BIASES,),
        defaults={**_BASE, "rms_norm_eps": 1e-5},
    ),
    "olmo3": ModelType(
        architecture="Olmo3ForCausalLM",
        constants=_OLMO,
        pairs=(_BIASES,),
        defaults={**_WINDOW, "rms_norm_eps": 1e-5},
        windows=_unless_every(4),
        window_fields=_window_of_kinds,
        window_theta=_olmo_theta,
        theta_fields=_olmo_fields,
    ),
    "gemma2": ModelType(
        architecture="Gemma2ForCausalLM",
        constants=_GEMMA,
        # Gemma 3's class has the field and does not apply it.
        pairs=(*_GEMMA_PAIRS, _cap("attn_logit_softcapping", "attention_softcap")),
        defaults={
            **_BASE,
            **_GEMMA_DEFAULTS,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        windows=_unless_every(2),
        window_fields=_window_of_kinds,
    ),
    "gemma3_text": ModelType(
        architecture="Gemma3ForCausalLM",
        constants={**_GEMMA, "qk_norm": "head"},
        pairs=_GEMMA_PAIRS,
        defaults={**_GEMMA_DEFAULTS, "rope_theta": 1e6, "rope_local_base_freq": 10_000.0},
        windows=_unless_every(6),
        window_fields=_window_of_kinds,
        window_theta=lambda fields, _: windowed_theta(fields, fields("rope_local_base_freq")),
        theta_fields=_gemma_fields,
    ),
    "smollm3": ModelType(
        architecture="SmolLM3ForCausalLM",
        pairs=(
            _BIASES,
            _MLP_BIASES,
            Pair("no_rope_layers", "unrotated_layers", _unrotated, _rotated),
        ),
        defaults={"rope_theta": 2e6, "tie_word_embeddings": True, "num_key_value_heads": 4},
        windows=_unrotated_layers,
        window_fields=_switched_window,
    ),
    "granite": ModelType(
        architecture="GraniteForCausalLM",
        pairs=(
            _BIASES,
            _MLP_BIASES,
            _number("embedding_multiplier", "embedding_scale"),
            _number("residual_multiplier", "residual_multiplier"),
            _number("attention_multiplier", "attention_scale"),
            Pair(
                "logits_scaling",
                "logit_scale",
                lambda fields, _: 1 / positive("logits_scaling", fields("logits_scaling")),
                lambda value, _: _neat(1 / value),
            ),
        ),
        defaults={
            **_BASE,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
    ),
    "phi3": ModelType(
        architecture="Phi3ForCausalLM",
        defaults={**_BASE, "rms_norm_eps": 1e-5},
        windows=_every_layer,
        window_fields=_same_window,
        theta_fields=_phi_fields,
        rotates_part=True,
    ),
}
"""By `model_type`, in the order in which an export looks for one that can say a model's options."""

_EXPERTS = "its layers are mixtures of experts"
_IMAGES = "it reads images, too; import a folder of its text model"
_LAYER_NORM = "it has LayerNorm, or a feed-forward without a gate"
_STATES = "it has layers with a recurrent state"
_LATENT = "its attention keeps latent keys and values"
_REFUSED = {
    _EXPERTS: "mixtral qwen2_moe qwen3_moe olmoe granitemoe phimoe gpt_oss",
    _IMAGES: "gemma3 mistral3 qwen2_5_vl qwen3_vl llama4",
    _LAYER_NORM: "gpt2 gpt_neox gptj opt phi starcoder2 falcon bloom cohere cohere2 stablelm olmo",
    _STATES: "mamba mamba2 qwen3_next falcon_h1 lfm2 rwkv",
    _LATENT: "deepseek_v2 deepseek_v3 minicpm3",
    "Gemma 1 is not here; Gemma 2 and 3 are": "gemma",
    "its embeddings of every layer are not here": "gemma3n",
}
NOT_DENSE: Mapping[str, str] = {
    name: why for why, names in _REFUSED.items() for name in names.split()
}
"""`model_type`s that people ask for, and why they cannot be imported."""


def listing() -> str:
    """Return both tables, as `titan-loop retrofit --list` prints them."""
    accepted = [f"  {name:<12} {kind.architecture}" for name, kind in MODEL_TYPES.items()]
    refused = [f"  {', '.join(names.split())}: {why}" for why, names in _REFUSED.items()]
    scaling = (
        "  with RoPE scaling linear, llama3, yarn or none (phi3: none), without quantised weights"
    )
    heads = "accepted, by the model_type of config.json:", "not accepted:"
    return "\n".join([heads[0], *accepted, scaling, heads[1], *refused])
