"""Evaluation while a model trains: the fields `held_out.*` and `suite.*` of a run.

`titan_loop.evaluation.while_training` builds callbacks from them; the trainer does not read them.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from annotated_types import Ge

from titan_loop.bounds import Hint
from titan_loop.data.load.held_out_windows import why_not_scored
from titan_loop.data.load.loader import WindowLoader
from titan_loop.errors import Refusal, UserError


@dataclass(kw_only=True, slots=True)
class HeldOutConfig:
    """Held-out loss per source and recurrent step while training."""

    interval: Annotated[int | None, Ge(0), Hint("0 turns it off")] = None
    """Steps between two evaluations; another one follows the last step. 0 turns them off. None uses
    checkpoint.interval if there is held-out text, else 0."""

    sources: list[str] = field(default_factory=list)
    """Tokenised sources whose held-out split is read; empty for the mixture's."""

    depths: Annotated[list[int], Ge(1)] = field(default_factory=lambda: [1, 2, 4])
    """Recurrent steps to score; may exceed the trained R."""

    windows: Annotated[int, Ge(1)] = 32
    """Windows per source, always the same ones."""

    def remarks(self, training_sources: Sequence[str], seq_len: int) -> Iterator[str]:
        """Yield the sources whose held-out text cannot be scored."""
        for path in {**dict.fromkeys(training_sources), **dict.fromkeys(self.sources)}:
            if reason := why_not_scored(path, seq_len):
                fix = "prepare it with a larger --held-out-fraction"
                yield f"{reason}: neither held_out nor titan-loop eval can score it; {fix}"

    def scored(self, training_sources: Sequence[str], seq_len: int) -> list[str]:
        """Return sources (by default training's) whose held-out text fills a window."""
        sources = self.sources or training_sources
        return [path for path in sources if not why_not_scored(path, seq_len)]

    def data_refusals(
        self, training_sources: Sequence[str], vocab_size: int, seq_len: int
    ) -> Iterator[Refusal]:
        """Refuse data on which held-out loss cannot be measured."""
        if not self.interval and (self.interval == 0 or not self.sources):
            return
        sources = self.sources or training_sources
        refuse = partial(Refusal.of, "held_out.interval", self.interval)
        if not sources:
            yield refuse("is set, and this data has no held-out text", "set it to 0")
            return
        # A mixture of all sources refuses missing ones, and those with different tokenizers.
        once = {os.path.realpath(path): path for path in [*training_sources, *sources]}
        together = [f"{path}=1" for path in once.values()]
        try:
            largest = WindowLoader.Config(mixture=together).vocabulary().largest_token
        except UserError as error:
            yield Refusal("held_out.sources", str(error))
            return
        if largest >= vocab_size:
            problem = f"has the token {largest}, beyond model.vocab_size={vocab_size}"
            yield Refusal.of("held_out.sources", [*sources], problem)
        reasons = [why_not_scored(path, seq_len) for path in sources]
        if all(reasons):
            fix = "prepare it with a larger --held-out-fraction, or set --held-out.interval 0"
            yield refuse(f"cannot score any text: {'; '.join(reasons)}", fix)


@dataclass(kw_only=True, slots=True)
class SuiteConfig:
    """Held-out text, or the exam of the run's generated task, while the model trains."""

    interval: Annotated[int, Ge(0), Hint("0 turns it off")] = 0
    """Steps between two evaluations; another one follows the last step. 0 turns them off."""

    tasks: list[str] = field(default_factory=lambda: ["held_out"])
    """held_out, and the generated task of the training data."""

    depths: Annotated[list[int], Ge(1)] = field(default_factory=lambda: [1, 4])
    """Recurrent steps to score; may exceed the trained R."""

    windows: Annotated[int, Ge(1)] = 16
    """Held-out windows per source, always the same ones."""

    questions: Annotated[int, Ge(1)] = 32
    """Questions per stratum of the exam (the first ones)."""
