"""Compares a retrofitted model in other programs with titan_loop.

    python -m tools.retrofit_parity logits FOLDER RUN OUTPUT.json DOCUMENTS.jsonl...
    python -m tools.retrofit_parity tokens GGUF RUN OUTPUT.json ENGINES_PYTHON

`logits` needs transformers: the logits of the dense model's folder there and of RUN at R = 1 here,
on 32 documents. `tokens` asks llama.cpp for greedy tokens of the unrolled GGUF, RUN at its R here.
`bash tools/retrofit.sh --parity` runs both.
"""

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import torch

from titan_loop.checkpoint.model import load_model
from titan_loop.models.decoder import LoopDecoder
from titan_loop.runs.saved_run import SavedRun
from titan_loop.storage.json_files import read_jsonl, write_json
from titan_loop.text.tokenizer import TOKENIZER_NAME, load_tokenizer

DOCUMENTS = 32
DOCUMENT_TOKENS = 256
CLOSE = 1e-4
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Water boils at one hundred degrees because",
)
GREEDY_TOKENS = 48
DRIVER = Path("tests/support/llama_cpp_driver.py")


def _opened(run: str) -> tuple[SavedRun, LoopDecoder]:
    saved = SavedRun.open(run)
    length = DOCUMENT_TOKENS
    return saved, load_model(
        saved.checkpoint().path, saved.model_options, max_seq_len=length
    ).eval()


@torch.no_grad()
def _logits(model: LoopDecoder, ids: list[int], steps: int) -> torch.Tensor:
    return model.readout(model(torch.tensor([ids]), recurrent_steps=steps).hidden_RBLD[-1])[0]


@torch.no_grad()
def logits(folder: str, run: str, files: Sequence[str]) -> dict[str, Any]:
    """Return the largest difference of logits, over documents of all files in turn.

    Args:
        folder: The dense model, for transformers.
        run: A loop made of it.
        files: JSONL with a `text` each.
    """
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    saved, model = _opened(run)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(saved.path / TOKENIZER_NAME)
    read = [read_jsonl(Path(file), {"text": str}) for file in files]
    in_turn = (text for row in zip_longest(*read) for text in row if text is not None)
    largest, tokens = 0.0, 0
    for document in islice(in_turn, DOCUMENTS):
        ids = tokenizer.encode(document["text"], add_special_tokens=False).ids[:DOCUMENT_TOKENS]
        want = theirs(torch.tensor([ids])).logits[0]
        largest = max(largest, float((_logits(model, ids, 1) - want).abs().max()))
        tokens += len(ids)
    return {
        "program": f"transformers {importlib.metadata.version('transformers')}",
        "documents": DOCUMENTS,
        "tokens": tokens,
        "recurrent_steps": 1,
        "largest_difference_of_logits": largest,
        "aim": CLOSE,
        "reached": largest <= CLOSE,
    }


def tokens(gguf: str, run: str, engines_python: str) -> dict[str, Any]:
    """Return greedy continuations of `PROMPTS` here, and whether llama.cpp has the same.

    Args:
        gguf: The unrolled model.
        run: The loop.
        engines_python: A Python that has xllamacpp.
    """
    saved, model = _opened(run)
    steps = saved.checkpoint().recurrent_steps
    tokenizer = load_tokenizer(saved.path / TOKENIZER_NAME)
    prompts = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in PROMPTS]
    requests = [{"prompt": ids, "count": GREEDY_TOKENS, "vocabulary": 1} for ids in prompts]
    asked = json.dumps({"model": gguf, "requests": requests})
    answered = subprocess.run(
        [engines_python, str(DRIVER)], input=asked, stdout=subprocess.PIPE, text=True, check=True
    )
    answers = []
    for text, ids, answer in zip(PROMPTS, prompts, json.loads(answered.stdout), strict=True):
        own = list(ids)
        for _ in range(GREEDY_TOKENS):
            own.append(int(_logits(model, own, steps)[-1].argmax()))
        own = own[len(ids) :]
        same = own == answer["tokens"]
        answers.append({"prompt": text, "same": same, "continuation": tokenizer.decode(own)})
    return {
        "program": "llama.cpp (xllamacpp), fp32",
        "recurrent_steps": steps,
        "greedy_tokens": GREEDY_TOKENS,
        "answers": answers,
        "reached": all(answer["same"] for answer in answers),
    }


if __name__ == "__main__":
    what, model_path, run_path, output, *rest = sys.argv[1:]
    found = (
        logits(model_path, run_path, rest)
        if what == "logits"
        else tokens(model_path, run_path, *rest)
    )
    write_json(Path(output), found)
    print(json.dumps(found, indent=1))
    sys.exit(not found["reached"])
