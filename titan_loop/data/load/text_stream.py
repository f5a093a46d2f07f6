"""Training on raw text without preparing it, for small experiments: torchtitan's own loader.

Text is read from start to end and tokenised while training. Unlike prepared sources, its order
depends on the number of ranks, a resume starts the text again, `data_hash` does not change with
what was read, and there are no mixtures, repetition caps, loss masks, packing or held-out text. The
log says so, too.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_loop.data.load.batches import (
    Batch,
    BatchesRead,
    DataVocabulary,
    GlobalBatchLoader,
    Position,
)
from titan_loop.errors import UserError
from titan_loop.ranks import warn_together
from titan_loop.text.tokenizer import load_tokenizer

# After `batches`, which imports the shims that go before any torchtitan module.
from torchtitan.components.tokenizer import BaseTokenizer  # isort: skip

logger = logging.getLogger(__name__)

_DATASET_NAME = "titan_loop_text"

WARNING = (
    "text is streamed without being prepared: its order depends on the number of ranks, resuming "
    "starts the text again, data_hash proves nothing, and there are no mixtures, caps or masks; "
    "titan-loop data tokenize prepares it"
)


class StreamTokenizer(BaseTokenizer):
    """Encodes a document and ends it with the EOS token, as preparing it would.

    Args:
        path: A tokenizer.json.
        eos_token: Ends every document.

    Raises:
        UserError: If the tokenizer is missing, or does not have the token.
    """

    def __init__(self, path: str, eos_token: str) -> None:
        super().__init__()
        self._tokenizer = load_tokenizer(path)
        self.eos_id = self._tokenizer.token_to_id(eos_token)
        if self.eos_id is None:
            raise UserError(f"dataloader.eos_token={eos_token} is not in the tokenizer {path}")

    def encode(self, text: str, *, add_bos: bool = False, add_eos: bool = True) -> list[int]:
        """Return the ids of a document; `add_bos` is torchtitan's and has no effect."""
        assert self.eos_id is not None
        return self._tokenizer.encode(text, add_special_tokens=False).ids + [self.eos_id] * add_eos

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def get_vocab_size(self) -> int:
        """Return the number of tokens."""
        return self._tokenizer.get_vocab_size()


class TextStreamLoader(GlobalBatchLoader):
    """Reads and tokenises text while training; see the module for what it cannot guarantee.

    Raises:
        UserError: For a missing folder or tokenizer; later, from reading, for a file that cannot be
            read or parsed, or a record without text.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GlobalBatchLoader.Config):
        """The text; `dataset_path` is a local folder of JSONL or Parquet files."""

        tokenizer: str = ""
        """A tokenizer.json."""

        eos_token: str = "<|endoftext|>"
        """Ends every document."""

        text_key: str = "text"
        """Field that holds a document's text."""

        def vocabulary(self) -> DataVocabulary:
            """Return the tokenizer's vocabulary: any of its tokens may occur."""
            size = StreamTokenizer(self.tokenizer, self.eos_token).get_vocab_size()
            return DataVocabulary(size, size - 1)

        def source_paths(self) -> list[str]:
            """Return nothing: streamed text has no held-out split."""
            return []

    def __init__(self, config: Config, *, seq_len: int, **split: Any) -> None:
        if not config.dataset_path or "://" in config.dataset_path or config.dataset:
            raise UserError(
                f"dataloader.dataset_path={config.dataset_path} must be a local folder of text, "
                "and dataloader.dataset stays empty"
            )
        if not Path(config.dataset_path).is_dir():
            raise UserError(
                f"dataloader.dataset_path={config.dataset_path} is not a folder: give one with "
                "JSONL or Parquet files"
            )
        description = {"streamed text": config.dataset_path, "seq_len": seq_len}
        super().__init__(config, description, seq_len=seq_len, **split)
        self._config = config
        self._stream: Iterator[Batch] | None = None

    def log_sources(self, windows: int) -> None:
        """Say what this loader cannot guarantee."""
        warn_together(logger, "%s", WARNING)

    def read(self, position: Position) -> BatchesRead:
        """Read on, wherever the stream is."""
        per_micro_batch = self._dp_world_size * self._local_batch_size
        try:
            if self._stream is None:
                self._stream = self._open()
            batches = [next(self._stream) for _ in range(position.windows // per_micro_batch)]
        except UserError:  # a record without text
            raise
        except (OSError, ValueError) as error:  # what `datasets` raises for files and their lines
            self._stream = None
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UserError(
                f"dataloader.dataset_path={self._config.dataset_path} cannot be read ({reason}): "
                "repair its files, or prepare them with titan-loop data tokenize, which counts bad "
                "records"
            ) from error
        return BatchesRead(batches, position.data_hash)

    def _text_of(self, record: Mapping[str, Any]) -> str:
        text = record.get(self._config.text_key)
        if not isinstance(text, str):
            raise UserError(
                f"dataloader.dataset_path={self._config.dataset_path}: a record has no text in its "
                f"field {self._config.text_key!r}, only {', '.join(record)}: set "
                "dataloader.text_key, or drop the record"
            )
        return text

    def _open(self) -> Iterator[Batch]:
        # Slow to import, and needed here only.
        from datasets import load_dataset
        from torchtitan.hf_datasets import DatasetConfig
        from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader

        config = self._config
        DATASETS[_DATASET_NAME] = DatasetConfig(
            path="",
            loader=lambda path: load_dataset(path, split="train", streaming=True),
            sample_processor=self._text_of,
        )
        loader = HuggingFaceTextDataLoader.Config(
            dataset=_DATASET_NAME, dataset_path=config.dataset_path
        ).build(
            dp_world_size=self._dp_world_size,
            dp_rank=self._dp_rank,
            tokenizer=StreamTokenizer(config.tokenizer, config.eos_token),
            seq_len=self._seq_len,
            local_batch_size=self._local_batch_size,
        )
        return iter(loader)
