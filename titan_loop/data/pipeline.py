"""A pipeline of one's own, through torchdata: one of its nodes or a `StatefulDataLoader`.

    FUNCTION(rank, ranks) ─► str, {"text": …}          a document's text
                             ints, {"ids": …}          a document's token ids
                             {"input", "labels"[, "positions"]}   a finished window
                             lists of these            batches

Its state may hold all that JSON holds, tuples, bytes, arrays and tensors. It is stored as a
safetensors file with JSON in its header: nothing is read from a pickle.
"""

import copy
import json
import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from titan_loop.data.labels import IGNORED
from titan_loop.errors import UserError
from titan_loop.plugins import import_user_module

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

FIELD = "dataloader.pipeline"
_STATE = "state"
_MOST_OBJECTS = 10_000  # of a pipeline are looked at; the buffer is near its root


def find_pipeline(name: str, field: str = FIELD) -> Callable[[int, int], Any]:
    """Return the function `PACKAGE.MODULE:FUNCTION`; raise `UserError` if there is none."""
    module, colon, function = name.partition(":")
    fix = "give PACKAGE.MODULE:FUNCTION, importable from the current folder"
    if not (module and colon and function) or module.startswith("."):
        raise UserError(f"{field}={name}: {fix}")
    found = getattr(import_user_module(module, f"{field}={name}", fix), function, None)
    if not callable(found):
        raise UserError(f"{field}={name}: {module} has no function {function!r}")
    return found


