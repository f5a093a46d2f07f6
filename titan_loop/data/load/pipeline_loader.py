"""A torchdata pipeline of your own instead of prepared sources; its documents are packed.

    FUNCTION(rank, ranks) ─► a node of torchdata.nodes or a StatefulDataLoader, which yields
        str, {"text": …}    a document's text
        ints, {"ids": …}    a document's token ids
        a list of these     a batch

Each data-parallel rank has a pipeline, which its tensor- and context-parallel ranks read, too.
Unlike other loaders, this one cannot find window k without reading all before it: a checkpoint
holds the state of every rank's pipeline, and resumes with as many ranks alone. The state is a
safetensors file with JSON in its header: nothing is read from a pickle.
"""

import copy
import hashlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titan_loop.data.load.batches import BatchesRead, DataVocabulary, GlobalBatchLoader, Position
from titan_loop.data.load.changes import SOURCES
from titan_loop.data.load.windows import Window
from titan_loop.data.source_card import SHORT_DIGEST, file_sha256
from titan_loop.errors import UserError
from titan_loop.plugins import user_function
from titan_loop.storage.json_files import DamagedFileError
from titan_loop.text.encoding import DocumentEncoder
from titan_loop.text.tokenizer import (
    END_OF_TEXT,
    load_tokenizer,
    require_token,
    template_bos,
    vocab_size,
)

logger = logging.getLogger(__name__)

FIELD = "dataloader.pipeline"
RANKS = "pipeline_ranks"


@dataclass(kw_only=True, slots=True)
class PipelineOptions(GlobalBatchLoader.Config):
    """Options of a pipeline of one's own."""

    pipeline: str = ""
    """A torchdata pipeline of your own instead of the mixture: PACKAGE.MODULE:FUNCTION, called with
    a data-parallel rank and their number. Resumes with the same number of ranks alone."""

    tokenizer_path: str = ""
    """The tokenizer.json of the pipeline's text or ids; prepared sources have theirs."""

    eos_token: str = END_OF_TEXT
    """Token that ends every document of the pipeline."""

    def tokenizer_file(self) -> str:
        """Return `tokenizer_path`; `UserError` without one."""
        if not self.tokenizer_path:
            fix = "dataloader.tokenizer_path, the tokenizer.json that its text or ids belong to"
            raise UserError(f"{FIELD}={self.pipeline} needs {fix}")
        return self.tokenizer_path

    def vocabulary(self) -> DataVocabulary:
        """Return the vocabulary of the tokenizer, whose ids the pipeline's are."""
        size = vocab_size(load_tokenizer(self.tokenizer_file()))
        return DataVocabulary(size, size - 1)


