"""HRM-Text's folders, in and out, and its GGUF files in llama.cpp."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.families.hrm_text.contract import OTHER
from tests.families.ouro.hugging_face.conftest import convert
from tests.families.ouro.hugging_face.test_export import error_of
from tests.support.llama_cpp import CLOSE, PROMPT, TOKENS, as_matrix, ask, log_probs
from tests.support.llama_runs import VOCABULARY
from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.families.hrm_text.formats import HrmTextShape
from titan_loop.runs.saved_run import SavedRun


def test_exports_that_a_format_cannot_hold_are_one_line(make_run, tmp_path, capsys):
    for to, run, message in (
        ("gguf", make_run(exit_gate=True).run, "model.exit_gate=True: the HRM-Text format has no"),
        ("gguf-unrolled", make_run().run, "family=hrm_text: llama.cpp cannot run it unrolled"),
    ):
        arguments = ("export", run, "--output", tmp_path / "out", "--to", to)
        assert message in error_of(capsys, *arguments)


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
    python, make_run, tmp_path, ascii_tokenizer, options
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