class Pipeline:
    """The pipeline of one data-parallel rank; its function is called when the first item is read.

    All errors of the pipeline are `UserError`s of one line.
    """

    def __init__(self, name: str, rank: int, ranks: int, *, field: str = FIELD) -> None:
        self._called = f"{field}={name} of rank {rank}"
        self._function = find_pipeline(name, field)
        self._place = rank, ranks
        self._loader: Any = None
        self._items: Iterator[Any] | None = None
        self._stopped = False
        self._noted: tuple[Mapping[str, Any] | None, int] = None, 0
        self.read = self._used = 0

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield the content of each item: documents (a text, or int64 ids), windows (mappings)."""
        while True:
            self._used = self.read
            try:
                item = next(self._open())
            except StopIteration:
                self._stopped = True
                return
            except UserError:
                raise
            except Exception as error:  # the user's code raises any kind
                raise self._fault(f"failed ({_told(error)})") from error
            self.read += 1
            yield [*self._documents(item)]

    def note_state(self) -> None:
        """Keep torchdata's state after the last item; call it before the first item is read."""
        self._open()
        try:
            state = self._loader.state_dict()
        except Exception as error:
            raise self._fault(f"has no state that can be saved ({_told(error)})") from error
        # A copy: it may share lists with the pipeline, which changes them.
        self._noted = copy.deepcopy(state), self.read

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last item in use: torchdata's, and the items read since it.

        After an end or a fault torchdata's is the newest that was noted. Its present one is behind
        the faulty item; after its end, a longer `StatefulDataLoader` would begin at its first item.
        """
        if not self._stopped:
            self.note_state()
            self._used = self.read
        state, read = self._noted
        return {"pipeline": state, "read": read, "read_since": self._used - read}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the item that `state` followed."""
        noted, self.read = state["pipeline"], state["read"]
        self._noted = copy.deepcopy(noted), self.read
        try:
            self._made().load_state_dict(noted)
        except Exception as error:
            raise self._fault(f"cannot continue from its state ({_told(error)})") from error
        items = iter(self)
        for _ in range(state["read_since"]):
            if next(items, None) is None:
                raise self._fault("ended before the place where the checkpoint goes on")

    def close(self) -> None:
        """Let go of the pipeline, which ends its workers."""
        self._items = self._loader = None

    def _open(self) -> Iterator[Any]:
        if self._items is None:
            self._items = iter(self._made())
        return self._items

    def _made(self) -> Any:
        from torchdata.nodes import BaseNode, Loader
        from torchdata.stateful_dataloader import StatefulDataLoader

        if self._loader is None:
            logger.info("building %s", self._called)
            try:
                with warnings.catch_warnings():  # of torchdata's own use of torch
                    warnings.filterwarnings("ignore", "'set_vital' is deprecated")
                    made = self._function(*self._place)
            except UserError:
                raise
            except Exception as error:
                raise self._fault(f"could not be built ({_told(error)})") from error
            if isinstance(made, BaseNode):
                made = Loader(made, restart_on_stop_iteration=False)
            if not isinstance(made, Loader | StatefulDataLoader):
                fix = "return a node of torchdata.nodes or a StatefulDataLoader"
                raise self._fault(f"is a {type(made).__name__}: {fix}")
            if _shuffles_stream(made):
                raise self._fault(
                    "shuffles a stream of `datasets` with a buffer, whose documents are lost when "
                    "a run is resumed: shuffle a map-style dataset, or shards alone"
                )
            self._loader = made
        return self._loader

    def _documents(self, item: Any) -> Iterator[Any]:
        if isinstance(item, Mapping):
            if {"input", "labels"} <= item.keys():
                yield item
                return
            for key in ("text", "ids"):
                if key in item:
                    yield from self._documents(item[key])
                    return
            names = ", ".join(map(repr, item))
            raise self._fault(f"yields a record with {names}: it needs 'text', 'ids' or a window")
        if isinstance(item, str):
            if item.encode(errors="replace").decode() != item:
                fix = "replace it, as text.encode(errors='replace').decode() does"
                raise self._fault(f"yields a text with half of a surrogate pair: {fix}")
            yield item
            return
        if isinstance(item, list | tuple) and any(not isinstance(each, int) for each in item):
            for each in item:
                yield from self._documents(each)
            return
        ids = np.asarray(item) if item is not None else np.array(None)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            shown = f"{type(item).__name__} {str(item)[:40]!r}"
            raise self._fault(f"yields {shown}: yield texts, rows of token ids or windows")
        yield ids.astype(np.int64)

    def ids(self, document: np.ndarray, vocabulary: int, eos_id: int) -> np.ndarray:
        """Return a document's ids, checked, with EOS at the end; an empty one stays empty."""
        self._require_ids(document, vocabulary)
        if len(document) and document[-1] != eos_id:
            return np.append(document, eos_id)
        return document

    def window(
        self, item: Mapping[str, Any], vocabulary: int, length: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return input, labels and positions of a finished window, checked."""
        positions = item.get("positions", np.arange(length))
        found = [np.asarray(each) for each in (item["input"], item["labels"], positions)]
        for name, values in zip(("input", "labels", "positions"), found, strict=True):
            if values.shape != (length,) or values.dtype.kind not in "iu":
                kind = f"{name} of shape {values.shape} and type {values.dtype}"
                raise self.bad(f"{kind}: it takes {length} ids (training.seq_len)")
        inputs, labels, positions = (values.astype(np.int64) for values in found)
        self._require_ids(inputs, vocabulary)
        self._require_ids(labels[labels != IGNORED], vocabulary)
        return inputs, labels, positions

    def _require_ids(self, ids: np.ndarray, vocabulary: int) -> None:
        wrong = ids[(ids < 0) | (ids >= vocabulary)]
        if len(wrong):
            fix = f"the tokenizer has the ids 0 to {vocabulary - 1}"
            raise self.bad(f"the token id {wrong[0]}: {fix}")

    def ended(self) -> UserError:
        """Return the error of a pipeline that ends before the run does."""
        return self._fault("ended: let it yield more, or begin again by itself")

    def bad(self, problem: str) -> UserError:
        """Return the error of a document or window that cannot be used."""
        return self._fault(f"yields {problem}")

    def _fault(self, problem: str) -> UserError:
        self._stopped = True
        return UserError(f"{self._called}, after {self.read} items, {problem}")


def pack_state(state: object, field: str = FIELD) -> bytes:
    """Return a state as the bytes of a safetensors file."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    text = json.dumps(_packed(state, tensors, field))
    return save(tensors, {_STATE: text})


def read_state(path: Path) -> Any:
    """Return the state in a file of `pack_state`."""
    from safetensors import SafetensorError, safe_open

    from titan_loop.storage.regular_file import DamagedFileError

    try:
        with safe_open(path, "pt") as file:
            return _unpacked(json.loads(file.metadata()[_STATE]), file.get_tensor)
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise DamagedFileError(path, str(error), "choose another checkpoint") from error


def _packed(value: Any, tensors: dict[str, "Tensor"], where: str) -> Any:
    """Return a value as JSON, in which every object has one key: the kind of a value."""
    import torch

    def kept(kind: str, tensor: "Tensor") -> dict[str, str]:
        name = str(len(tensors))
        tensors[name] = tensor.detach().cpu().clone().contiguous()
        return {kind: name}

    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_packed(each, tensors, where) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [_packed(each, tensors, where) for each in value]}
    if isinstance(value, Mapping):
        pairs = value.items()
        return {
            "dict": [
                [_packed(k, tensors, where), _packed(v, tensors, f"{where}.{k}")] for k, v in pairs
            ]
        }
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, torch.Tensor):
        return kept("tensor", value)
    if isinstance(value, np.generic):
        return _packed(value.item(), tensors, where)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return kept("array", torch.from_numpy(value.copy()))
    raise UserError(
        f"{where}: the pipeline's state holds a {type(value).__name__}, which a checkpoint cannot "
        "store: let state_dict() return numbers, texts, lists, dicts, arrays and tensors"
    )


def _unpacked(value: Any, tensor: Callable[[str], "Tensor"]) -> Any:
    if isinstance(value, list):
        return [_unpacked(each, tensor) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "dict":
        return {_unpacked(key, tensor): _unpacked(each, tensor) for key, each in content}
    if kind == "tuple":
        return tuple(_unpacked(each, tensor) for each in content)
    if kind == "bytes":
        return bytes.fromhex(content)
    return tensor(content) if kind == "tensor" else tensor(content).numpy()


def _shuffles_stream(pipeline: object) -> bool:
    """Return whether a pipeline is made of objects of which one is datasets' shuffle buffer."""
    seen, left = {id(pipeline)}, deque([pipeline])
    while left and len(seen) < _MOST_OBJECTS:
        value = left.popleft()
        if type(value).__name__ == "BufferShuffledExamplesIterable":
            return True
        parts = value if isinstance(value, list | tuple) else vars(value).values()
        for part in parts:
            held = isinstance(part, list | tuple) or hasattr(part, "__dict__")
            if held and id(part) not in seen and not isinstance(part, ModuleType | type):
                seen.add(id(part))
                left.append(part)
    return False


def _told(error: Exception) -> str:
    """Return the last line of an error: torchdata puts a worker's traceback before it."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
