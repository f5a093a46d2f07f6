"""Exported folders in MLX's own code: logits, gradients and greedy tokens."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from tests.families.ouro.hugging_face.conftest import convert
from tests.support.llama_runs import VOCABULARY
from titan_loop.families.loopcoder.formats import LoopCoderShape
from titan_loop.inference.engine import Engine
from titan_loop.inference.rows import Request

DRIVER = Path(__file__).with_name("mlx_driver.py")
CLOSE = 1e-5  # fp32 sums in another order, of values of size 1
RELATIVE = 1e-4  # of a gradient's largest element
LENGTH, TOKENS = 24, 64
PROMPT = [5, 9, 100, 33, 270, 12]

pytestmark = pytest.mark.engines


@pytest.mark.parametrize(
    "options",
    [{"loop_window": 7}, {"tie_weights": True, "n_kv_heads": 4, "rope_theta": 500.0}, {"dim": 96}],
    ids=["window", "tied", "wide"],
)
def test_logits_gradients_and_tokens_are_ours(
    mlx_python, make_run, tmp_path, ascii_tokenizer, options
):
    made = make_run(recurrent_steps=2, **options)
    out = tmp_path / "model"
    flags = ("--to", "loopcoder", "--tokenizer", ascii_tokenizer)
    convert("export", made.run, "--output", out, *flags)
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % VOCABULARY
    weight = torch.randn(2, LENGTH, VOCABULARY, generator=torch.Generator().manual_seed(0))
    asked = {"model": str(out), "ids": ids.tolist(), "weight": weight.tolist()}
    asked |= {"prompt": PROMPT, "count": TOKENS}
    done = subprocess.run(
        [mlx_python, str(DRIVER)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    model = made.model
    logits = model.readout(model(ids).hidden_RBLD[-1])
    torch.testing.assert_close(torch.tensor(answer["logits"]), logits, atol=CLOSE, rtol=0)
    (logits * weight).sum().backward()
    names = {name: parameter.grad for name, parameter in model.named_parameters()}
    shape = LoopCoderShape.from_config(json.loads((out / "config.json").read_text()))
    assert answer["gradients"].keys() == shape.written_shapes().keys()
    for name, found in answer["gradients"].items():
        want = names[shape.parameter_name(name)]
        close = RELATIVE * float(want.abs().max())
        torch.testing.assert_close(torch.tensor(found), want, atol=close, rtol=0)
    for cache in ("full", "window"):
        request = Request(prompt=PROMPT, max_new_tokens=TOKENS)
        (ours,) = Engine(model, kv_cache=cache).complete([request])
        assert ours.tokens == answer["tokens"]
