"""Configuration of retrofitted loops for transformers; written by titan_loop."""

from .configuration_nanbeige import NanbeigeConfig


class RetrofitConfig(NanbeigeConfig):
    """Llama's fields, the looped layers, and the parts that help the loop.

    Args:
        prelude_layers: Number of layers before the loop.
        coda_layers: Number of layers after the loop.
        bridge: Whether steps after the first read the prelude's output through a projection.
        mixer: Whether every step reads state and prelude's output through a linear map.
        start_at_zero: Whether the mixer's state starts at zero, the mean of the noise that it
            was trained with; otherwise it starts as the prelude's output.
        damping: Number of steps that make one pass through the looped layers.
        block: What differs from Llama's blocks: options of titan_loop's `BlockOptions`.
        **kwargs: As in `NanbeigeConfig`.
    """

    model_type = "titan_loop_retrofit"

    def __init__(
        self,
        prelude_layers: int = 0,
        coda_layers: int = 0,
        bridge: bool = False,
        mixer: bool = False,
        start_at_zero: bool = False,
        damping: int = 1,
        block: dict | None = None,
        **kwargs,
    ):
        self.prelude_layers = prelude_layers
        self.coda_layers = coda_layers
        self.bridge = bridge
        self.mixer = mixer
        self.start_at_zero = start_at_zero
        self.damping = damping
        self.block = dict(block or {})
        super().__init__(**kwargs)

    def count_visits(self, layers):
        """Return the number of visits of `layers` layers."""
        outside = self.prelude_layers + self.coda_layers
        return outside + (layers - outside) * self.num_loops


__all__ = ["RetrofitConfig"]
