#!/usr/bin/env bash
# lm-eval 0.4.13 with transformers 5.24.0: `loglikelihood_rolling` of the model `hf` encodes a text with
# the tokenizer's own template and puts BOS in front as the prefix token, too. With a tokenizer that
# adds BOS (Llama, TinyLlama), the first number is log p(BOS | BOS), and the text stands behind two BOS.
# Seen: for the text "x" it differs from log p(x | BOS) of the same model by several nats.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" torch==2.13.0
"${pip[@]}" transformers==5.24.0 accelerate==1.12.0 lm-eval==0.4.13 tokenizers==0.23.3
cat >"$folder/model.py" <<'PYTHON'
"""A random Llama of 300 bytes' tokens, with or without BOS in its tokenizer's template."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def save(folder: str, bos: bool) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    special = {"eos_token": "</s>", **({"bos_token": "<s>"} if bos else {})}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
        bos_token_id=0 if bos else None, eos_token_id=1, initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
PYTHON
cat >"$folder/try.py" <<'PYTHON'
from types import SimpleNamespace

import torch
from lm_eval.models.huggingface import HFLM
from model import save

save("bos", bos=True)
lm = HFLM(pretrained="bos", dtype="float32", device="cpu", batch_size=1)
(rolling,) = lm.loglikelihood_rolling([SimpleNamespace(args=("x",))])
x = lm.tokenizer.convert_tokens_to_ids("x")


def log_p(*tokens: int) -> float:
    with torch.no_grad():
        logits = lm.model(torch.tensor([tokens[:-1]])).logits[0].double().log_softmax(-1)
    return sum(float(logits[i, token]) for i, token in enumerate(tokens[1:]))


after_one, after_two = log_p(0, x), log_p(0, 0, x)
print(f"rolling {rolling:.4f}, log p(x | BOS) {after_one:.4f}, log p(BOS x | BOS) {after_two:.4f}")
assert abs(rolling - after_two) < 1e-4, "it no longer scores BOS after BOS"
assert abs(rolling - after_one) > 0.5
PYTHON
cd "$folder" && HF_HUB_OFFLINE=1 TQDM_DISABLE=1 "$folder/venv/bin/python" try.py
