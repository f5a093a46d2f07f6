"""What holds for every exported folder, whatever its format."""

import json

import pytest
from safetensors.torch import load_file

from tests.families.folders import CASES, write_folder
from titan_loop.formats.format import get_format
from titan_loop.plugins import names

XLLM = {"xllm", "xllm-moe"}  # their own code unties


def test_every_folder_has_a_case():
    folders = {name for name in names("formats") if "q8_0" not in get_format(name).dtypes}
    assert CASES.keys() == folders - XLLM


@pytest.mark.parametrize("name", CASES)
def test_a_tied_matrix_is_written_once(tmp_path, name):
    written = write_folder(tmp_path, name, None, tie_weights=True)
    tensors = load_file(written.folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    assert json.loads((written.folder / "config.json").read_text())["tie_word_embeddings"]
    assert tensors["model.embed_tokens.weight"].shape == (300, written.model.config.dim)
