"""The page of tools/demo/browser in headless Chromium: tokens, exit steps and times."""

import json
import os
import shutil
import statistics
import subprocess
import threading
from pathlib import Path

import pytest

from tests.families.ouro.hugging_face.conftest import tokenizer_file  # noqa: F401
from tests.formats.test_onnx import export, ours
from titan_loop.text.tokenizer import load_tokenizer
from tools.demo.browser.serve import serving

PROMPT = "def main(): # 17 Äpfel"
CASES = [(4, 0.4), (4, 1.0), (1, 1.0), (16, 1.0)]
"""R and threshold."""


@pytest.mark.browser
def test_tokens_and_exits_are_pythons_and_shallow_tokens_are_faster(tmp_path, tokenizer_file):  # noqa: F811
    chromium, node = shutil.which("chromium"), shutil.which("node")
    packages = os.environ.get("TITAN_LOOP_BROWSER_PACKAGES")
    if not (chromium and node and packages and "TITAN_LOOP_NODE_MODULES" in os.environ):
        pytest.skip("needs Chromium, node and packages of npm: tools/test_page.sh")
    pytest.importorskip("onnx", reason="see tools/test_page.sh")
    model, _, folder = export(tmp_path, "ouro", "--tokenizer", tokenizer_file)
    server = serving(Path(packages), folder, 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    asked = [
        {"prompt": PROMPT, "steps": steps, "threshold": threshold, "tokens": 50}
        for steps, threshold in CASES
    ]
    script = Path(__file__).with_name("browser.mjs")
    url = f"http://127.0.0.1:{server.server_port}/"
    command = [node, str(script), url, chromium, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    server.shutdown()
    thread.join()
    server.server_close()
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    tokenizer = load_tokenizer(tokenizer_file)
    prompt = tokenizer.encode(PROMPT).ids
    for case, answer in zip(CASES, answers, strict=True):
        ids, exits, _ = ours(model, prompt, 50, *case)
        assert [int(each["id"]) for each in answer["tokens"]] == ids
        assert [int(each["step"]) for each in answer["tokens"]] == exits
        written = tokenizer.decode(ids, skip_special_tokens=False)
        assert answer["text"] == PROMPT + written.rstrip("\ufffd")
    assert len({each["step"] for each in answers[0]["tokens"]}) > 1
    # A sixteenth of the layers: far from what another program's load does to a median.
    shallow, deep = (
        statistics.median(float(each["ms"]) for each in answer["tokens"]) for answer in answers[2:]
    )
    assert shallow < deep
