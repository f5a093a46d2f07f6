"""Configuration of a looped language model (LoopLM, Ouro) for transformers 4.57 and 5.x.

Written by titan_loop, not by the authors of the released Ouro models; the fields are theirs.
"""

from transformers import PretrainedConfig


class OuroConfig(PretrainedConfig):
    """Shape of the stack and its recurrent steps; the defaults are Ouro-1.4B.

    Args:
        total_ut_steps: Recurrent steps. Any positive number works with the same weights.
        early_exit_threshold: Cumulative exit probability at which a token is read out, unless a
            call sets another; 1.0 always reads the last step.
        rope_theta: Base of the rotary embedding.
        rope_scaling: Must be None, or ask for the default rotary embedding.
        rope_parameters: The same in transformers 5's spelling; its `rope_theta` counts if there is
            none beside it.
        layer_types: Must be "full_attention" for every layer.
    """

    model_type = "ouro"
    keys_to_ignore_at_inference = [  # noqa: RUF012
        "past_key_values",
        "cache",
        "exit_logits",
        "exit_steps",
    ]
    base_model_tp_plan = {  # noqa: RUF012
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }

    def __init__(
        self,
        vocab_size=49152,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=None,
        head_dim=None,
        hidden_act="silu",
        max_position_embeddings=65536,
        initializer_range=0.02,
        rms_norm_eps=1e-6,
        use_cache=True,
        rope_theta=None,
        rope_scaling=None,
        rope_parameters=None,
        attention_dropout=0.0,
        use_sliding_window=False,
        sliding_window=None,
        max_window_layers=None,
        layer_types=None,
        total_ut_steps=4,
        early_exit_threshold=1.0,
        tie_word_embeddings=False,
        **kwargs,
    ):
        rope = {**(rope_scaling or {}), **(rope_parameters or {})}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        layer_types = list(layer_types or ["full_attention"] * num_hidden_layers)
        for name, value, supported in (
            ("hidden_act", hidden_act, "silu"),
            ("attention_dropout", attention_dropout, 0.0),
            ("use_sliding_window", use_sliding_window, False),
            ("rope_type", rope_type, "default"),
            ("layer_types", layer_types, ["full_attention"] * num_hidden_layers),
        ):
            if value != supported:
                raise ValueError(
                    f"OuroConfig: {name}={value!r} is not supported, only {supported!r}"
                )
        self.total_ut_steps = total_ut_steps
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self.rms_norm_eps = rms_norm_eps
        self.use_cache = use_cache
        self.rope_theta = rope_theta or rope.get("rope_theta", 10000.0)
        self.attention_dropout = attention_dropout
        self.use_sliding_window = use_sliding_window
        self.sliding_window = sliding_window
        self.max_window_layers = (
            num_hidden_layers if max_window_layers is None else max_window_layers
        )
        self.layer_types = layer_types
        self.early_exit_threshold = early_exit_threshold
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
        self.visit_limit = None

    @property
    def num_hidden_layers(self):
        """Layer visits, the number that caches and engines need; files hold the unique layers."""
        if vars(self).get("visit_limit") is not None:
            return self.visit_limit
        return self.num_unique_layers * self.total_ut_steps

    @num_hidden_layers.setter
    def num_hidden_layers(self, number):
        # Afterwards it takes what it gives: assisted decoding sets it, and sets it back.
        if "visit_limit" not in vars(self):
            self.num_unique_layers = number
        else:
            whole = self.num_unique_layers * self.total_ut_steps
            self.visit_limit = None if number == whole else number

    @property
    def layer_types(self):
        """Types of all visits; files hold the types of the layers."""
        return ["full_attention"] * self.num_hidden_layers

    @layer_types.setter
    def layer_types(self, types):
        pass  # checked in __init__: there is one type

    def to_dict(self):
        """Return the content of config.json."""
        content = super().to_dict()
        content.pop("visit_limit", None)
        layers = content.pop("num_unique_layers")
        return content | {
            "num_hidden_layers": layers,
            "layer_types": ["full_attention"] * layers,
        }


__all__ = ["OuroConfig"]
