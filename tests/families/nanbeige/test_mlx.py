"""Exported folders in MLX's own code: logits and greedy tokens."""

import json
import math
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contracts.folders import opened
from tests.families.nanbeige.test_llama_cpp import DENSE, LOOPS, SPLIT
from tests.families.ouro.hugging_face.conftest import convert
from tests.support.llama_cpp import PROMPT, TOKENS, export, log_probs

DRIVER = Path(__file__).with_name("mlx_lm_driver.py")
CLOSE = 1e-4  # in nats, of logits whose standard deviation is 1; fp32 sums in another order

YARN = {"qk_norm": "head", "head_dim": 32, "rope_scaling": "yarn", "rope_factor": 4.0}
YARN |= {"rope_original": 16}
USUAL = {"rope_attention_factor": 0.1 * math.log(4) + 1}
LONG = {"window": 128}  # every token
MLX_DENSE = {
    **DENSE,
    "gemma2": {**DENSE["gemma2"], **LONG},
    "yarn": {**YARN, **USUAL, "n_layers": 4},
}
OTHERWISE = {
    "window-of-mistral": ({"window": 5, "windowed_layers": (0, 1)}, "no windows for mistral"),
    "window-of-gemma2": (DENSE["gemma2"], "no windows for gemma2: its answers are right up to 5"),
    "no-period": (
        {**DENSE["gemma3"], "n_layers": 12, "recurrent_steps": 1, "windowed_layers": (0, 2, 5)},
        "knows windows of Gemma 3 in a period alone",
    ),
    "yarn-factor": ({**YARN, "rope_attention_factor": 1.5}, "attention_factor as 1.139"),
    "yarn-truncate": ({**YARN, **USUAL, "rope_truncate": False}, "truncate as true"),
    "wide-heads": ({"attention_biases": "qkv", "head_dim": 32}, "does not load qwen2 with heads"),
    "untied-gemma2": (
        {**DENSE["gemma2"], **LONG, "tie_weights": False},
        "does not load a Gemma 2 whose head",
    ),
}

Q8_CLOSE = 0.2  # in nats, random weights

pytestmark = pytest.mark.engines


@pytest.mark.parametrize(
    ("to", "options"),
    [
        *(("nanbeige", options) for options in LOOPS.values()),
        ("nanbeige", {"n_kv_heads": 1, "tie_weights": True, "rope_theta": 500.0}),
        ("llama-unrolled", {**SPLIT, "n_kv_heads": 4, "recurrent_steps": 4}),
        *(("llama-unrolled", options) for options in MLX_DENSE.values()),
    ],
    ids=[*LOOPS, "tied", "unrolled", *MLX_DENSE],
)
def test_greedy_tokens_and_logits_are_ours(
    mlx_python, make_run, tmp_path, ascii_tokenizer, to, options
):
    made = make_run(**options)
    flags = ("--to", to, "--tokenizer", ascii_tokenizer)
    folder = export(made.run, tmp_path / "model", *flags)
    answer = ask(mlx_python, folder)
    ours = log_probs(made.model, PROMPT + answer["tokens"], made.model.recurrent_steps)
    ours = ours[len(PROMPT) - 1 : -1]
    assert answer["tokens"] == ours.argmax(-1).tolist()
    assert "MLX has" not in (folder / "README.md").read_text()
    found = torch.tensor(answer["log_probs"], dtype=torch.float64)
    torch.testing.assert_close(found, ours, atol=CLOSE, rtol=0)


def ask(python: str, folder: Path, **more: str) -> Any:
    """Return MLX's greedy tokens and log-probabilities; None if it does not load the folder."""
    request = json.dumps({"model": str(folder), "prompt": PROMPT, "count": TOKENS, **more})
    answered = subprocess.run(
        [python, str(DRIVER)], input=request, capture_output=True, text=True, check=False
    )
    return None if answered.returncode else json.loads(answered.stdout)


@pytest.mark.parametrize(("options", "words"), OTHERWISE.values(), ids=OTHERWISE)
def test_what_mlx_does_otherwise_is_said(
    mlx_python, make_run, tmp_path, ascii_tokenizer, caplog, options, words
):
    made = make_run(**options)
    flags = ("--to", "llama-unrolled", "--tokenizer", ascii_tokenizer)
    folder = export(made.run, tmp_path / "model", *flags)
    assert words in (folder / "README.md").read_text()
    assert words in caplog.text
    answer = ask(mlx_python, folder)
    if "not load" in words:
        assert answer is None
        return
    ours = log_probs(made.model, PROMPT + answer["tokens"], made.model.recurrent_steps)
    found = torch.tensor(answer["log_probs"], dtype=torch.float64)
    assert float((found - ours[len(PROMPT) - 1 : -1]).abs().max()) > 100 * CLOSE


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
            input="kept", capture_output=True, text=True, cwd=tmp_path, check=True,
        )  # fmt: skip
        assert "Generation" in answered.stdout or answered.stdout == "kept\n"


@pytest.mark.parametrize("to", ["nanbeige", "llama-unrolled"])
def test_a_saved_prompt_quantised_and_tuned_weights(
    mlx_python, make_run, tmp_path, ascii_tokenizer, to
):
    made = make_run(n_kv_heads=4, tie_weights=True)
    folder = export(made.run, tmp_path / "model", "--to", to, "--tokenizer", ascii_tokenizer)
    lines = [json.dumps({"text": f"The number {n} is even: {n % 2 == 0}."}) for n in range(40)]
    for split in ("train", "valid"):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{split}.jsonl").write_text("\n".join(lines))

    def mlx(*words: object) -> str:
        done = subprocess.run(
            [mlx_python, "-m", "mlx_lm", *map(str, words)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    whole = ask(mlx_python, folder)
    assert ask(mlx_python, folder, saved=str(tmp_path / "cache.safetensors")) == whole
    small = ("--q-group-size", 32, "--q-bits", 8)
    mlx("convert", "--hf-path", folder, "--mlx-path", tmp_path / "small", "-q", *small)
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert config["quantization"]["bits"] == 8
    given = torch.tensor(ask(mlx_python, tmp_path / "small")["log_probs"])[0]
    error = (given - torch.tensor(whole["log_probs"])[0]).abs().max()
    assert CLOSE < float(error) < Q8_CLOSE
    tuning = ("--num-layers", -1, "--batch-size", 2, "--iters", 6, "--learning-rate", 1e-3)
    adapters = tmp_path / "adapters"
    data = ("--train", "--data", tmp_path / "data", "--steps-per-report", 1)
    said = mlx("lora", "--model", folder, *data, "--adapter-path", adapters, *tuning)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", said)
    losses = [float(loss) for loss in re.findall(r"val\s+([0-9.]+)", plain)]
    assert losses[-1] < losses[0]
    fused = tmp_path / "fused"
    mlx("fuse", "--model", folder, "--adapter-path", adapters, "--save-path", fused)
    convert("import", fused, "--output", tmp_path / "run")
    answer = ask(mlx_python, fused)
    assert answer["log_probs"] != whole["log_probs"]
    tuned = opened(tmp_path / "run")
    ours = log_probs(tuned, PROMPT + answer["tokens"], tuned.recurrent_steps)
    found = torch.tensor(answer["log_probs"], dtype=torch.float64)
    torch.testing.assert_close(found, ours[len(PROMPT) - 1 : -1], atol=CLOSE, rtol=0)
