"""The folder of a GGUF file is the folder that the file was made from."""

import json

import pytest
import torch

from tests.families.ouro.hugging_face.conftest import convert
from tests.support.llama_runs import VOCABULARY
from titan_loop.checkpoint.safetensors_files import SafetensorsFolder

pytest.importorskip("gguf")
smollm2 = pytest.importorskip("tools.gguf_model")


def test_a_file_becomes_the_folder_it_was_made_from(make_run, tmp_path, ascii_tokenizer):
    run = make_run(recurrent_steps=1, tie_weights=True, rope_theta=500.0).run
    file, folder, back = tmp_path / "model.gguf", tmp_path / "folder", tmp_path / "back"
    named = ("--tokenizer", ascii_tokenizer)
    convert("export", run, "--to", "gguf-unrolled", "--output", file, "--chatml", *named)
    convert("export", run, "--to", "llama-unrolled", "--output", folder, *named)
    smollm2.main(back, [file])
    want, got = SafetensorsFolder(folder), SafetensorsFolder(back)
    assert {*got.shapes} == {*want.shapes} - {"lm_head.weight"}  # tied
    for name in got.shapes:
        torch.testing.assert_close(got.read(name), want.read(name), atol=0, rtol=0)
    configs = [json.loads((each / "config.json").read_text()) for each in (folder, back)]
    for key in ("hidden_size", "num_key_value_heads", "rope_theta", "vocab_size"):
        assert configs[0][key] == configs[1][key], key
    assert configs[1]["vocab_size"] == VOCABULARY
