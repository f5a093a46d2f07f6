"""GGUF: one file with weights, tokenizer and chat template, for llama.cpp and programs built on it.

    LlamaShape ─► keys of the architecture ─┐
    tokenizer.json ─► tokens, merges ───────┼─► header
    checkpoint ─► one tensor at a time ─────┴─► quantised, written

For most architectures llama.cpp rotates neighbouring elements of a head, while Llama's checkpoints
and this project rotate halves, so the rows of query and key matrices are put in llama.cpp's order.

Source: the GGUF specification of ggml, and the tensor names of the `gguf` package.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

import titan_loop
from titan_loop.errors import UserError
from titan_loop.formats import llama_cpp
from titan_loop.formats.format import Export, Format
from titan_loop.formats.gguf_tokenizer import (
    check_ids,
    open_vocabulary,
    tokenizer_problem,
    write_tokenizer,
)
from titan_loop.formats.gguf_types import MIXTURES, WITHOUT_WHEEL, kind_of, wanted_kind
from titan_loop.formats.llama_shape import HEAD, LlamaShape
from titan_loop.models.family import completed_architecture
from titan_loop.plugins import find, names
from titan_loop.storage.staged_folder import staged_file

if TYPE_CHECKING:
    from gguf import GGUFWriter

logger = logging.getLogger(__name__)

UNROLLED = "llama"
"""`general.architecture` of a file in which every visit is a layer of its own."""

MOST_VISITS = 512
"""llama.cpp's `LLAMA_MAX_LAYERS`: the most layers of a model, every visit of a loop counted."""

_WITHOUT_TOKENIZER = (
    "has no tokenizer; programs that give llama.cpp's library ids can run it, llama-server and "
    "llama-cli cannot"
)
_FORMS = ("looped", "unrolled")


