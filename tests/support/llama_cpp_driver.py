"""Asks llama.cpp; runs in an environment of its own, with xllamacpp and nothing of this project.

    python llama_cpp.py < requests.json > answers.json

Input: {"model": PATH, "requests": [...]}. A request is {"text": …}, answered by token ids,
{"messages": …, "tools": …}, answered by the text up to the next answer, or {"prompt": ids,
"count": n, "vocabulary": V}: n greedy tokens after the prompt, each with the log-probability of all
V tokens by id, or with "given": ids instead of "count", where these follow.
"""

import json
import os
import sys
import urllib.request
from typing import Any

import xllamacpp  # pyright: ignore[reportMissingImports]


def serve(model: str) -> xllamacpp.Server:
    """Load a model for one client, computed and cached in fp32 on one thread."""
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup = False
    params.verbosity = 0
    params.port = 0
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(params)


def ask(server: xllamacpp.Server, path: str, **content: Any) -> dict[str, Any]:
    """Return the answer of the server."""
    request = urllib.request.Request(
        f"{server.listening_address}/{path}",
        json.dumps(content).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def answer(server: xllamacpp.Server, request: dict[str, Any]) -> Any:
    """Return the answer to one request."""
    if "text" in request:
        flags = {"add_special": False, "parse_special": False}
        return ask(server, "tokenize", content=request["text"], **flags)["tokens"]
    if "messages" in request:
        return ask(server, "apply-template", **request)["prompt"]
    ids, given = [*request["prompt"]], request.get("given", [])
    log_probs: list[dict[int, float]] = []
    for index in range(len(given) or request["count"]):
        # One token at a time: all before it come from the cache of keys and values.
        found = ask(
            server,
            "completion",
            prompt=ids,
            n_predict=1,
            temperature=0,
            n_probs=request["vocabulary"],
            cache_prompt=True,
        )
        (token,) = found["completion_probabilities"]
        log_probs.append({each["id"]: each["logprob"] for each in token["top_logprobs"]})
        ids.append(given[index] if given else token["id"])
    return {"tokens": ids[len(request["prompt"]) :], "log_probs": log_probs}


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    running = serve(asked["model"])
    json.dump([answer(running, request) for request in asked["requests"]], sys.stdout)
    sys.stdout.flush()
    os._exit(0)  # without the server's own end, which waits for its threads