class PipelineLoader(GlobalBatchLoader):
    """Packs the documents of `dataloader.pipeline` into windows of L + 1 tokens."""

    may_end = True

    def __init__(
        self,
        config: PipelineOptions,
        *,
        seq_len: int,
        dp_world_size: int,
        dp_rank: int,
        **split: Any,
    ) -> None:
        self._encoder = DocumentEncoder(config.tokenizer_file())
        tokenizer = self._encoder.tokenizer
        self._eos = require_token(tokenizer, config.eos_token, "dataloader.eos_token")
        bos = template_bos(tokenizer, config.tokenizer_path, "correct its post_processor")
        self._begin = [] if bos is None else [bos]
        self._vocabulary = vocab_size(tokenizer)
        fix = "give PACKAGE.MODULE:FUNCTION, importable from the current folder"
        self._function = user_function(config.pipeline, FIELD, fix)
        self._called = f"{FIELD}={config.pipeline} of rank {dp_rank}"
        self._pipeline: Any = None
        self._items: Iterator[Any] | None = None
        self._read = 0  # items of the pipeline
        # Tokens that were read and are in no window yet, and where their documents end.
        self._left = self._ends = np.empty(0, dtype=np.int64)
        self._read_hash = ""
        self._before_fault: dict[str, Any] | None = None
        self._resumes = False
        description = {
            "pipeline": config.pipeline,
            "tokenizer": file_sha256(Path(config.tokenizer_path))[:SHORT_DIGEST],
            "eos_id": self._eos,
            "seq_len": seq_len,
            SOURCES: [],
        }
        super().__init__(
            config,
            description,
            seq_len=seq_len,
            dp_world_size=dp_world_size,
            dp_rank=dp_rank,
            **split,
        )
        # A batch read ahead could not be given back. Pipelines have workers and prefetchers.
        self._prefetch = False

    def read(self, position: Position) -> BatchesRead:
        """As in the base class, without the windows that are jumped over."""
        ranks = self._dp_world_size
        own = self.next_windows(position.first_window, position.windows)[::ranks] // ranks
        self._jumped_before = iter(np.diff(own, prepend=position.first_window // ranks - 1) - 1)
        return super().read(position)

    def fill_window(self, identity: np.ndarray, window: Window) -> None:
        """Write this rank's next window, whatever its number."""
        for _ in range(next(self._jumped_before)):
            self._next_window()
        ids, ends = self._next_window()
        window.fill(ids, ends)

    def log_progress(self, step: int) -> None:
        """Log the number of items that this rank's pipeline has yielded."""
        logger.info("items of the pipeline read by step %d: %d", step, self._read)

    def close(self) -> None:
        """Let go of the pipeline, which ends its workers (see the base class)."""
        super().close()
        self._items = self._pipeline = None

    def why_it_ends(self, global_batch_windows: int) -> str | None:
        """As in the base class: read what the next `read_step` needs of this rank."""
        first = self.windows_consumed
        last = int(self.next_windows(first, global_batch_windows)[-1])
        try:
            self._read_for((last + 1 - first) // self._dp_world_size)
        except UserError as error:
            return str(error)
        return None

    def _next_window(self) -> tuple[np.ndarray, np.ndarray]:
        self._read_for(1)
        size = self._seq_len + 1
        ids, ends = self._left[:size], self._ends[self._ends <= size]
        # Neighbours share a token, so that each one is predicted once.
        self._left = self._left[self._seq_len :]
        self._ends = self._ends[self._ends > self._seq_len] - self._seq_len
        content = self._read_hash.encode() + ids.tobytes() + ends.tobytes()
        self._read_hash = hashlib.blake2b(content, digest_size=16).hexdigest()
        return ids, ends

    def _read_for(self, windows: int) -> None:
        """Read items until there are tokens for so many windows."""
        if len(self._left) > windows * self._seq_len:
            return
        # A checkpoint after a fault holds this: the items since are read again. The state after
        # an end would begin at the first item, and the one after a fault behind the faulty item.
        before = self._state()
        try:
            while len(self._left) <= windows * self._seq_len:
                self._take(self._next_item())
        except UserError:
            self._before_fault = before
            raise

    def _next_item(self) -> Any:
        try:
            item = next(self._opened())
        except UserError:
            raise
        except StopIteration:
            raise self._fault("ended: let it yield more, or begin again by itself") from None
        except Exception as error:  # the user's code raises any kind
            raise self._fault(f"failed ({_told(error)})") from error
        self._read += 1
        return item

    def _take(self, item: Any) -> None:
        """Append the documents of an item, each with EOS at its end; empty ones are left out."""
        if isinstance(item, Mapping):
            if not (known := [key for key in ("text", "ids") if key in item]):
                names = ", ".join(map(repr, item))
                raise self._fault(f"yields a record with {names}: it needs 'text' or 'ids'")
            item = item[known[0]]
        if isinstance(item, list | tuple) and not all(
            isinstance(each, int | np.integer) for each in item
        ):
            for each in item:
                self._take(each)
            return
        if isinstance(item, str):
            try:
                (ids,) = self._encoder.ids([item] if item.strip() else [""])
            except Exception as error:  # half of a surrogate pair
                raise self._fault(f"yields a text that cannot be encoded ({error})") from error
            ids = np.concatenate([self._begin, ids]).astype(np.int64) if len(ids) else ids
        else:
            ids = np.asarray(item) if item is not None else np.array(None)
            if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
                shown = f"{type(item).__name__} {str(item)[:40]!r}"
                raise self._fault(f"yields {shown}: yield texts or rows of token ids")
            if len(wrong := ids[(ids < 0) | (ids >= self._vocabulary)]):
                fix = f"the tokenizer has the ids 0 to {self._vocabulary - 1}"
                raise self._fault(f"yields the token id {wrong[0]}: {fix}")
        if not len(ids):
            return
        end = [] if ids[-1] == self._eos else [self._eos]
        self._left = np.concatenate([self._left, ids, end]).astype(np.int64)
        self._ends = np.append(self._ends, len(self._left))

    def _opened(self) -> Iterator[Any]:
        if self._items is None:
            self._items = iter(self._made())
        return self._items

    def _made(self) -> Any:
        from torch.utils.data import IterableDataset
        from torchdata.nodes import BaseNode, Loader
        from torchdata.stateful_dataloader import StatefulDataLoader

        if self._pipeline is None:
            logger.info("building %s", self._called)
            try:
                with warnings.catch_warnings():  # of torchdata's own use of torch
                    warnings.filterwarnings("ignore", "'set_vital' is deprecated")
                    made = self._function(self._dp_rank, self._dp_world_size)
            except UserError:
                raise
            except Exception as error:
                raise self._fault(f"could not be built ({_told(error)})") from error
            if isinstance(made, BaseNode):
                made = Loader(made, restart_on_stop_iteration=False)
            if not isinstance(made, Loader | StatefulDataLoader):
                fix = "return a node of torchdata.nodes or a StatefulDataLoader"
                raise self._fault(f"is a {type(made).__name__}: {fix}")
            data = getattr(made, "dataset", None)
            # torchdata 0.11 counts skipped items twice, so a second resume would skip too many.
            if isinstance(data, IterableDataset) and not any(
                hasattr(each, "state_dict") for each in (data, iter(data))
            ):
                fix = f"give {type(data).__name__} state_dict and load_state_dict, or return a node"
                raise self._fault(f"reads an IterableDataset that cannot be resumed exactly: {fix}")
            self._pipeline = made
        return self._pipeline

    def _fault(self, problem: str) -> UserError:
        return UserError(f"{self._called}, after {self._read} items, {problem}")

    # Resuming

    def _state(self) -> dict[str, Any]:
        self._opened()
        try:
            # A copy: it may share lists with the pipeline, which changes them.
            pipeline = copy.deepcopy(self._pipeline.state_dict())
        except Exception as error:
            raise self._fault(f"has no state that can be saved ({_told(error)})") from error
        own = {"read": self._read, "left": self._left, "ends": self._ends}
        return {"pipeline": pipeline, **own, "read_hash": self._read_hash}

    def state_dict(self) -> dict[str, Any]:
        """As in the base class; the pipelines' own states are in `rank_files`."""
        return {**super().state_dict(), RANKS: self._dp_world_size, "read": {"windows": []}}

    def rank_files(self) -> dict[str, bytes]:
        state = self._state() if self._before_fault is None else self._before_fault
        return {self._file: pack_state(state)}

    def load_rank_files(self, folder: Path) -> None:
        if not self._resumes:
            return
        state = read_state(folder / self._file)
        self._read, self._read_hash = state["read"], state["read_hash"]
        self._left, self._ends = state["left"], state["ends"]
        try:
            self._made().load_state_dict(state["pipeline"])
        except Exception as error:
            raise self._fault(f"cannot continue from its state ({_told(error)})") from error

    @property
    def _file(self) -> str:
        return f"pipeline_{self._dp_rank:05d}.safetensors"

    def _restore(self, state_dict: dict[str, Any]) -> None:
        if (saved := state_dict[RANKS]) != self._dp_world_size:
            raise UserError(
                f"{FIELD}={self._description['pipeline']} was saved on {saved} data-parallel ranks "
                f"and cannot go on with {self._dp_world_size}: start {saved} ranks, or prepare its "
                "documents as a source, which any number can read"
            )
        self._resumes = True


def _told(error: Exception) -> str:
    """Return the last line of an error: torchdata puts a worker's traceback before it."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def pack_state(state: object) -> bytes:
    """Return a state as the bytes of a safetensors file."""
    from safetensors.torch import save

    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_packed(state, tensors))
    return save(tensors, {"state": text})


def read_state(path: Path) -> Any:
    """Return the state in a file of `pack_state`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return _unpacked(json.loads(file.metadata()["state"]), file.get_tensor)
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise DamagedFileError(path, str(error), "choose another checkpoint") from error


def _packed(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a value as JSON, in which every object has one key: the kind of a value."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [_packed(each, tensors) for each in value]
        case tuple():
            return {"tuple": [_packed(each, tensors) for each in value]}
        case Mapping():
            return {"dict": [_packed([*pair], tensors) for pair in value.items()]}
        case bytes():
            return {"bytes": value.hex()}
        case np.generic():
            return _packed(value.item(), tensors)
        case torch.Tensor() | np.ndarray():
            name = str(len(tensors))
            tensors[name] = torch.as_tensor(value).detach().cpu().clone().contiguous()
            return {"tensor" if isinstance(value, torch.Tensor) else "array": name}
    raise UserError(
        f"{FIELD}: the pipeline's state holds a {type(value).__name__}, which a checkpoint cannot "
        "store: let state_dict() return numbers, texts, lists, dicts, arrays and tensors"
    )


def _unpacked(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpacked(each, tensor) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "dict":
            return dict(_unpacked(content, tensor))
        case "tuple":
            return tuple(_unpacked(content, tensor))
        case "bytes":
            return bytes.fromhex(content)
        case _:
            return tensor(content) if kind == "tensor" else tensor(content).numpy()
