#!/usr/bin/env bash
# llama.cpp b11549 (xllamacpp): `llama_detokenize`, the C function behind the `prompt` that its server gives back,
# drops spaces before `.`, `,`, `?`, `!` and `'s` for the pre-tokenizers gpt-2, dbrx, llama-bpe and others, and keeps
# them for smollm, qwen2 and deepseek-v3. Nothing in the file asks for it. Ids are right, and so are
# `llama_token_to_piece` and the server's /detokenize, which give the same text back.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check install \
    xllamacpp==2026.10.11549 gguf==0.19.0
cat >"$folder/try.py" <<'PYTHON'
import json
import urllib.request

import gguf
import numpy as np
import xllamacpp

TEXT = "f(a , b) ; it 's 1 ? No ."
CLEANED = "f(a, b) ; it's 1? No."
LOSES = ("gpt-2", "dbrx", "llama-bpe", "falcon", "bloom")
KEEPS = ("smollm", "qwen2", "deepseek-v3", "gpt-4o")
# GPT-2's characters for the bytes of ASCII: a space is Ġ.
TOKENS = ["<end>", *map(chr, range(33, 127)), "Ġ", "Ċ", "Ġa"]


def write(path, name):
    """A model of one layer of zeros, whose tokens are characters and " a"."""
    writer, width = gguf.GGUFWriter(path, "llama"), 32
    writer.add_context_length(256)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(width)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(TOKENS) - 1))
    writer.add_token_merges(["Ġ a"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    shapes = {"token_embd": (len(TOKENS), width), "output_norm": (width,)}
    for each in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        shapes[f"blk.0.{each}"] = (width, width)
    shapes |= {"blk.0.attn_norm": (width,), "blk.0.ffn_norm": (width,)}
    for each, shape in shapes.items():
        writer.add_tensor(f"{each}.weight", np.zeros(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ask(server, path, **content):
    asked = urllib.request.Request(
        f"{server.listening_address}/{path}",
        json.dumps(content).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked) as answer:
        return json.load(answer)


for name in (*LOSES, *KEEPS):
    write("model.gguf", name)
    params = xllamacpp.CommonParams()
    params.model.path = "model.gguf"
    params.warmup, params.verbosity, params.port = False, 0, 0
    server = xllamacpp.Server(params)
    ids = ask(server, "tokenize", content=TEXT, add_special=False)["tokens"]
    pieces = ask(server, "detokenize", tokens=ids)["content"]
    prompt = ask(server, "completion", prompt=ids, n_predict=1)["prompt"]
    print(f"{name}: {len(ids)} ids of {TEXT!r} come back as {prompt!r}, piece by piece as {pieces!r}")
    assert pieces == TEXT and prompt == (CLEANED if name in LOSES else TEXT), "it has changed"
PYTHON
cd "$folder" && "$folder/venv/bin/python" try.py 2>log || { tail -n 20 log; exit 1; }
