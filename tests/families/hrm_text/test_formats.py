"""HRM-Text's folders, in and out, and its GGUF files in llama.cpp."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.families.hrm_text.contract import OTHER
from tests.families.ouro.hugging_face.conftest import convert
from tests.families.ouro.hugging_face.test_export import error_of
from tests.support.llama_cpp import (
    CLOSE,
    PROMPT,
    TOKENS,
    as_matrix,
    ask,
    log_probs,
)
from tests.support.llama_runs import VOCABULARY
from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.families.hrm_text.formats import HrmTextShape
from titan_loop.runs.saved_run import SavedRun


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_hidden_layers": 12}, "num_hidden_layers=12 is a cache of other cycles: H_cycles=2"),
        ({"prefix_lm": "yes"}, "prefix_lm='yes' must be true or false"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2 is not supported by titan_loop"),
    ],
)
def test_other_configs_are_one_line(make_run, tmp_path, capsys, changed, message):
    out = tmp_path / "out"
    convert("export", make_run().run, "--output", out, "--to", "hrm_text", "--no-tokenizer")
    config = json.loads((out / "config.json").read_text())
    said = "vLLM 0.32 reads" if config["prefix_lm"] else "vLLM 0.32 ignores that"
    assert said in (out / "README.md").read_text()
    (out / "config.json").write_text(json.dumps(config | changed))
    assert message in error_of(capsys, "import", out, "--output", tmp_path / "back")


def test_exports_that_a_format_cannot_hold_are_one_line(make_run, tmp_path, capsys):
    gated = make_run(exit_gate=True).run
    for to in ("hrm_text", "gguf"):
        arguments = ("export", gated, "--output", tmp_path / "out", "--to", to)
        assert "model.exit_gate=True: the HRM-Text format has no place" in error_of(
            capsys, *arguments
        )
    arguments = ("export", make_run().run, "--output", tmp_path / "out", "--to", "gguf-unrolled")
    assert "model.family=hrm_text: llama.cpp cannot run it unrolled" in error_of(capsys, *arguments)


def test_a_folder_with_a_tensor_for_each_matrix_is_read_too(make_run, tmp_path):
    """As earlier versions wrote it."""
    made, out = make_run(), tmp_path / "out"
    convert("export", made.run, "--output", out, "--to", "hrm_text", "--no-tokenizer")
    stored = load_file(out / "model.safetensors")
    shape = HrmTextShape.from_config(json.loads((out / "config.json").read_text()))
    separate = shape.opened(out)
    whole = {name: separate.read(name).contiguous() for name in shape.tensor_shapes()}
    assert len(whole) == 3 + 4 * 8
    gate = "model.H_module.layers.1.self_attn.gate_proj.weight"
    assert torch.equal(whole[gate], stored["model.H_module.layers.1.attn.gqkv_proj.weight"][:64])
    save_file(whole, out / "model.safetensors")
    convert("import", out, "--output", tmp_path / "back")
    reader = CheckpointReader(SavedRun.open(tmp_path / "back").checkpoint().path)
    for name, tensor in made.model.state_dict().items():
        assert torch.equal(reader.read(name), tensor), name


@pytest.mark.engines
@pytest.mark.parametrize(
    "options", [{}, OTHER, {"recurrent_steps": 1, "low_cycles": 4}], ids=["default", "other", "low"]
)
def test_greedy_tokens_and_logits_in_llama_cpp(
    python,
    make_run,
    tmp_path,
    ascii_tokenizer,
    options,
):
    made = make_run(**options)
    file = tmp_path / "model.gguf"
    convert("export", made.run, "--output", file, "--to", "gguf", "--tokenizer", ascii_tokenizer)
    request = {"prompt": PROMPT, "count": TOKENS, "vocabulary": VOCABULARY}
    (answer,) = ask(python, file, request)
    ours = log_probs(made.model, PROMPT + answer["tokens"], made.model.recurrent_steps)
    ours = ours[len(PROMPT) - 1 : -1]
    assert answer["tokens"] == ours.argmax(-1).tolist()
    torch.testing.assert_close(as_matrix(answer), ours, atol=CLOSE, rtol=0)