def neighbours(weight: Tensor, heads: int) -> Tensor:
    """Return the rows of a query or key matrix with the halves of every head interleaved."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def write(export: Export, output: Path) -> None:
    """Write a file, which appears under its name when it is complete.

    Only one tensor is in memory at a time.
    """
    import gguf

    shape = export.shape
    architecture, _ = shape.gguf_engine()
    logging.getLogger("gguf").setLevel(logging.WARNING)
    if any(kind not in WITHOUT_WHEEL for kind in MIXTURES[export.dtype][1:]):
        llama_cpp.require_library(f"--dtype={export.dtype}")
    vocabulary = None if export.tokenizer is None else open_vocabulary(export.tokenizer)
    with staged_file(output) as path:
        with closing(gguf.GGUFWriter(path, architecture)) as writer:
            _write_keys(writer, export, output.stem)
            writer.add_file_type(MIXTURES[export.dtype].file)
            if export.tokenizer is None or vocabulary is None:
                writer.add_tokenizer_model("none")
            else:
                write_tokenizer(writer, vocabulary, export.tokenizer, rows=shape.vocab_size)
            tensors = _announce_tensors(writer, export)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
        # Not by the writer: numpy's `tofile` does not notice if a full disk cuts a small tensor.
        with path.open("ab") as file:
            for produce in tensors:
                file.write(bytes(-file.tell() % writer.data_alignment))
                file.write(produce().data)
            file.write(bytes(-file.tell() % writer.data_alignment))
        if vocabulary is not None and shape.gguf_is_released:
            check_ids(path, vocabulary)
    logger.info(f"{output}: {shape.gguf_programs if vocabulary else _WITHOUT_TOKENIZER}")


def _write_keys(writer: "GGUFWriter", export: Export, name: str) -> None:
    shape = export.shape
    writer.add_name(name)
    writer.add_description(f"exported by titan_loop {titan_loop.__version__}")
    writer.add_context_length(shape.max_positions)
    writer.add_embedding_length(shape.dim)
    writer.add_feed_forward_length(shape.hidden_dim)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_rope_dimension_count(shape.rotary_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_vocab_size(shape.vocab_size)
    adders = {bool: writer.add_bool, float: writer.add_float32, str: writer.add_string}
    architecture, _ = shape.gguf_engine()
    for key, value in {"block_count": shape.n_layers, **shape.gguf_metadata()}.items():
        adders.get(type(value), writer.add_uint32)(f"{architecture}.{key}", value)


def _announce_tensors(writer: "GGUFWriter", export: Export) -> list[Callable[[], np.ndarray]]:
    """Add name and shape of every tensor; return their producers, in the same order."""
    from gguf import GGMLQuantizationType, quants

    shape = export.shape
    heads: dict[str, int] = {}
    if shape.gguf_engine()[1]:
        heads = {"self_attn.q_proj.": shape.n_heads, "self_attn.k_proj.": shape.n_kv_heads}
    shapes, read = shape.gguf_stored(shape.written_shapes(), export.read)
    dtypes = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
    pending: list[Callable[[], np.ndarray]] = []
    coarser: dict[tuple[int, Any, Any], dict[str, None]] = {}

    def produce(tensor: str, kind: Any) -> np.ndarray:
        weight = read(tensor).to(torch.float32)
        for inner, number in heads.items():
            if inner in tensor:
                weight = neighbours(weight, number)
        values = weight.contiguous().numpy()
        quantise = quants.quantize if kind in WITHOUT_WHEEL else llama_cpp.quantise
        return quantise(values, kind)

    for tensor, size in shapes.items():
        name = shape.gguf_name(tensor)
        if name is None:
            continue
        stored = GGMLQuantizationType.F32
        # Norms stay in fp32, as in every file of llama.cpp.
        if len(size) > 1:
            place = {"layers": shape.n_layers, "tied": HEAD not in shapes}
            wanted = wanted_kind(export.dtype, name, **place)
            stored = kind_of(export.dtype, name, size[-1], **place)
            if stored != wanted:
                coarser.setdefault((size[-1], wanted, stored), {})[name.split(".")[-2]] = None
        dtype = np.dtype(dtypes.get(stored, np.uint8))
        raw = None if stored in dtypes else stored
        held = size if raw is None else quants.quant_shape_to_byte_shape(size, stored)
        bytes_ = int(np.prod(held)) * dtype.itemsize
        writer.add_tensor_info(name, held, dtype, bytes_, raw_dtype=raw)
        pending.append(partial(produce, tensor, stored))
    for (columns, wanted, stored), matrices in coarser.items():
        logger.warning(
            f"--dtype={export.dtype}: rows of {columns} are no multiple of {wanted.name}'s block; "
            f"{stored.name} instead for {', '.join(matrices)}"
        )
    return pending


def _fitting(unrolled: bool, architecture: Mapping[str, Any], **arguments: int) -> LlamaShape:
    family = completed_architecture(architecture)["family"]
    forms = [find("formats", name) for name in names("formats")]
    for shape in (form.gguf or form.folder for form in forms):
        if shape is None or shape.family != family or shape.gguf_architecture is None:
            continue
        if (shape.gguf_architecture == UNROLLED) == unrolled:
            made = shape.from_architecture(architecture, **arguments)
            made.gguf_metadata()  # refuses what llama.cpp would compute otherwise
            if made.slots > MOST_VISITS:
                raise UserError(
                    f"llama.cpp runs at most {MOST_VISITS} layers, and this model has {made.slots} "
                    "with every recurrent step counted; export fewer steps with --recurrent-steps"
                )
            return made
    raise UserError(f"model.family={family}: llama.cpp cannot run it {_FORMS[unrolled]}")


GGUF = Format(
    summary="file for llama.cpp in which layers are stored once and looped",
    shape=partial(_fitting, False),
    write=write,
    dtypes=tuple(MIXTURES),
    programs=attrgetter("gguf_programs"),
    tokenizer_problem=tokenizer_problem,
)
GGUF_UNROLLED = replace(
    GGUF,
    summary="file for llama.cpp in which every visit is a layer of Llama, Qwen 3, Gemma 3, …",
    shape=partial(_fitting, True),
)
