"""`README.md` of an exported folder: what the model is, where it comes from, how it is used."""

import json
from collections.abc import Mapping
from math import prod
from typing import Any

import titan_loop
from titan_loop.checkpoint.hugging_face.ouro_shape import OuroShape

_TEMPLATE = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- looped-language-model
- ouro
- custom_code
---

# {name}

A looped language model: {n_layers} layers, applied {recurrent_steps} times to every token, with an
exit gate (LoopLM; Zhu et al. 2025, arXiv 2510.25741). Exported by titan_loop {version}.

| | |
|---|---|
| parameters | {parameters:,} |
| width, layers, heads | {dim}, {n_layers}, {n_heads} |
| feed-forward width, vocabulary | {hidden_dim}, {vocab_size} |
| recurrent steps | {recurrent_steps} |
| weights | {dtype} |
| window of the last stage | {max_positions} |
| trained for | {tokens:,} tokens, {step:,} steps in this stage |

## Use

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
    prompt = {prompt}
    answer = model.generate(**prompt, max_new_tokens=32)
    print(tokenizer.batch_decode(answer))

`generate` and `forward` take `exit_at_step=k` (read out after step k, counted from 0) or
`exit_threshold=q` (read out each token once its cumulated exit probability reaches q). Steps that
no token in the batch needs are not computed, and caching stays exact. For another number of
recurrent steps: `from_pretrained(..., total_ut_steps=n)`.

`configuration_ouro.py` and `modeling_ouro.py` are titan_loop's own, tested with transformers 4.57.6
and 5.x; names and shapes of the tensors are those of the released Ouro models.

## Lineage

    {lineage}
"""
_PROMPT = 'tokenizer(["Once upon a time"], return_tensors="pt")'
_CHAT_PROMPT = """tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello!"}],
        add_generation_prompt=True, return_dict=True, return_tensors="pt",
    )"""


def model_card(
    name: str, shape: OuroShape, manifest: Mapping[str, Any], *, dtype: str, has_chat: bool
) -> str:
    """Return the card's text.

    Args:
        name: Of the folder.
        shape: Of the model.
        manifest: Of the checkpoint it was exported from.
        dtype: Of the exported weights.
        has_chat: Whether there is a chat template.
    """
    lineage = {name: manifest.get(name) for name in ("step", "created", "lineage")}
    return _TEMPLATE.format(
        name=name,
        version=titan_loop.__version__,
        parameters=sum(prod(size) for size in shape.parameter_shapes().values()),
        dim=shape.dim,
        n_layers=shape.n_layers,
        n_heads=shape.n_heads,
        hidden_dim=shape.hidden_dim,
        vocab_size=shape.vocab_size,
        recurrent_steps=shape.recurrent_steps,
        max_positions=shape.max_positions,
        dtype=dtype,
        tokens=manifest["trainer"]["tokens"],
        step=manifest["step"],
        prompt=_CHAT_PROMPT if has_chat else _PROMPT,
        lineage=json.dumps(lineage, indent=2).replace("\n", "\n    "),
    )
