"""Stands where torchtitan expects a tokenizer: training reads token ids only."""

from dataclasses import dataclass
from typing import Any

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
from torchtitan.components.tokenizer import BaseTokenizer


class PreparedTokens(BaseTokenizer):
    """A tokenizer that refuses to be used; the data was tokenised when it was prepared."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to configure."""

    def __init__(self, config: Config, *, tokenizer_path: str = "") -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        """Refuse."""
        raise NotImplementedError(
            "training reads prepared token ids; load a source's tokenizer.json"
        )

    def decode(self, *args: Any, **kwargs: Any) -> str:
        """Refuse."""
        raise NotImplementedError(
            "training reads prepared token ids; load a source's tokenizer.json"
        )

    def get_vocab_size(self) -> int:
        """Refuse."""
        raise NotImplementedError(
            "training reads prepared token ids; load a source's tokenizer.json"
        )
