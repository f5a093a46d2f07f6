"""Retrofitted models as Llama: unrolled exactly, adapters merged; else refused in one line."""

import pytest
import torch

from tests.families.ouro.hugging_face.conftest import convert
from tests.families.ouro.hugging_face.test_export import error_of
from tests.families.retrofit.conftest import Retrofit, logits, opened

TIED = ("--prelude", 0, "--core", 2, "--coda", 0, "--rank", 5)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_tied_layers_unroll_with_their_adapters(retrofit, tmp_path, ascii_tokenizer, steps):
    looped = retrofit("tied", *TIED)
    flags = ("--tokenizer", ascii_tokenizer, "--recurrent-steps", steps)
    out, back = tmp_path / "out", tmp_path / "back"
    convert("export", looped.run, "--to", "retrofit-unrolled", "--output", out, *flags)
    convert("import", out, "--output", back)
    dense = opened(back)
    assert len(dense.layers) == 2 * steps
    torch.testing.assert_close(logits(dense, 1), logits(looped.model, steps), atol=2e-4, rtol=0)


def test_a_gguf_file_has_merged_matrices(retrofit: Retrofit, tmp_path):
    gguf = pytest.importorskip("gguf")
    looped = retrofit("tied", *TIED)
    flags = ("--no-tokenizer", "--recurrent-steps", 2, "--output", tmp_path / "a.gguf")
    convert("export", looped.run, "--to", "gguf-unrolled", *flags)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    state = looped.model.state_dict()
    at = "layers.1.feed_forward.w2."
    want = state[f"{at}weight"] + state[f"{at}up"][1] @ state[f"{at}down"][1]
    torch.testing.assert_close(torch.tensor(tensors["blk.3.ffn_down.weight"].data), want)


def test_another_family_s_format_is_one_line(retrofit: Retrofit, capsys, tmp_path):
    words = ("--to", "nanbeige", "--output", tmp_path / "out", "--no-tokenizer")
    message = error_of(capsys, "export", retrofit("identity").run, *words)
    assert "holds models of family nanbeige alone" in message
    assert not [*tmp_path.iterdir()]
