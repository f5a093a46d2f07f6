#!/usr/bin/env bash
# lm-eval 0.4.13 with transformers 5.24.0: `loglikelihood` of the model `hf` takes an empty context (the
# prefix token stands in), but a context of white space alone, whose white space it moves into the
# continuation, becomes one of no tokens: an AssertionError for a tokenizer without BOS, which ends the
# whole evaluation. A multiple-choice task with `doc_to_text: "\n"` is enough. With BOS it works.
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

from lm_eval.models.huggingface import HFLM
from model import save

asked = [SimpleNamespace(args=("\n", "yes"))]
empty = [SimpleNamespace(args=("", "\nyes"))]
for bos in (True, False):
    save(f"bos-{bos}", bos=bos)
    lm = HFLM(pretrained=f"bos-{bos}", dtype="float32", device="cpu", batch_size=1)
    ((expected, _),) = lm.loglikelihood(empty)
    try:
        ((score, _),) = lm.loglikelihood(asked)
        said = f"{score:.4f}"
    except AssertionError:
        said = "AssertionError"
    print(f"BOS {bos}: empty context {expected:.4f}, context of a line break {said}")
    assert (said == "AssertionError") == (not bos), "it has changed"
PYTHON
cd "$folder" && HF_HUB_OFFLINE=1 TQDM_DISABLE=1 "$folder/venv/bin/python" try.py
