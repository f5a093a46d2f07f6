"""Greedy tokens of one engine, and their cost; runs in the engine's own environment.

    python engine_driver.py ENGINE MODEL '{"prompt": ids, "tokens": n, "steps": R}' > answer.json

Prints the tokens, CPU milliseconds for each after the prompt, and MiB in use afterwards.
"""

# pyright: reportMissingImports=false
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Generate = Callable[[list[int], int], list[int]]
"""Maps a prompt and a number of tokens to so many tokens."""


def onnxruntime_(model: Path, steps: int, threshold: float = 1.0) -> Generate:
    """Return the function of an exported ONNX folder."""
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model / "model.onnx", options)
    config = json.loads((model / "config.json").read_text())
    slots = config["slots_outside"] + config["slots_per_step"]
    empty = np.zeros((slots, 1, config["num_key_value_heads"], 0, config["head_dim"]), np.float32)

    def generate(prompt: list[int], tokens: int) -> list[int]:
        feeds: dict[str, Any] = {"past_keys": empty, "past_values": empty, "steps": np.array(steps)}
        if config["exit_gate"]:
            feeds["threshold"] = np.array(threshold, np.float32)
        ids, new = [], prompt
        for _ in range(tokens):
            feeds["input_ids"] = np.array([new])
            logits, feeds["past_keys"], feeds["past_values"], _ = session.run(None, feeds)
            new = [int(logits.argmax())]
            ids += new
        return ids

    return generate


def llama_cpp(model: Path, steps: int) -> Generate:
    """Return the function of a GGUF file, whose number of steps is its own."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/support"))
    from llama_cpp_driver import ask, serve

    server = serve(str(model))

    def generate(prompt: list[int], tokens: int) -> list[int]:
        asked = {"n_predict": tokens, "temperature": 0, "ignore_eos": True, "return_tokens": True}
        return ask(server, "completion", prompt=prompt, cache_prompt=False, **asked)["tokens"]

    return generate


def transformers_(model: Path, steps: int) -> Generate:
    """Return the function of a folder, whose number of steps is its own."""
    import torch
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, trust_remote_code=True).eval()

    def generate(prompt: list[int], tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        found = loaded.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
        )
        return found[0, len(prompt) :].tolist()

    return generate


def titan_loop_(model: Path, steps: int, **more: Any) -> Generate:
    """Return the function of a run; an older revision knows fewer arguments of the engine."""
    from titan_loop.inference.engine import Engine
    from titan_loop.inference.loading import load_checkpoint
    from titan_loop.inference.rows import Request

    engine = Engine(load_checkpoint(str(model)).model, recurrent_steps=steps, **more)

    def generate(prompt: list[int], tokens: int) -> list[int]:
        return [*engine.complete([Request(prompt=prompt, max_new_tokens=tokens)])[0].tokens]

    return generate


ENGINES: dict[str, Callable[..., Generate]] = {
    "onnxruntime": onnxruntime_,
    "llama.cpp": llama_cpp,
    "transformers": transformers_,
    "titan_loop": titan_loop_,
}


def main() -> int:
    """Measure one engine."""
    name, model, asked = sys.argv[1:]
    request = json.loads(asked)
    prompt, tokens = request.pop("prompt"), request.pop("tokens")
    generate = ENGINES[name](Path(model), **request)
    generate(prompt, 8)
    began = time.process_time()
    generate(prompt, 1)
    first = time.process_time()
    found = generate(prompt, tokens)
    seconds = (time.process_time() - first) - (first - began)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    mebibytes = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    answer = {"tokens": found, "ms": 1000 * seconds / (tokens - 1), "mebibytes": mebibytes}
    print(f"\n{json.dumps(answer)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
