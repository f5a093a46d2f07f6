"""A `model_type` of transformers as a record: its `config.json` to options, and back.

A field of a config is read, has no effect here (`NO_EFFECT` says why), or is refused by name and
value. Fields that a config lacks have the defaults of transformers' class. Written configs have the
spelling that versions 4 and 5 read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from titan_loop.formats.fields import (
    FULL,
    SLIDING,
    Fields,
    Options,
    positive,
    read_rotations,
    rotation_fields,
    unsupported,
)

_REASONS = {
    "names; code of a folder is never run": """
        architectures auto_map model_type tokenizer_class _name_or_path""",
    "acts in training; model.dropout and model.initializer_range are ours": """
        attention_dropout embd_pdrop resid_pdrop initializer_range pretraining_tp""",
    "tokens of texts, which the tokenizer and generation_config.json name": """
        bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id""",
    "how a program runs the model": """
        torch_dtype dtype use_cache cache_implementation transformers_version attn_implementation
        _attn_implementation _attn_implementation_autoset transformers.js_config unsloth_fixed
        unsloth_version""",
    "of every class in transformers, without effect on these": """
        return_dict output_hidden_states output_attentions torchscript use_bfloat16 is_decoder
        is_encoder_decoder id2label label2id problem_type finetuning_task task_specific_params
        chunk_size_feed_forward pruned_heads tf_legacy_loss add_cross_attention
        cross_attention_hidden_size tie_encoder_decoder prefix forced_bos_token_id
        forced_eos_token_id is_llama_config""",
    "choices of generation": """
        max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
        temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
        encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
        return_dict_in_generate suppress_tokens begin_suppress_tokens remove_invalid_values
        exponential_decay_length_penalty""",
    "without effect beside hidden_activation": "hidden_act",
    "read by longrope, which is refused": "original_max_position_embeddings",
    "read where layer_types is missing": "sliding_window_pattern _sliding_window_pattern",
    "read where no_rope_layers is missing": "no_rope_layer_interval",
    "read where use_sliding_window is true": "max_window_layers",
}
NO_EFFECT: Mapping[str, str] = {
    name: reason for reason, fields in _REASONS.items() for name in fields.split()
}
"""Fields of `config.json` without effect on the computation → the reason."""

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}
Window: TypeAlias = tuple[int | None, Sequence[int]]
"""Keys that windowed layers see, and the numbers of these layers."""


class UnsaidError(Exception):
    """A model type cannot say the value of an option."""


@dataclass(frozen=True)
class Pair:
    """A field of `config.json` and its option.

    Attributes:
        read: Returns the option; by default the field's value.
        write: Returns the field's value; raises `UnsaidError` for a value that it cannot say.
    """

    name: str
    option: str
    read: Callable[[Fields, Options], Any] | None = None
    write: Callable[[Any, Options], Any] = lambda value, _: value


@dataclass(frozen=True, kw_only=True)
class ModelType:
    """The computation of a `model_type`.

    Attributes:
        architecture: transformers' class of models with a head.
        constants: Options that all its models share, or functions of the shape's options.
        defaults: Values of fields that a config lacks.
        windows: Reads the window from fields and number of layers; None if it has none.
        window_fields: Returns the fields of a window, and of the kinds of all layers.
        window_theta: Reads the base of windowed layers; None if they rotate as the others.
        theta_fields: Returns the fields of the bases beyond `rotation_fields`.
        rotates_part: Whether only a part of a head may be rotated.
    """

    architecture: str
    constants: Mapping[str, Any] = field(default_factory=dict)
    pairs: tuple[Pair, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    windows: Callable[[Fields, int], Window] | None = None
    window_fields: Callable[[int | None, list[str]], Options] = lambda window, kinds: {}
    window_theta: Callable[[Fields, Options], float | None] = lambda fields, options: None
    theta_fields: Callable[[Options], Options] = lambda options: {}
    rotates_part: bool = False

    def read(self, config: Mapping[str, Any]) -> Options:
        """Return the options that a config gives, `max_positions` among them."""
        fields = Fields(config, self.defaults)
        fields.require(quantization_config=None, rope_interleaved=False)
        # Where a class has hidden_activation, hidden_act has no effect.
        named = fields("hidden_activation") is not None
        act = "hidden_activation" if named else "hidden_act"
        activation = fields(act, "silu")
        layers, heads = fields.whole("num_hidden_layers"), fields.whole("num_attention_heads")
        dim = fields.whole("hidden_size")
        width = fields.whole("head_dim", dim // heads)
        options: Options = {
            "dim": dim,
            "n_layers": layers,
            "n_heads": heads,
            "n_kv_heads": fields.whole("num_key_value_heads", heads),
            "hidden_dim": fields.whole("intermediate_size"),
            "vocab_size": fields.whole("vocab_size"),
            "tie_weights": fields.flag("tie_word_embeddings"),
            "norm_eps": positive("rms_norm_eps", fields("rms_norm_eps", 1e-6)),
            "max_positions": fields.whole("max_position_embeddings"),
            "head_dim": None if width * heads == dim else width,
        }
        options |= {"activation": "silu", **dict(self._constants(options))}
        if ACTIVATIONS.get(activation) != options["activation"]:
            wanted = next(key for key in ACTIVATIONS if ACTIVATIONS[key] == options["activation"])
            raise unsupported(act, activation, wanted)
        for pair in self.pairs:
            value = fields(pair.name) if pair.read is None else pair.read(fields, options)
            options[pair.option] = value
        options |= read_rotations(fields, width)
        if "rotary_dim" in options and not self.rotates_part:
            raise unsupported("partial_rotary_factor", options["rotary_dim"] / width, 1.0)
        if self.windows is not None:
            window, windowed = self.windows(fields, layers)
            if window is not None and windowed:
                options |= {"window": window, "windowed_layers": tuple(windowed)}
                options["window_rope_theta"] = self.window_theta(fields, options)
        fields.finish(NO_EFFECT)
        return options

    def _constants(self, options: Options) -> Iterator[tuple[str, Any]]:
        for name, value in self.constants.items():
            yield name, value(options) if callable(value) else value

    def write(self, options: Options, plain: Mapping[str, Any]) -> Options:
        """Return fields of `config.json`, beyond Llama's, for a model's options.

        Args:
            plain: Llama's values of all block options; they hold where a type says nothing else.

        Raises:
            UnsaidError: The type has no field for an option's value.
        """
        said = {pair.option for pair in self.pairs} | {"head_dim"}
        said |= {name for name in plain if name.startswith("rope_")}
        said |= {"rotary_dim"} if self.rotates_part else set()
        if self.windows is not None:
            said |= {"window", "windowed_layers", "window_rope_theta"}
        wanted = {**plain, **dict(self._constants(options))}
        if any(options[name] != wanted[name] for name in plain.keys() - said):
            raise UnsaidError
        layers, windowed = range(options["n_layers"]), options["windowed_layers"]
        kinds = [SLIDING if layer in windowed else FULL for layer in layers]
        width = options["head_dim"] or options["dim"] // options["n_heads"]
        name = "hidden_act" if options["activation"] == "silu" else "hidden_activation"
        activation = next(
            key for key, value in ACTIVATIONS.items() if value == options["activation"]
        )
        fields = {
            name: activation,
            "head_dim": width,
            **{pair.name: pair.write(options[pair.option], options) for pair in self.pairs},
            **rotation_fields(options),
            **self.window_fields(options["window"], kinds),
            **self.theta_fields(options),
        }
        if options["rotary_dim"] is not None:
            fields["partial_rotary_factor"] = options["rotary_dim"] / width
        return fields
