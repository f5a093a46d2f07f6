"""Configuration of LoopCoder for programs with its model but no class; written by titan_loop."""

from transformers import LlamaConfig


class IQuestLoopCoderConfig(LlamaConfig):
    """Llama's fields, and the loop.

    Args:
        loop_num: Number of times that the whole stack is applied.
        loop_window_size: Keys of its own loop that a token sees from the second loop on.
        **kwargs: As in `LlamaConfig`.
    """

    model_type = "iquestloopcoder"

    def __init__(self, loop_num: int = 2, loop_window_size: int = 64, **kwargs):
        self.loop_num = loop_num
        self.loop_window_size = loop_window_size
        super().__init__(**kwargs)


__all__ = ["IQuestLoopCoderConfig"]
