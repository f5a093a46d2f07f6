"""What to evaluate while a model trains: the fields `held_out.*` and `suite.*` of a run.

Training only carries them. `titan_loop.evaluation.while_training` builds the callbacks that follow
them.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from titan_loop.data.load.loader import WindowLoader
from titan_loop.data.source_card import SourceCard
from titan_loop.errors import UserError


@dataclass(kw_only=True, slots=True)
class HeldOutConfig:
    """Held-out loss per source and recurrent step while training."""

    interval: int = 0
    """Steps between two evaluations; another one follows the last step. 0 turns them off."""

    sources: list[str] = field(default_factory=list)
    """Tokenised sources whose held-out split is read; empty for those of the mixture."""

    depths: list[int] = field(default_factory=lambda: [1, 2, 4])
    """Recurrent steps to score; may exceed the trained R."""

    windows: int = 32
    """Windows per source, always the same ones."""

    @property
    def enabled(self) -> bool:
        """Whether held-out loss is measured."""
        return self.interval > 0

    def check_settings(self) -> None:
        """Raise `UserError` for values that cannot work with any data."""
        if self.interval < 0:
            raise UserError(f"held_out.interval={self.interval} is negative; 0 turns it off")
        if self.windows < 1:
            raise UserError(f"held_out.windows={self.windows} must be at least 1")
        if self.enabled and (not self.depths or min(self.depths) < 1):
            raise UserError(f"held_out.depths={self.depths} must name depths of at least 1")

    def check(self, training_sources: Sequence[str], vocab_size: int, seq_len: int) -> None:
        """Raise `UserError` for data without usable held-out text.

        Args:
            training_sources: Prepared sources of the mixture, the default for `sources`.
            vocab_size: Vocabulary size of the model.
            seq_len: L, the number of tokens predicted in a window.
        """
        if not self.enabled:
            return
        sources = self.sources or training_sources
        if not sources:
            raise UserError(
                f"held_out.interval={self.interval}: this data has no held-out text; set it to 0"
            )
        # As one mixture: that refuses missing sources and another tokenizer than training's.
        once = {os.path.realpath(path): path for path in [*training_sources, *sources]}
        together = [f"{path}=1" for path in once.values()]
        largest = WindowLoader.Config(mixture=together).vocabulary().largest_token
        if largest >= vocab_size:
            raise UserError(
                f"held_out.sources={list(sources)}: the largest token {largest} does not fit "
                f"model.vocab_size={vocab_size}"
            )
        for path in sources:
            split = SourceCard.read(Path(path)).splits.get("held_out")
            if split is not None and split.tokens > seq_len:
                continue
            lacks = (
                "holds no document out"
                if split is None or not split.tokens
                else f"holds out {split.tokens} tokens, less than one window of training.seq_len + "
                f"1 = {seq_len + 1}"
            )
            raise UserError(
                f"held_out.interval={self.interval}: source {path} {lacks}: prepare it with a "
                "larger --held-out-fraction, name others with --held-out.sources, or set "
                "--held-out.interval 0"
            )


@dataclass(kw_only=True, slots=True)
class SuiteConfig:
    """A small suite of offline tasks, asked of the model while it trains."""

    interval: int = 0
    """Steps between two evaluations; another one follows the last step. 0 turns them off."""

    tasks: list[str] = field(default_factory=lambda: ["held_out", "mano", "multi_hop"])
    """Any of held_out, mano, multi_hop and mmlu_dev; `offline` is all of them."""

    depths: list[int] = field(default_factory=lambda: [1, 4])
    """Recurrent steps to read; may exceed the trained R."""

    windows: int = 16
    """Held-out windows per source, always the same ones."""

    questions: int = 32
    """Questions per task (the first ones). Each answer choice costs one forward pass."""

    @property
    def enabled(self) -> bool:
        """Whether the suite is asked."""
        return self.interval > 0
