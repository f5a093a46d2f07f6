#!/usr/bin/env bash
# llama.cpp b11549 (xllamacpp) beside tokenizers 0.23.3: its pre-tokenizer `gpt-4o` is not the pattern of
# GPT-4o's and gpt-oss' tokenizers (o200k). It ends a word before every combining mark and takes ASCII alone
# for upper and lower case, so prose in Hindi, Bengali, Tamil and others gets other ids, without a warning.
# `granite-embed-multi-97m` keeps the marks and gives the ids of o200k's pattern.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check install \
    xllamacpp==2026.10.11549 tokenizers==0.23.3 gguf==0.19.0
cat >"$folder/try.py" <<'PYTHON'
import json
import urllib.request

import gguf
import numpy as np
import xllamacpp
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

TEXTS = {
    "Hindi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता प्राप्त है।",
    "Bengali": "সমস্ত মানুষ স্বাধীনভাবে সমান মর্যাদা এবং অধিকার নিয়ে জন্মগ্রহণ করে।",
    "English": "All human beings are born free and equal in dignity and rights.",
}
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + SHORT
    + r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + SHORT
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
    pre_tokenizers.Split(Regex(O200K), "isolated"),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
])
trainer = trainers.BpeTrainer(
    vocab_size=1000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
)
tokenizer.train_from_iterator([*TEXTS.values()] * 3, trainer)
model = json.loads(tokenizer.to_str())["model"]


def write(path, name):
    """A model of one layer of zeros, with the tokenizer."""
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer, width = gguf.GGUFWriter(path, "llama"), 32
    writer.add_context_length(256)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(width)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    square = (width, width)
    shapes = {"token_embd": (len(tokens), width), "output_norm": (width,)}
    for each in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        shapes[f"blk.0.{each}"] = square
    shapes |= {"blk.0.attn_norm": (width,), "blk.0.ffn_norm": (width,)}
    for each, shape in shapes.items():
        writer.add_tensor(f"{each}.weight", np.zeros(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ids_by(name):
    write("model.gguf", name)
    params = xllamacpp.CommonParams()
    params.model.path = "model.gguf"
    params.warmup, params.verbosity, params.port = False, 0, 0
    server, found = xllamacpp.Server(params), {}
    for language, text in TEXTS.items():
        asked = urllib.request.Request(
            f"{server.listening_address}/tokenize",
            json.dumps({"content": text, "add_special": False}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked) as answer:
            found[language] = json.load(answer)["tokens"]
    return found


wanted = {language: tokenizer.encode(text).ids for language, text in TEXTS.items()}
for name in ("gpt-4o", "granite-embed-multi-97m"):
    found = ids_by(name)
    for language, ids in found.items():
        print(f"{name}: {language}: {len(ids)} ids, tokenizers has {len(wanted[language])}")
    equal = {language for language in TEXTS if found[language] == wanted[language]}
    assert equal == ({"English"} if name == "gpt-4o" else {*TEXTS}), "it has changed"
PYTHON
cd "$folder" && "$folder/venv/bin/python" try.py 2>log || { tail -n 20 log; exit 1; }
