"""A conversation with a GGUF file; see tools/chat.sh, whose environment it needs."""

import argparse
import json
import struct
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp  # pyright: ignore[reportMissingImports]

GGUF_STRING = 8
"""The number of this type of a value in a GGUF file."""


def ask(server: Any, path: str, content: dict[str, Any]) -> dict[str, Any]:
    """Return the server's answer to a POST request."""
    request = urllib.request.Request(
        f"{server.listening_address}/{path}",
        json.dumps(content).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def text_of(start: bytes, key: str) -> str | None:
    """Return the value of a key that holds a text, from the start of a GGUF file."""
    found = start.find(key.encode() + struct.pack("<I", GGUF_STRING))
    if found < 0:
        return None
    begin = found + len(key) + 4 + 8
    (size,) = struct.unpack("<Q", start[begin - 8 : begin])
    return start[begin : begin + size].decode()


def why_not(start: bytes) -> str:
    """Return why llama.cpp did not load a file, as far as its keys tell, and what to do."""
    architecture = text_of(start, "general.architecture")
    if architecture == "ouro":
        return (
            "no released llama.cpp knows its architecture 'ouro'; use titan-loop generate, or "
            "train family nanbeige"
        )
    return f"its architecture is {architecture!r}; export it again, or set a newer llama.cpp up"


def main() -> int:
    """Read lines and print the model's answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    given = parser.parse_args()
    if not given.model.is_file():
        print(
            f"titan-loop: error: {given.model} is not a file; write one with titan-loop convert "
            "export RUN --to gguf --output MODEL.gguf",
            file=sys.stderr,
        )
        return 2
    with given.model.open("rb") as file:
        start = file.read(1 << 24)  # every key that is asked for stands here
    if text_of(start, "tokenizer.ggml.model") == "none":
        print(
            f"titan-loop: error: {given.model} has no tokenizer, which llama.cpp's server needs; "
            "export it again without --no-tokenizer",
            file=sys.stderr,
        )
        return 2
    params = xllamacpp.CommonParams()
    params.model.path = str(given.model)
    params.n_parallel = 1
    params.port = 0
    params.verbosity = 0
    try:
        server = xllamacpp.Server(params)
    except RuntimeError:
        print(
            f"titan-loop: error: llama.cpp cannot load {given.model}: {why_not(start)}",
            file=sys.stderr,
        )
        return 2
    chats = text_of(start, "tokenizer.chat_template") is not None
    print("Your turn:" if chats else "A text to continue:", file=sys.stderr)
    turns: list[dict[str, str]] = []
    sampling = {"n_predict": given.tokens, "max_tokens": given.tokens, "temperature": 0}
    for line in sys.stdin:
        if not line.strip():
            break
        try:
            if chats:
                turns.append({"role": "user", "content": line.rstrip("\n")})
                found = ask(server, "v1/chat/completions", {"messages": turns, **sampling})
                text = found["choices"][0]["message"]["content"]
                turns.append({"role": "assistant", "content": text})
            else:
                found = ask(server, "completion", {"prompt": line.rstrip("\n"), **sampling})
                text = found["content"]
        except urllib.error.HTTPError as error:
            reason = json.load(error)["error"]["message"]
            print(f"titan-loop: error: {reason}; begin again with less text", file=sys.stderr)
            return 2
        print(text, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
