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
        self.visit_limit = None

    @property
    def num_hidden_layers(self):
        """Layer visits, the number that caches and engines need; files hold the unique layers."""
        if vars(self).get("visit_limit") is not None:
            return self.visit_limit
        return self.count_visits(self.num_unique_layers)

    @num_hidden_layers.setter
    def num_hidden_layers(self, number):
        # Afterwards it takes what it gives: assisted decoding sets it, and sets it back.
        if "visit_limit" not in vars(self):
            self.num_unique_layers = number
        else:
            whole = self.count_visits(self.num_unique_layers)
            self.visit_limit = None if number == whole else number

    def count_visits(self, layers):
        """Return the number of visits of `layers` layers."""
        return layers * self.num_loops

    def to_dict(self):
        """Return the content of config.json."""
        content = super().to_dict()
        content.pop("visit_limit", None)
        content["num_hidden_layers"] = content.pop("num_unique_layers")
        return content


__all__ = ["NanbeigeConfig"]
