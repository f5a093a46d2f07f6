"""Exported folders in MLX's own code: logits and greedy tokens."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch

from tests.families.nanbeige.test_llama_cpp import LOOPS, SPLIT
from tests.support.llama_cpp import PROMPT, TOKENS, export, log_probs

DRIVER = Path(__file__).with_name("mlx_lm_driver.py")
CLOSE = 1e-4  # in nats, of logits whose standard deviation is 1; fp32 sums in another order

pytestmark = pytest.mark.engines


@pytest.mark.parametrize(
    ("to", "options"),
    [
        *(("nanbeige", options) for options in LOOPS.values()),
        ("nanbeige", {"n_kv_heads": 1, "tie_weights": True, "rope_theta": 500.0}),
        ("llama-unrolled", {**SPLIT, "n_kv_heads": 4, "recurrent_steps": 4}),
    ],
    ids=[*LOOPS, "tied", "unrolled"],
)
def test_greedy_tokens_and_logits_are_ours(
    mlx_python, make_run, tmp_path, ascii_tokenizer, to, options
):
    made = make_run(**options)
    flags = ("--to", to, "--tokenizer", ascii_tokenizer)
    folder = export(made.run, tmp_path / "model", *flags)
    request = json.dumps({"model": str(folder), "prompt": PROMPT, "count": TOKENS})
    answered = subprocess.run(
        [mlx_python, str(DRIVER)], input=request, capture_output=True, text=True, check=False
    )
    assert answered.returncode == 0, answered.stderr
    answer = json.loads(answered.stdout)
    ours = log_probs(made.model, PROMPT + answer["tokens"], made.model.recurrent_steps)
    ours = ours[len(PROMPT) - 1 : -1]
    assert answer["tokens"] == ours.argmax(-1).tolist()
    found = torch.tensor(answer["log_probs"], dtype=torch.float64)
    torch.testing.assert_close(found, ours, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("to", ["nanbeige", "llama-unrolled"])
def test_the_lines_of_the_card_work_as_printed(mlx_python, make_run, tmp_path, ascii_tokenizer, to):
    folder = export(make_run().run, tmp_path / "model", "--to", to, "--tokenizer", ascii_tokenizer)
    card = (folder / "README.md").read_text()
    (line,) = re.findall("^    python (-m mlx_lm .+)$", card, re.MULTILINE)
    loads = re.findall(r"`(load\(.+?\))`", card)
    assert len(loads) == (to == "nanbeige")
    reads = [
        f"import sys; from mlx_lm import load; {load}; print(sys.stdin.read())" for load in loads
    ]
    for words in (shlex.split(line), *(["-c", read] for read in reads)):
        answered = subprocess.run(
            [mlx_python, *words],
            input="kept",
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=True,
        )
        assert "Generation" in answered.stdout or answered.stdout == "kept\n"
