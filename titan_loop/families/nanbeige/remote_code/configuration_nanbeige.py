"""Configuration of looped Llama blocks (Nanbeige) for transformers; written by titan_loop."""

from transformers import LlamaConfig


class NanbeigeConfig(LlamaConfig):
    """Llama's fields, and the loop.

    Args:
        num_loops: R, the number of times that the whole stack is applied.
        skip_loop_final_norm: Whether the final norm is applied only before the head; otherwise
            also between two loops.
        **kwargs: As in `LlamaConfig`.
    """

    model_type = "nanbeige"

    def __init__(self, num_loops: int = 1, skip_loop_final_norm: bool = False, **kwargs):
        self.num_loops = num_loops
        self.skip_loop_final_norm = skip_loop_final_norm
        super().__init__(**kwargs)

    @property
    def num_hidden_layers(self):
        """Layer visits, the number that caches and engines need; files hold the unique layers."""
        return self.count_visits(self.num_unique_layers)

    @num_hidden_layers.setter
    def num_hidden_layers(self, layers):
        self.num_unique_layers = layers

    def count_visits(self, layers):
        """Return the number of visits of `layers` layers."""
        return layers * self.num_loops

    def to_dict(self):
        """Return the content of config.json."""
        content = super().to_dict()
        content["num_hidden_layers"] = content.pop("num_unique_layers")
        return content


__all__ = ["NanbeigeConfig"]
