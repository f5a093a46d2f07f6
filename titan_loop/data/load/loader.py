"""The training loader over prepared sources: arithmetic on window numbers, and reads from files."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

import numpy as np

from titan_loop.data.load.batches import DataVocabulary, GlobalBatchLoader, SourceProgress
from titan_loop.data.load.changes import SOURCES, match_sources
from titan_loop.data.load.mixture import CappedMixture, Exhausted, parse_mixture, weight_shares
from titan_loop.data.load.mixture_sources import (
    named_sources,
    open_source,
    read_cards,
    require_whole_prompts,
)
from titan_loop.data.load.pipeline_loader import PipelineLoader, PipelineOptions
from titan_loop.data.load.windows import Window
from titan_loop.data.open_files import OpenFiles
from titan_loop.data.source_card import SHORT_DIGEST
from titan_loop.errors import UserError, require_at_least, require_known
from titan_loop.ranks import warn_together

logger = logging.getLogger(__name__)


class SourceDemand(NamedTuple):
    """Tokens that a job needs of a source, and tokens of one epoch; both without padding.

    Attributes:
        disk_bytes: Size of its training split: tokens, document ends and loss masks.
    """

    name: str
    needed_tokens: int
    available_tokens: int
    max_epochs: int | None
    disk_bytes: int

    @property
    def epochs(self) -> float:
        """Number of times the source is read."""
        return self.needed_tokens / self.available_tokens


class WindowLoader(GlobalBatchLoader):
    """Mixes the windows of prepared sources in an order that only seed and position decide."""

    @dataclass(kw_only=True, slots=True)
    class Config(PipelineOptions):
        """The data; the window length and batch sizes come from `training`."""

        mixture: list[str] = field(default_factory=list)
        """Sources as PATH=WEIGHT[:packed][:max_epochs=N]; weights have any positive sum."""

        seed: int = 0
        """Seed of the windows' order and cuts; which source comes when does not depend on it."""

        max_epochs: int | None = None
        """Number of times a source without a cap of its own may be read; None for any number."""

        when_exhausted: Exhausted = "stop"
        """When a source has reached its cap: end the mixture, or go on without it."""

        unique_tokens: int | None = None
        """Tokens of the mixture after which the same windows come again in the same order; None
        for no such repetition."""

        def build(self, **split: Any) -> GlobalBatchLoader:
            """Return the loader of the mixture, or of the pipeline."""
            if self.pipeline:
                if self.mixture:
                    replaced = " ".join(self.mixture)
                    logger.info(f"dataloader.pipeline replaces dataloader.mixture={replaced}")
                return PipelineLoader(self, **split)
            if self.tokenizer_path:
                raise UserError(
                    f"dataloader.tokenizer_path={self.tokenizer_path} has no effect without "
                    "dataloader.pipeline: sources have their own; leave it out"
                )
            return PipelineOptions.build(self, **split)

        def vocabulary(self) -> DataVocabulary:
            """Return the vocabulary of all sources, held-out splits included."""
            if self.pipeline:
                return PipelineOptions.vocabulary(self)
            cards = read_cards(parse_mixture(self.mixture))
            largest = max(split.max_token_id for card in cards for split in card.splits.values())
            return DataVocabulary(cards[0].vocab_size, largest)

        def source_weights(self) -> dict[str, float]:
            """Return the weights of the mixture, by path; a pipeline replaces it."""
            entries = () if self.pipeline else parse_mixture(self.mixture)
            return {entry.path: entry.weight for entry in entries}

        def check(self) -> None:
            """Raise `UserError` for values that cannot work."""
            tokens = self.unique_tokens
            counts = {"dataloader.max_epochs": self.max_epochs, "dataloader.unique_tokens": tokens}
            require_at_least(1, **counts)
            require_known("dataloader.when_exhausted", self.when_exhausted, get_args(Exhausted))
            entries = [] if tokens is None else parse_mixture(self.mixture)
            if entries and (self.max_epochs or any(entry.max_epochs for entry in entries)):
                raise UserError(
                    f"dataloader.unique_tokens={tokens} repeats windows without an end: leave out "
                    "max_epochs"
                )

    def __init__(self, config: Config, *, seq_len: int, **split: Any) -> None:
        config.check()
        self.mixture = parse_mixture(config.mixture)
        cards = read_cards(self.mixture)
        if config.prefix:
            for entry, card in zip(self.mixture, cards, strict=True):
                require_whole_prompts(entry, card, seq_len)
        files = OpenFiles()
        self.sources = [
            open_source(entry, card, files, seq_len, config.seed)
            for entry, card in zip(self.mixture, cards, strict=True)
        ]
        self._names = list(named_sources([entry.path for entry in self.mixture]))
        self._max_epochs = [entry.max_epochs or config.max_epochs for entry in self.mixture]
        self._when_exhausted: Exhausted = config.when_exhausted
        self._repeat_after = config.unique_tokens and -(-config.unique_tokens // seq_len)
        super().__init__(
            config,
            self._describe(config.seed, seq_len, cards[0].tokenizer_sha256),
            seq_len=seq_len,
            **split,
        )
        self._place(0, [0] * len(self.sources))

    def _place(self, first_window: int, first_counts: Sequence[int]) -> None:
        """Start the mixture at a window, with `first_counts` windows of each source read before."""
        caps = [
            None if epochs is None else epochs * source.windows_per_epoch
            for epochs, source in zip(self._max_epochs, self.sources, strict=True)
        ]
        self.order = CappedMixture(
            self.mixture,
            caps,
            self._when_exhausted,
            first_window=first_window,
            first_counts=first_counts,
            repeat_after=self._repeat_after,
        )

    def locate(self, window: np.ndarray) -> np.ndarray:
        """Return (source index, epoch, number) of each global window (see the base class)."""
        if self.order.end is not None and int(window[-1]) >= self.order.end:
            raise UserError(
                f"the data ends at window {self.order.end}: {self._why_it_ends()} or add documents"
            )
        source, counter = self.order.locate(window)
        identity = np.empty((len(window), 3), dtype=np.uint64)
        identity[:, 0] = source
        for index in np.unique(source).tolist():
            chosen = source == index
            identity[chosen, 1], identity[chosen, 2] = self.sources[index].locate(counter[chosen])
        return identity

    def fill_window(self, identity: np.ndarray, window: Window) -> None:
        source, epoch, number = identity.tolist()
        self.sources[source].read_into(epoch, number, window)

    def progress(self) -> list[SourceProgress]:
        counts = self.order.counts(self.windows_consumed).tolist()
        return [
            SourceProgress(name, count, count * self._seq_len, count / different)
            for name, count, different in zip(
                self._names, counts, self._different_windows(), strict=True
            )
        ]

    def _different_windows(self) -> list[int]:
        """Return the number of windows of each source before the first comes again."""
        every = [source.windows_per_epoch for source in self.sources]
        if (repeated := self.order.repeated()) is None:
            return every
        return [max(1, min(pair)) for pair in zip(every, repeated.tolist(), strict=True)]

    def require_windows(self, windows: int) -> None:
        if self.order.end is not None and windows > self.order.end:
            raise UserError(
                f"total_tokens needs {windows} windows of {self._seq_len}, the mixture has "
                f"{self.order.end}: {self._why_it_ends()}, add documents or lower total_tokens"
            )

    def demand(self, windows: int) -> list[SourceDemand]:
        """Return the demand of a job of this many windows for every source.

        If repetition caps end the mixture earlier, the demand follows the sources' shares.
        """
        order = self.order
        if order.end is not None and windows > order.end:
            order = CappedMixture(self.mixture, [None] * len(self.mixture))
        counts, once = order.counts(windows).tolist(), self._different_windows()
        demand: list[SourceDemand] = []
        for index, source in enumerate(self.sources):
            tokens = self._seq_len * source.fill  # of a window
            demand.append(
                SourceDemand(
                    self._names[index],
                    round(counts[index] * tokens),
                    round(once[index] * tokens),
                    self._max_epochs[index],
                    source.shards.disk_bytes,
                )
            )
        return demand

    def log_sources(self, windows: int) -> None:
        """Log the sources' shares, and warn of the sources that are read more than once."""
        first = self.order.stretches[0].order if self.order.stretches else None
        for index, (name, source) in enumerate(zip(self._names, self.sources, strict=True)):
            share = 0.0 if first is None else first.shares[index] / first.period
            logger.info(
                f"source {name}: {100 * share:.2f} % of windows, {source.shards.tokens} tokens, "
                f"{source.describe_epoch()}"
            )
        for demand in self.demand(windows):
            if demand.epochs > 1:
                warn_together(
                    logger,
                    f"source {demand.name} will be read {demand.epochs:.2f} times: it has "
                    f"{demand.available_tokens} of the {demand.needed_tokens} tokens that "
                    "total_tokens takes from it",
                )

    def state_dict(self) -> dict[str, Any]:
        progress = self.progress()
        read = {
            "windows": [source.windows for source in progress],
            "tokens": [source.tokens for source in progress],
            "epochs": [round(source.epochs, 4) for source in progress],
        }
        return {**super().state_dict(), "read": read}

    def _restore(self, state_dict: dict[str, Any]) -> None:
        start = {"window": 0, "windows": [0] * len(self.sources)}
        last = [start, *state_dict["accepted"]][-1]
        self._place(last["window"], last["windows"])
        derived = [source.windows for source in self.progress()]
        stored = state_dict["read"]["windows"]
        if derived != stored:
            raise UserError(
                f"the checkpoint's position in the data is damaged: {self.windows_consumed} "
                f"windows are {derived} per source, not {stored}; choose another checkpoint"
            )

    def _continue_from(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Continue every source that was read before at its count of tokens, rounded up.

        If its seed, window length, contents or packing changed, its order did too: until the epoch
        ends, some tokens are read twice and others never.
        """
        saved = state_dict["data"]  # a task's has no sources
        matches = match_sources(saved.get(SOURCES, []), self._description[SOURCES])
        windows = state_dict.get("read", {}).get("windows", [])
        counts: list[int] = []
        for name, source, match in zip(self._names, self.sources, matches, strict=True):
            # Windows may have another length now: continue at the same token, not window.
            count = 0 if match is None else -(-windows[match] * saved["seq_len"] // self._seq_len)
            epoch, number = divmod(count, source.windows_per_epoch)
            warn_together(logger, f"source {name} continues at window {number} of epoch {epoch}")
            counts.append(count)
        self._place(self.windows_consumed, counts)
        return {"windows": counts}

    def _describe(self, seed: int, seq_len: int, tokenizer_sha256: str) -> dict[str, Any]:
        shares = weight_shares(self.mixture)
        sources: list[dict[str, Any]] = []
        for index, (entry, source) in enumerate(zip(self.mixture, self.sources, strict=True)):
            fields: dict[str, Any] = {
                "path": entry.path,
                "share": shares[index] / sum(shares),
                "tokens": source.shards.tokens,
                "contents": source.contents()[:SHORT_DIGEST],
            }
            if entry.packed:
                fields["packed"] = True
            if self._max_epochs[index] is not None:
                fields["max_epochs"] = self._max_epochs[index]
            sources.append(fields)
        tokenizer = tokenizer_sha256[:SHORT_DIGEST]
        description: dict[str, Any] = {"seed": seed, "seq_len": seq_len, "tokenizer": tokenizer}
        description[SOURCES] = sources
        if any(self._max_epochs):
            description["when_exhausted"] = self._when_exhausted
        if self._repeat_after:
            description["repeat_after_windows"] = self._repeat_after
        return description

    def _hashed_description(self) -> dict[str, Any]:
        # A folder may be moved or mounted elsewhere.
        sources = [{**source, "path": ""} for source in self._description[SOURCES]]
        return {**self._description, SOURCES: sources}

    def _why_it_ends(self) -> str:
        names = " and ".join(
            f"{entry.path} may be read max_epochs={epochs} times"
            for entry, epochs in zip(self.mixture, self._max_epochs, strict=True)
            if epochs
        )
        others = sum(entry.weight > 0 for entry in self.mixture) > 1
        fix = ", set --dataloader.when-exhausted renormalise" * others
        fix = "" if self._when_exhausted == "renormalise" else fix
        return f"{names} (when_exhausted={self._when_exhausted}); raise max_epochs{fix}"
