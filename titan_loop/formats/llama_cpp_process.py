"""llama.cpp by its C functions, in a process of its own: what it cannot load ends the process.

    python llama_cpp_process.py LIBRARY MODEL < request.json > answer.json

A request is {"texts": […]}, answered by the ids of each, or {"rows": [{"ids": …, "labels": …}, …]},
answered by the nats of each row, summed over its labels; a negative label counts nothing. Its
structures are passed as whole blocks, of which only stable first fields are named here.
"""

import ctypes
import json
import os
import sys
from typing import Any

import numpy as np

_SMALLEST_CONTEXT = 256


class _Parameters(ctypes.Structure):
    """Parameters of a model or context; larger than either is."""

    _fields_ = [
        ("n_ctx", ctypes.c_uint32),
        ("n_batch", ctypes.c_uint32),
        ("rest", ctypes.c_uint8 * 1016),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


class Model:
    """A GGUF file in llama.cpp, with its default settings."""

    def __init__(self, library: str, path: str) -> None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int32
        results: dict[str, Any] = {
            "llama_model_default_params": _Parameters,
            "llama_context_default_params": _Parameters,
            "llama_model_load_from_file": pointer,
            "llama_model_get_vocab": pointer,
            "llama_vocab_n_tokens": integer,
            "llama_vocab_is_eog": ctypes.c_bool,
            "llama_tokenize": integer,
            "llama_init_from_model": pointer,
            "llama_batch_init": _Batch,
            "llama_decode": integer,
            "llama_get_memory": pointer,
            "llama_memory_clear": None,
            "llama_set_n_threads": None,
            "llama_get_logits_ith": ctypes.POINTER(ctypes.c_float),
        }
        self._call = ctypes.CDLL(library)
        for name, result in results.items():
            getattr(self._call, name).restype = result
        parameters = self._call.llama_model_default_params()
        loaded = self._call.llama_model_load_from_file(path.encode(), parameters)
        if not loaded:
            sys.exit(1)
        self._model = pointer(loaded)
        self._vocabulary = pointer(self._call.llama_model_get_vocab(self._model))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, whose special tokens are text."""
        raw = text.encode()
        most = len(raw) + 8
        ids = (ctypes.c_int32 * most)()
        flags = ctypes.c_bool(False), ctypes.c_bool(False)
        found = self._call.llama_tokenize(self._vocabulary, raw, len(raw), ids, most, *flags)
        return ids[:found]

    def ends(self, token: int) -> bool:
        """Return whether a token ends an answer."""
        return bool(self._call.llama_vocab_is_eog(self._vocabulary, ctypes.c_int32(token)))

    def nats(self, rows: list[dict[str, list[int]]]) -> list[float]:
        """Return the negative log likelihood of each row's labels."""
        longest = max(len(row["ids"]) for row in rows)
        settings = self._call.llama_context_default_params()
        settings.n_ctx = settings.n_batch = max(longest, _SMALLEST_CONTEXT)
        context = ctypes.c_void_p(self._call.llama_init_from_model(self._model, settings))
        threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
        self._call.llama_set_n_threads(context, threads, threads)
        memory = ctypes.c_void_p(self._call.llama_get_memory(context))
        batch = self._call.llama_batch_init(longest, 0, 1)
        size = self._call.llama_vocab_n_tokens(self._vocabulary)
        sums: list[float] = []
        for row in rows:
            self._call.llama_memory_clear(memory, ctypes.c_bool(True))
            batch.n_tokens = len(row["ids"])
            for index, token in enumerate(row["ids"]):
                batch.token[index], batch.pos[index] = token, index
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
                batch.logits[index] = row["labels"][index] >= 0
            if self._call.llama_decode(context, batch):
                sys.exit("llama_decode failed")
            total = 0.0
            for index, label in enumerate(row["labels"]):
                if label < 0:
                    continue
                found = self._call.llama_get_logits_ith(context, index)
                logits = np.ctypeslib.as_array(found, (size,)).astype(np.float64)
                total += float(np.logaddexp.reduce(logits) - logits[label])
            sums.append(total)
        return sums


if __name__ == "__main__":
    model = Model(*sys.argv[1:])
    request = json.load(sys.stdin)
    answer = [*map(model.encode, request["texts"])] if "texts" in request else None
    json.dump(model.nats(request["rows"]) if answer is None else answer, sys.stdout)
